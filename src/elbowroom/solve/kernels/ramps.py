"""Primitives for rows over bytes that are on their way, in numba or in numpy.

While bytes leave for the host, the room of what computes grows at the rate of the link; while they come back, it
shrinks (001 Lemma 8). The formulas below are written once and take numbers as well as arrays of them. Rows and planes
hold times at whole levels of memory; between two levels the time is taken to lie on the straight line between theirs,
and beyond the last to go on as it did before it, which is right: there each further byte is waited for.
"""

from __future__ import annotations

import numpy as np

from elbowroom.solve.kernels.compiling import HAVE_NUMBA, compiled
from elbowroom.solve.kernels.rows import Floats


@compiled
def waiting(missing: float, rate: float) -> float:
    """How long the link takes to make the room that is missing (negative: there is some to spare)."""
    return np.maximum(missing / rate, 0.0)  # type: ignore[no-any-return]


@compiled
def left_over(on_the_way: float, time: float, rate: float) -> float:
    """Bytes that are still on their way after a time."""
    return np.maximum(on_the_way - time * rate, 0.0)  # type: ignore[no-any-return]


if HAVE_NUMBA:

    @compiled
    def between(row: Floats, at: float) -> float:
        """The value of a row of at least two levels at a place between them, or beyond the last."""
        low = min(int(at), len(row) - 2)
        part = at - low
        return (1.0 - part) * row[low] + part * row[low + 1]

else:

    def between(row: Floats, at: float) -> float:
        low = np.minimum(np.asarray(at).astype(np.int64), len(row) - 2)
        part = at - low
        return (1.0 - part) * row[low] + part * row[low + 1]  # type: ignore[no-any-return]


# --- times of parts while bytes come back: `coming` of them must be there at the end -----------------------------


@compiled
def last_time(
    coming: float, forward: float, backward: float, need_f: float, need_b: float, stored: float, rate: float
) -> float:
    """A forward and at once its backward; needs are less the budget, so that room to spare is negative."""
    before = waiting(need_f + stored + coming - rate * backward, rate)
    return (forward + backward) + np.maximum(before, waiting(need_b + stored + coming, rate))  # type: ignore[no-any-return]


@compiled
def save_time(
    coming: float,
    rest: Floats,
    level: float,
    forward: float,
    backward: float,
    need_f: float,
    need_b: float,
    stored: float,
    rate: float,
) -> float:
    """A forward that saves all, what follows (`rest`: its times by level of bytes to come), and the backward."""
    wait_b = waiting(need_b + stored + coming, rate)
    before = left_over(coming, backward + wait_b, rate)
    middle = between(rest, before / level)
    wait_f = waiting(need_f + stored + left_over(before, middle, rate), rate)
    return ((forward + backward) + middle) + (wait_f + wait_b)


@compiled
def split_time(
    coming: float, left: float, right: Floats, level: float, walk: float, need: float, stored: float, rate: float
) -> float:
    """Forwards up to a split, what lies right of it (times by level), and then what lies left (a time)."""
    before = left_over(coming, left, rate)
    middle = between(right, before / level)
    wait = waiting(need + stored + left_over(before, middle, rate), rate)
    return ((walk + middle) + left) + wait


# --- the same for whole rows, and planes -------------------------------------------------------------------------

