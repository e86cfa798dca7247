"""Primitives on rows, in numba or in numpy.

A row holds the least time of one subproblem for every amount of memory, from 0 slots up. It never rises: infinite
where nothing fits, then falling. Every kernel is written once, in terms of these primitives; with numba both are
compiled and cached on disk, without it the primitives run as numpy expressions. The arithmetic is the same
operation for operation, so the answers are the same bit for bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from elbowroom.solve.kernels.compiling import HAVE_NUMBA, compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

if HAVE_NUMBA:
    # The loops run over views that start at 0: indices that cannot be negative let the compiler vectorize.

    @compiled
    def relax(best: Floats, left: Floats, right: Floats, shift: int, start: int, stop: int, cost: float) -> None:
        """best[m] = min(best[m], (cost + right[m - shift]) + left[m]) for m in [start, stop)."""
        if start >= stop:
            return
        b, p, q = best[start:stop], left[start:stop], right[start - shift : stop - shift]
        for i in range(len(b)):
            value = (cost + q[i]) + p[i]
            b[i] = value if value < b[i] else b[i]

    @compiled
    def relax_one(best: Floats, right: Floats, shift: int, start: int, stop: int, cost: float) -> None:
        """best[m] = min(best[m], cost + right[m - shift]) for m in [start, stop)."""
        if start >= stop:
            return
        b, q = best[start:stop], right[start - shift : stop - shift]
        for i in range(len(b)):
            value = cost + q[i]
            b[i] = value if value < b[i] else b[i]

    @compiled
    def least_of_largest(x: Ints, y: Ints, z: Ints) -> int:
        """The least over i of max(x[i], y[i], z[i])."""
        best = max(x[0], y[0], z[0])
        for i in range(1, len(x)):
            best = min(best, max(x[i], y[i], z[i]))
        return best

    @compiled
    def first_finite(row: Floats) -> int:
        """The least memory with a finite time (one past the end if there is none)."""
        for m in range(len(row)):
            if row[m] < np.inf:
                return m
        return len(row)

else:

    def relax(best: Floats, left: Floats, right: Floats, shift: int, start: int, stop: int, cost: float) -> None:
        if stop > start:
            value = (cost + right[start - shift : stop - shift]) + left[start:stop]
            np.minimum(best[start:stop], value, out=best[start:stop])

    def relax_one(best: Floats, right: Floats, shift: int, start: int, stop: int, cost: float) -> None:
        if stop > start:
            value = cost + right[start - shift : stop - shift]
            np.minimum(best[start:stop], value, out=best[start:stop])

    def least_of_largest(x: Ints, y: Ints, z: Ints) -> int:
        return np.maximum(np.maximum(x, y), z).min()  # type: ignore[no-any-return]

    def first_finite(row: Floats) -> int:
        finite = row < np.inf
        return int(finite.argmax()) if finite[-1] else len(row)


@compiled
def end_above(row: Floats, start: int, bound: float) -> int:
    """One past the last m ≥ start with row[m] > bound; the row never rises, so this is a bisection."""
    low, high = start, len(row)
    while low < high:
        middle = (low + high) // 2
        if row[middle] > bound:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def slots_of(size: int, unit: int) -> int:
    """Whole slots that hold `size` bytes."""
    return (size + unit - 1) // unit
