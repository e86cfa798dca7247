"""The dynamic program for towers of unequal steps that meet at the loss.

Two tables. `fill_tower` is 001 Theorem 6 for one tower: R(p, q, m) is the least time to run backwards q to p + 1 from
the activation at p, which is not counted, with m slots besides. `fill_meeting` generalizes 001 Theorem 3: a state is
the position that each tower has reached for good. One of them moves on: either its next step saves all, or it walks
to a later position and keeps only where it started, to reverse that stretch alone when all later steps of all towers
are done. An activation inside a saved set stays until that step's backward; one on its own is free when the step
after it is done. Which of the two a tower stands on is part of the state (`inside`, one bit per tower).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from elbowroom.problem import Towers
from elbowroom.solve.kernels.compiling import compiled
from elbowroom.solve.kernels.persistent import row_of
from elbowroom.solve.kernels.rows import Floats, Ints, relax, relax_one, slots_of


class Heights(NamedTuple):
    """Towers as arrays [tower, position], padded to the longest; position 0 is the input."""

    unit: int  # bytes in a slot
    in_place: bool
    loss_time: float
    loss_overhead: int
    lengths: Ints
    strides: Ints  # of a tower's steps left, in a state's number
    output: Ints
    gradient: Ints
    kept: Ints  # the gradient that stays when everything beyond a position is done
    over_f: Ints
    over_b: Ints
    saved: Ints  # -1: its backward needs its input alone
    forward: Floats
    both: Floats  # forward and backward, or the backward alone where nothing is saved
    elapsed: Floats  # time of forwards 1..ℓ
    reach: Ints  # [tower, p, q]: bytes, besides the activation at p, to walk from there to q


def heights_of(problem: Towers, unit: int) -> Heights:
    towers = problem.towers
    longest = max(len(tower) for tower in towers)

    def table(rows: list[list[Any]], kind: type = np.int64) -> Any:
        found: Any = np.zeros((len(rows), longest + 1), dtype=kind)
        for k, row in enumerate(rows):
            found[k, : len(row)] = row
        return found

    def of_steps(value: str) -> list[list[Any]]:
        return [[0, *(getattr(step, value) for step in tower.steps)] for tower in towers]

    gradient = table([list(tower.gradient_bytes) for tower in towers])
    kept = gradient.copy()
    kept[:, 0] *= [tower.keep_gradient for tower in towers]
    forward = table(of_steps("forward_time"), np.float64)
    lengths = np.array([len(tower) for tower in towers], dtype=np.int64)
    made = [
        [
            0,
            *(
                step.backward_time + (step.forward_time if step.saved_bytes is not None else 0)
                for step in tower.steps
            ),
        ]
        for tower in towers
    ]
    sets = [[-1, *(-1 if step.saved_bytes is None else step.saved_bytes for step in tower.steps)] for tower in towers]
    heights = Heights(
        unit=unit,
        in_place=bool(problem.in_place),
        loss_time=float(problem.loss_time),
        loss_overhead=problem.loss_overhead_bytes,
        lengths=lengths,
        strides=np.cumprod([1, *(lengths + 1)], dtype=np.int64)[:-1],
        output=table([list(tower.output_bytes) for tower in towers]),
        gradient=gradient,
        kept=kept,
        over_f=table(of_steps("forward_overhead_bytes")),
        over_b=table(of_steps("backward_overhead_bytes")),
        saved=table(sets),
        forward=forward,
        both=table(made, np.float64),
        elapsed=np.cumsum(forward, axis=1),
        reach=np.zeros((len(towers), longest + 1, longest + 1), dtype=np.int64),
    )
    fill_reach(heights)
    return heights


@compiled
def fill_reach(heights: Heights) -> None:
    for k in range(len(heights.lengths)):
        for p in range(heights.lengths[k]):
            largest = 0
            for q in range(p + 1, heights.lengths[k] + 1):
                before, after = heights.output[k, q - 1] if q > p + 1 else 0, heights.output[k, q]
                held = max(before, after) if heights.in_place else before + after
                largest = max(largest, held + heights.over_f[k, q])
                heights.reach[k, p, q] = largest


# --- what an operation needs ---------------------------------------------------------------------------------


@compiled
def need_backward(heights: Heights, k: int, step: int) -> int:
    """Gradients and overhead of a backward, besides its input and its saved set."""
    before, after = heights.gradient[k, step], heights.gradient[k, step - 1]
    held = max(before, after) if heights.in_place else before + after
    return held + heights.over_b[k, step]


@compiled
def need_saving(heights: Heights, k: int, step: int, gradient: int) -> int:
    """Bytes, besides its input, for a step's forward that saves all under a gradient, and later its backward."""
    saved = heights.saved[k, step]
    return max(gradient + saved + heights.over_f[k, step], saved + need_backward(heights, k, step))