if HAVE_NUMBA:

    @compiled
    def relax_last(
        best: Floats,
        level: float,
        forward: float,
        backward: float,
        need_f: float,
        need_b: float,
        stored: float,
        rate: float,
    ) -> None:
        """best[d] = min(best[d], last_time) with d levels to come."""
        for d in range(len(best)):
            value = last_time(d * level, forward, backward, need_f, need_b, stored, rate)
            best[d] = min(best[d], value)

    @compiled
    def relax_save(
        best: Floats,
        rest: Floats,
        level: float,
        forward: float,
        backward: float,
        need_f: float,
        need_b: float,
        stored: float,
        rate: float,
    ) -> None:
        """best[d] = min(best[d], save_time) with d levels to come."""
        for d in range(len(best)):
            value = save_time(d * level, rest, level, forward, backward, need_f, need_b, stored, rate)
            best[d] = min(best[d], value)

    @compiled
    def relax_split(
        best: Floats,
        left: Floats,
        right: Floats,
        level: float,
        walk: float,
        need: float,
        stored: float,
        rate: float,
    ) -> None:
        """best[d] = min(best[d], split_time) with d levels to come."""
        for d in range(len(best)):
            value = split_time(d * level, left[d], right, level, walk, need, stored, rate)
            best[d] = min(best[d], value)

    @compiled
    def mixed(low: Floats, high: Floats, part: float) -> Floats:
        """Part of the way from one array to another."""
        return (1.0 - part) * low + part * high

    @compiled
    def stretched(row: Floats, width: int) -> Floats:
        """A row with so many levels, those beyond its own as `between` sees them."""
        longer = np.empty(width)
        for d in range(width):
            longer[d] = between(row, float(d))
        return longer

    @compiled
    def relax_plane(
        best: Floats, plane: Floats, row_at: Floats, row_cost: Floats, column_at: Floats, column_cost: Floats
    ) -> None:
        """best[f, b] = min(best[f, b], row_cost[f] + column_cost[b] + the plane at row_at[f], column_at[b])."""
        height, width = plane.shape
        lows = np.empty(len(column_at), dtype=np.int64)
        parts = np.empty(len(column_at))
        for b in range(len(column_at)):
            lows[b] = min(int(column_at[b]), width - 2)
            parts[b] = column_at[b] - lows[b]
        line = np.empty(width)
        for f in range(len(row_at)):
            low = min(int(row_at[f]), height - 2)
            part = row_at[f] - low
            for k in range(width):
                line[k] = (1.0 - part) * plane[low, k] + part * plane[low + 1, k]
            for b in range(len(column_at)):
                found = (1.0 - parts[b]) * line[lows[b]] + parts[b] * line[lows[b] + 1]
                value = (row_cost[f] + column_cost[b]) + found
                best[f, b] = value if value < best[f, b] else best[f, b]

else:

    def relax_last(
        best: Floats,
        level: float,
        forward: float,
        backward: float,
        need_f: float,
        need_b: float,
        stored: float,
        rate: float,
    ) -> None:
        coming = np.arange(len(best)) * level
        value = last_time(coming, forward, backward, need_f, need_b, stored, rate)  # type: ignore[arg-type]
        np.minimum(best, value, out=best)

    def relax_save(
        best: Floats,
        rest: Floats,
        level: float,
        forward: float,
        backward: float,
        need_f: float,
        need_b: float,
        stored: float,
        rate: float,
    ) -> None:
        coming = np.arange(len(best)) * level
        value = save_time(coming, rest, level, forward, backward, need_f, need_b, stored, rate)  # type: ignore[arg-type]
        np.minimum(best, value, out=best)

    def relax_split(
        best: Floats,
        left: Floats,
        right: Floats,
        level: float,
        walk: float,
        need: float,
        stored: float,
        rate: float,
    ) -> None:
        coming = np.arange(len(best)) * level
        value = split_time(coming, left[: len(best)], right, level, walk, need, stored, rate)  # type: ignore[arg-type]
        np.minimum(best, value, out=best)

    def mixed(low: Floats, high: Floats, part: float) -> Floats:
        return (1.0 - part) * low + part * high

    def stretched(row: Floats, width: int) -> Floats:
        return between(row, np.arange(width, dtype=np.float64))  # type: ignore[arg-type, return-value]

    def relax_plane(
        best: Floats, plane: Floats, row_at: Floats, row_cost: Floats, column_at: Floats, column_cost: Floats
    ) -> None:
        height, width = plane.shape
        rows = np.minimum(row_at.astype(np.int64), height - 2)
        columns = np.minimum(column_at.astype(np.int64), width - 2)
        down, right = (row_at - rows)[:, None], column_at - columns
        lines = (1.0 - down) * plane[rows] + down * plane[rows + 1]
        found = (1.0 - right) * lines[:, columns] + right * lines[:, columns + 1]
        np.minimum(best, (row_cost[:, None] + column_cost[None, :]) + found, out=best)
