"""The dynamic program for joins of equal steps: 001 Theorem 3, with the vector b.

A state is what is left of each branch (ℓ1..ℓK) and the slots m. Branch k, the last to finish, goes i steps
forward and its new position is stored; the smaller join follows with one slot less; then those i steps are
reversed as a single chain with every slot the finished branches leave. b needs no dimension of its own: it is 1
for a branch that has been cut (its gradient is wanted), and as given for one that has not.
"""

from __future__ import annotations

import numpy as np

from elbowroom.solve.kernels.compiling import compiled
from elbowroom.solve.kernels.rows import Floats, Ints, relax


@compiled
def fill_single(forward_time: float, backward_time: float, table: Floats) -> None:
    """table[l, m]: least time to reverse l + 1 steps from one stored input and one gradient, with m slots in all
    (001 Theorem 1). For l > 0 three slots are needed; for l = 0 two."""
    table[:, :] = np.inf
    table[0, 2:] = backward_time
    width = table.shape[1]
    for length in range(1, table.shape[0]):
        for i in range(1, length + 1):
            relax(table[length], table[i - 1], table[length - i], 1, 3, width, i * forward_time)


@compiled
def fill_join(
    begin: int,
    end: int,
    lengths: Ints,
    strides: Ints,
    keep: Ints,
    forward_time: float,
    loss_time: float,
    single: Floats,
    table: Floats,
) -> None:
    """Fill the rows of states begin..end-1. single[B, l, m] is `fill_single`'s with B slots taken by gradients."""
    branches, width = len(lengths), table.shape[1]
    left = np.zeros(branches, dtype=np.int64)
    for state in range(begin, end):
        best = table[state]
        best[:] = np.inf
        if state == 0:
            best[branches:] = loss_time
            continue
        gradients = 0
        for k in range(branches):
            left[k] = state // strides[k] % (lengths[k] + 1)
            gradients += keep[k] if left[k] == lengths[k] else 1
        for k in range(branches):
            others = gradients - (keep[k] if left[k] == lengths[k] else 1)
            for i in range(1, left[k] + 1):
                rest = table[state - i * strides[k]]
                relax(best, single[others, i - 1], rest, 1, 1, width, i * forward_time)