@compiled
def need_loss(heights: Heights, inside: int) -> int:
    """Bytes for the loss, besides outputs inside saved sets."""
    need = heights.loss_overhead
    for k in range(len(heights.lengths)):
        output = 0 if inside >> k & 1 else heights.output[k, heights.lengths[k]]
        gradient = heights.gradient[k, heights.lengths[k]]
        need += max(output, gradient) if heights.in_place else output + gradient
    return need


@compiled
def standing(heights: Heights, state: int, inside: int) -> int:
    """Bytes of the activations on their own that the towers stand on."""
    total = 0
    for k in range(len(heights.lengths)):
        if not inside >> k & 1:
            total += heights.output[k, position(heights, state, k)]
    return total


@compiled
def waiting(heights: Heights, state: int, k: int) -> int:
    """Bytes of the gradients of all towers but k, when everything beyond the state is done."""
    total = 0
    for j in range(len(heights.lengths)):
        if j != k:
            total += heights.kept[j, position(heights, state, j)]
    return total


@compiled
def position(heights: Heights, state: int, k: int) -> int:
    return heights.lengths[k] - state // heights.strides[k] % (heights.lengths[k] + 1)


# --- the least time, for every memory ------------------------------------------------------------------------


@compiled
def fill_tower(heights: Heights, k: int, table: Floats) -> None:
    """table[row_of(p + 1, q)]: R(p, q, ·) of tower k."""
    n, width = heights.lengths[k], table.shape[1]
    table[:, :] = np.inf
    for p in range(n - 1, -1, -1):
        for q in range(p + 1, n + 1):
            best = table[row_of(p + 1, q, n)]
            saved, gradient = heights.saved[k, p + 1], heights.gradient[k, q]
            if q == p + 1:
                need = need_backward(heights, k, q) if saved < 0 else need_saving(heights, k, q, gradient)
                best[min(width, slots_of(need, heights.unit)) :] = heights.both[k, q]
                continue
            if saved >= 0:
                shift = slots_of(saved, heights.unit)
                start = max(shift, slots_of(need_saving(heights, k, p + 1, gradient), heights.unit))
                relax_one(best, table[row_of(p + 2, q, n)], shift, start, width, heights.both[k, p + 1])
            for i in range(p + 1, q):
                shift = slots_of(heights.output[k, i], heights.unit)
                start = max(shift, slots_of(gradient + heights.reach[k, p, i], heights.unit))
                cost = heights.elapsed[k, i] - heights.elapsed[k, p]
                left, right = table[row_of(p + 1, i, n)], table[row_of(i + 1, q, n)]
                relax(best, left, right, shift, start, width, cost)


@compiled
def fill_meeting(heights: Heights, begin: int, end: int, variants: int, alone: Floats, table: Floats) -> None:
    """table[state · variants + inside]: least time for everything beyond the positions of states begin to end - 1.

    Memory is all but what earlier choices hold. `alone[k]` is `fill_tower`'s.
    """
    width = table.shape[1]
    for state in range(begin, end):
        for inside in range(variants):
            best = table[state * variants + inside]
            best[:] = np.inf
            if state == 0:
                best[min(width, slots_of(need_loss(heights, inside), heights.unit)) :] = heights.loss_time
                continue
            stands = standing(heights, state, inside)
            for k in range(len(heights.lengths)):
                move_tower(heights, state, inside, k, stands, variants, alone, table)


