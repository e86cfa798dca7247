"""`towers`: the fastest nested schedule for unequal chains that meet at the loss; 001 Theorems 3 and 6 as one.

Nested: what is saved stays until its backward, and towers are reversed in the opposite order of their forwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal, final

import numpy as np

from elbowroom.errors import InputError
from elbowroom.problem import Problem, Towers
from elbowroom.progress import Progress
from elbowroom.schedule import Backward, Forward, Loss, Operation
from elbowroom.solve.fitting import fit
from elbowroom.solve.kernels import towers as kernel
from elbowroom.solve.kernels.persistent import row_of
from elbowroom.solve.kernels.rows import slots_of
from elbowroom.solve.kernels.towers import Heights, heights_of
from elbowroom.solve.method import Found, Method, Options
from elbowroom.solve.slots import FEWEST, MOST, TABLE_BYTES, Division, table_slots
from elbowroom.units import format_bytes

WORK = 1e9  # inner steps that may be spent on slots nobody asked for: about a second
MOST_WORK = 1e11  # a few minutes
Meeting = tuple[Literal["meeting"], int, int, int]  # a state, which towers stand inside a saved set, memory
Stretch = tuple[Literal["stretch"], int, int, int, int]  # a tower, from and to which position, memory besides it
Choice = tuple[Literal["save", "walk"], int, int, int, int]  # which tower, to where, memory after and for the stretch


@final
class TowersNested(Method):
    name = "towers"
    kinds = ("towers",)
    summary = "fastest for K unequal chains that meet at the loss, of nested schedules; O(slots · K · length^(K+1))"
    exact = True

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Towers)
        _check_size(problem)
        return problem.resident_bytes + _Least(problem).total

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Towers)
        budget = min(budget, useful_bytes(problem))
        room = budget - problem.resident_bytes
        division = _divide(problem, room, options.slots)
        table = _Table(problem, division, options.progress)
        greedy = () if division.exact else _Least(problem).schedule(room)
        return fit(problem, budget, division, table, greedy)


def useful_bytes(problem: Towers) -> int:
    """More memory than this makes no schedule faster: everything is stored at once."""
    total = problem.resident_bytes + problem.loss_overhead_bytes
    for tower in problem.towers:
        held = tower.input_bytes + sum(step.output_bytes + (step.saved_bytes or 0) for step in tower.steps)
        passing = (step.forward_overhead_bytes + step.backward_overhead_bytes for step in tower.steps)
        total += held + 2 * max(tower.gradient_bytes) + max(passing, default=0)
    return total


# --- size ----------------------------------------------------------------------------------------------------


def _variants(problem: Towers) -> int:
    saves = any(step.saved_bytes is not None for tower in problem.towers for step in tower.steps)
    return 2 ** len(problem.towers) if saves else 1


def _rows(problem: Towers) -> float:
    longest = max(len(tower) for tower in problem.towers)
    alone = len(problem.towers) * longest * (longest + 1) / 2
    return math.prod(float(len(tower) + 1) for tower in problem.towers) * _variants(problem) + alone


def _steps(problem: Towers) -> float:
    """Inner steps of the dynamic program for each slot."""
    lengths = [len(tower) for tower in problem.towers]
    states = math.prod(float(n + 1) for n in lengths) * _variants(problem)
    return states * sum(lengths) / 2 + sum(n**3 for n in lengths) / 6


def _check_size(problem: Towers) -> None:
    rows = _rows(problem)
    if 8 * rows * FEWEST > TABLE_BYTES or _steps(problem) * FEWEST > MOST_WORK:
        need = format_bytes(8 * rows * FEWEST)
        raise InputError(
            "towers",
            f"are too long or too many for this method: even {FEWEST} slots need a table of {need}; "
            "join steps, or plan them one after another as a chain",
        )


def _divide(problem: Towers, room: int, asked: int | None) -> Division:
    _check_size(problem)
    common, most = _common_divisor(problem), table_slots(_rows(problem))
    affordable = max(FEWEST, min(MOST, int(WORK / max(1, _steps(problem)))))
    wanted = min(most, affordable if asked is None else asked)
    unit = common if room // common <= wanted else max(1, -(-room // wanted))
    return Division.of(room, unit, common, sum(len(tower) for tower in problem.towers))


def _common_divisor(problem: Towers) -> int:
    sizes = [problem.loss_overhead_bytes]
    for tower in problem.towers:
        sizes += [*tower.output_bytes, *tower.gradient_bytes]
        for step in tower.steps:
            sizes += [step.saved_bytes or 0, step.forward_overhead_bytes, step.backward_overhead_bytes]
    return math.gcd(*sizes) or 1


# --- the table -----------------------------------------------------------------------------------------------


class _Table:
    """The filled dynamic program, and the schedule read off it."""

    def __init__(self, problem: Towers, division: Division, progress: Progress) -> None:
        self.heights = heights = heights_of(problem, division.unit)
        self.variants = _variants(problem)
        width = division.slots + division.spare + 1
        longest, states = int(heights.lengths.max()), int((heights.lengths + 1).prod())
        self.alone = np.full((len(heights.lengths), longest * (longest + 1) // 2, width), np.inf)
        for k in range(len(heights.lengths)):
            kernel.fill_tower(heights, k, self.alone[k])
        self.meeting = np.empty((states * self.variants, width))
        step = max(1, states // 64)
        for begin in range(0, states, step):
            end = min(begin + step, states)
            kernel.fill_meeting(heights, begin, end, self.variants, self.alone, self.meeting)
            progress(end / states)
        self.first = states - 1

    def time(self, slots: int) -> float:
        return float(self.meeting[self.first * self.variants, slots])

    def schedule(self, slots: int) -> tuple[Operation, ...]:
        start: Meeting = ("meeting", self.first, 0, slots)
        return tuple(_operations(self.heights, start, self._move, self._reverse))

    def _move(self, state: int, inside: int, m: int) -> Choice:
        heights, value = self.heights, self.meeting[state * self.variants + inside, m]
        stands = kernel.standing(heights, state, inside)
        for k, n in enumerate(heights.lengths):
            p = int(kernel.position(heights, state, k))
            held = 0 if inside >> k & 1 else int(heights.output[k, p])
            gradients = int(kernel.waiting(heights, state, k))
            rest = m - self._slots(held)
            saved = int(heights.saved[k, p + 1]) if p < n else -1
            if saved >= 0:
                need = kernel.need_to_save(heights, k, p + 1, stands, held, gradients)
                left = rest - self._slots(saved)
                if left >= 0 and self._slots(need) <= m:
                    after = self.meeting[self._number(state, inside | 1 << k, k, 1), left]
                    if heights.both[k, p + 1] + after == value:
                        return "save", k, p + 1, left, 0
            for q in range(p + 1, n + 1):
                own = rest - self._slots(gradients)
                if own < 0 or self._slots(stands + int(heights.reach[k, p, q])) > m:
                    continue
                cost = heights.elapsed[k, q] - heights.elapsed[k, p]
                after = self.meeting[self._number(state, inside & ~(1 << k), k, q - p), rest]
                if (cost + self.alone[k, row_of(p + 1, q, n), own]) + after == value:
                    return "walk", k, q, rest, own
        raise AssertionError("no choice explains the table")

    def _reverse(self, k: int, p: int, q: int, m: int) -> Choice:
        heights, n, rows = self.heights, int(self.heights.lengths[k]), self.alone[k]
        value = rows[row_of(p + 1, q, n), m]
        saved, gradient = int(heights.saved[k, p + 1]), heights.gradient[k, q]
        if saved >= 0 and self._slots(kernel.need_saving(heights, k, p + 1, gradient)) <= m:
            rest = m - self._slots(saved)
            if rest >= 0 and heights.both[k, p + 1] + rows[row_of(p + 2, q, n), rest] == value:
                return "save", k, p + 1, rest, 0
        for i in range(p + 1, q):
            rest = m - self._slots(int(heights.output[k, i]))
            if rest < 0 or self._slots(int(gradient + heights.reach[k, p, i])) > m:
                continue
            cost = heights.elapsed[k, i] - heights.elapsed[k, p]
            if (cost + rows[row_of(i + 1, q, n), rest]) + rows[row_of(p + 1, i, n), m] == value:
                return "walk", k, i, rest, m
        raise AssertionError("no choice explains the table")

    def _number(self, state: int, inside: int, k: int, steps: int) -> int:
        return (state - steps * int(self.heights.strides[k])) * self.variants + inside

    def _slots(self, size: int) -> int:
        return int(slots_of(size, self.heights.unit))


class _Least:
    """The fewest bytes for every state, and a schedule that fits whenever any does."""

    def __init__(self, problem: Towers) -> None:
        self.heights = heights = heights_of(problem, unit=1)
        self.variants = _variants(problem)
        longest, states = int(heights.lengths.max()), int((heights.lengths + 1).prod())
        self.alone = np.zeros((len(heights.lengths), longest + 1, longest + 1), dtype=np.int64)
        for k in range(len(heights.lengths)):
            kernel.fill_least_tower(heights, k, self.alone[k])
        self.meeting = np.zeros(states * self.variants, dtype=np.int64)
        kernel.fill_least_meeting(heights, self.variants, self.alone, self.meeting)
        self.first = states - 1
        self.total = int(self.meeting[self.first * self.variants])

    def schedule(self, room: int) -> tuple[Operation, ...]:
        start: Meeting = ("meeting", self.first, 0, room)
        return tuple(_operations(self.heights, start, self._move, self._reverse))

    def _move(self, state: int, inside: int, m: int) -> Choice:
        """Saves if it can, and otherwise keeps where it stands as often as it can."""
        heights = self.heights
        stands = kernel.standing(heights, state, inside)
        walks: list[Choice] = []
        for k, n in enumerate(heights.lengths):
            p = int(kernel.position(heights, state, k))
            held = 0 if inside >> k & 1 else int(heights.output[k, p])
            gradients = int(kernel.waiting(heights, state, k))
            saved = int(heights.saved[k, p + 1]) if p < n else -1
            if saved >= 0:
                after = self.meeting[self._number(state, inside | 1 << k, k, 1)]
                need = kernel.need_to_save(heights, k, p + 1, stands, held, gradients)
                if max(need, held + saved + after) <= m:
                    return "save", k, p + 1, m - held - saved, 0
            for q in range(p + 1, n + 1):
                after = self.meeting[self._number(state, inside & ~(1 << k), k, q - p)]
                own = held + gradients + self.alone[k, p, q]
                if max(stands + heights.reach[k, p, q], held + after, own) <= m:
                    walks.append(("walk", k, q, m - held, m - held - gradients))
        return min(walks, key=lambda walk: walk[2] - int(kernel.position(heights, state, walk[1])))

    def _reverse(self, k: int, p: int, q: int, m: int) -> Choice:
        heights, least = self.heights, self.alone[k]
        saved, gradient = int(heights.saved[k, p + 1]), heights.gradient[k, q]
        if saved >= 0 and max(kernel.need_saving(heights, k, p + 1, gradient), saved + least[p + 1, q]) <= m:
            return "save", k, p + 1, m - saved, 0
        for i in range(p + 1, q):
            right = heights.output[k, i] + least[i, q]
            if max(gradient + heights.reach[k, p, i], right, least[p, i]) <= m:
                return "walk", k, i, m - int(heights.output[k, i]), m
        raise AssertionError("the budget is below the least")

    def _number(self, state: int, inside: int, k: int, steps: int) -> int:
        return (state - steps * int(self.heights.strides[k])) * self.variants + inside


def _operations(
    heights: Heights,
    start: Meeting,
    move: Callable[[int, int, int], Choice],
    reverse: Callable[[int, int, int, int], Choice],
) -> Iterator[Operation]:
    """The schedule that a sequence of choices spells out."""
    todo: list[Meeting | Stretch | Operation] = [start]
    while todo:
        item = todo.pop()
        if not isinstance(item, tuple):
            yield item
            continue
        if item[0] == "meeting":
            _, state, inside, m = item
            if state == 0:
                yield Loss()
                continue
            what, k, to, after, own = move(state, inside, m)
            p = int(kernel.position(heights, state, k))
            state -= (to - p) * int(heights.strides[k])
            if what == "save":
                todo += [Backward((k + 1, to)), ("meeting", state, inside | 1 << k, after)]
                yield Forward((k + 1, to), "all")
            else:
                todo += [("stretch", k, p, to, own), ("meeting", state, inside & ~(1 << k), after)]
                yield from _walk(k, p, to)
            continue
        _, k, p, q, m = item
        if q == p + 1:
            if heights.saved[k, q] >= 0:
                yield Forward((k + 1, q), "all")
            yield Backward((k + 1, q))
            continue
        what, k, to, after, own = reverse(k, p, q, m)
        if what == "save":
            todo += [Backward((k + 1, to)), ("stretch", k, to, q, after)]
            yield Forward((k + 1, to), "all")
        else:
            todo += [("stretch", k, p, to, own), ("stretch", k, to, q, after)]
            yield from _walk(k, p, to)


def _walk(k: int, p: int, q: int) -> Iterator[Operation]:
    """Go forward from a stored position, keeping it."""
    yield Forward((k + 1, p + 1), "input")
    for step in range(p + 2, q + 1):
        yield Forward((k + 1, step), "nothing")