@compiled
def move_tower(
    heights: Heights, state: int, inside: int, k: int, stands: int, variants: int, alone: Floats, table: Floats
) -> None:
    """Try everything that tower k can do next."""
    best, width, n = table[state * variants + inside], table.shape[1], heights.lengths[k]
    p = position(heights, state, k)
    if p == n:
        return
    held = 0 if inside >> k & 1 else heights.output[k, p]
    hold = slots_of(held, heights.unit)
    gradients = waiting(heights, state, k)
    wait = slots_of(gradients, heights.unit)
    saved = heights.saved[k, p + 1]
    if saved >= 0:
        need = need_to_save(heights, k, p + 1, stands, held, gradients)
        shift = hold + slots_of(saved, heights.unit)
        after = table[(state - heights.strides[k]) * variants + (inside | 1 << k)]
        relax_one(best, after, shift, max(shift, slots_of(need, heights.unit)), width, heights.both[k, p + 1])
    for q in range(p + 1, n + 1):
        after = table[(state - (q - p) * heights.strides[k]) * variants + (inside & ~(1 << k))]
        start = max(hold + wait, slots_of(stands + heights.reach[k, p, q], heights.unit))
        if start < width:
            cost = heights.elapsed[k, q] - heights.elapsed[k, p]
            relax(best[hold:], after, alone[k, row_of(p + 1, q, n)], wait, start - hold, width - hold, cost)


@compiled
def need_to_save(heights: Heights, k: int, step: int, stands: int, held: int, gradients: int) -> int:
    """Bytes for a step that saves all where towers meet, and for its backward when the later steps are done."""
    saved = heights.saved[k, step]
    forward = stands + saved + heights.over_f[k, step]
    return max(forward, held + gradients + saved + need_backward(heights, k, step))


# --- the least memory ----------------------------------------------------------------------------------------


@compiled
def fill_least_tower(heights: Heights, k: int, least: Ints) -> None:
    """least[p, q]: the fewest bytes, besides the activation at p, to run backwards q to p + 1."""
    n = heights.lengths[k]
    for p in range(n - 1, -1, -1):
        for q in range(p + 1, n + 1):
            saved, gradient = heights.saved[k, p + 1], heights.gradient[k, q]
            if q == p + 1:
                least[p, q] = need_backward(heights, k, q) if saved < 0 else need_saving(heights, k, q, gradient)
                continue
            best = np.int64(2**62)
            if saved >= 0:
                best = max(need_saving(heights, k, p + 1, gradient), saved + least[p + 1, q])
            for i in range(p + 1, q):
                walk = gradient + heights.reach[k, p, i]
                best = min(best, max(walk, max(heights.output[k, i] + least[i, q], least[p, i])))
            least[p, q] = best


@compiled
def fill_least_meeting(heights: Heights, variants: int, alone: Ints, least: Ints) -> None:
    """least[state · variants + inside]: the fewest bytes for everything beyond a state's positions."""
    for state in range(len(least) // variants):
        for inside in range(variants):
            if state == 0:
                least[inside] = need_loss(heights, inside)
                continue
            stands = standing(heights, state, inside)
            best = np.int64(2**62)
            for k in range(len(heights.lengths)):
                p, n = position(heights, state, k), heights.lengths[k]
                if p == n:
                    continue
                held = 0 if inside >> k & 1 else heights.output[k, p]
                gradients = waiting(heights, state, k)
                saved = heights.saved[k, p + 1]
                if saved >= 0:
                    after = least[(state - heights.strides[k]) * variants + (inside | 1 << k)]
                    need = need_to_save(heights, k, p + 1, stands, held, gradients)
                    best = min(best, max(need, held + saved + after))
                for q in range(p + 1, n + 1):
                    after = least[(state - (q - p) * heights.strides[k]) * variants + (inside & ~(1 << k))]
                    walk = stands + heights.reach[k, p, q]
                    best = min(best, max(walk, max(held + after, held + gradients + alone[k, p, q])))
            least[state * variants + inside] = best
