"""`join`: the fastest schedule for chains of equal steps that meet at the loss (000, 001 Theorem 3)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import final

import numpy as np

from elbowroom.errors import InputError
from elbowroom.problem import Join, Problem
from elbowroom.progress import Progress
from elbowroom.schedule import Backward, Forward, Loss, Operation
from elbowroom.solve.kernels.join import fill_join, fill_single
from elbowroom.solve.kernels.rows import Floats, Ints
from elbowroom.solve.method import Found, Method, Options, Status
from elbowroom.solve.slots import TABLE_BYTES
from elbowroom.units import format_bytes

MOST_WORK = 1e11  # inner steps: a few minutes
Reversal = tuple[int, int, int, int]  # branch, first position, forwards inside, slots


@final
class JoinOptimal(Method):
    name = "join"
    kinds = ("join",)
    summary = "fastest for K chains of equal steps; O(slots · K · length^(K+1))"
    exact = True

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Join)
        return least_slots(problem)

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Join)
        table = JoinTable(problem, useful_slots(problem, budget), options.progress)
        return Found(tuple(table.operations()), Status.OPTIMAL, table.time)


def least_slots(join: Join) -> int:
    """001 Lemma 2: one slot per input and one per gradient, and one to walk with unless one comes free."""
    longer = sum(length > 0 for length in join.lengths)
    slots = len(join.lengths) + longer
    free = any(
        length == 1 or (length == 0 and not keep)
        for length, keep in zip(join.lengths, join.keep_gradients, strict=True)
    )
    return slots if free or longer == 0 else slots + 1


def useful_slots(join: Join, budget: int) -> int:
    """More than one slot per value serves nothing."""
    return min(budget, sum(join.lengths) + len(join.lengths))


def join_states(join: Join, budget: int) -> float:
    return math.prod(float(n + 1) for n in join.lengths) * (useful_slots(join, budget) + 1)


def join_work(join: Join, budget: int) -> float:
    """Inner steps of the dynamic program; a short row costs about as much as one of 16 slots."""
    width = max(16, useful_slots(join, budget) + 1)
    states = math.prod(float(n + 1) for n in join.lengths)
    return width * (states * sum(join.lengths) + max(join.lengths) ** 2) / 2


class JoinTable:
    """The filled dynamic program for a join, and the schedule read off it."""

    def __init__(self, join: Join, slots: int, progress: Progress) -> None:
        need = 8 * join_states(join, slots)
        if need > TABLE_BYTES or join_work(join, slots) > MOST_WORK:
            single = "only 'store-all' takes branches this long"
            cure = "use 'equiv-chain', or a smaller budget" if len(join.lengths) > 1 else single
            size = f"{slots} slots, a table of {format_bytes(need)}"
            raise InputError("lengths", f"are too long for this method ({size}); {cure}")
        self.join = join
        self.slots = slots
        self.lengths: Ints = np.array(join.lengths, dtype=np.int64)
        self.strides: Ints = np.cumprod([1, *(n + 1 for n in join.lengths)], dtype=np.int64)[:-1]
        self.keep: Ints = np.array(join.keep_gradients, dtype=np.int64)
        self.single = self._single()
        self.table: Floats = np.empty((int(np.prod(self.lengths + 1)), slots + 1))
        step = max(1, len(self.table) // 64)
        for begin in range(0, len(self.table), step):
            end = min(begin + step, len(self.table))
            fill_join(
                begin,
                end,
                self.lengths,
                self.strides,
                self.keep,
                float(join.forward_time),
                float(join.loss_time),
                self.single,
                self.table,
            )
            progress(end / len(self.table))
        self.time = float(self.table[-1, slots])

    def operations(self) -> Iterator[Operation]:
        """The schedule, read off the table from the whole join down."""
        todo: list[tuple[int, int] | Reversal] = [(len(self.table) - 1, self.slots)]
        while todo:
            item = todo.pop()
            if len(item) == 4:
                yield from self._reverse(item)
                continue
            state, m = item
            if state == 0:
                yield Loss()
                continue
            k, i, others = self._choice(state, m)
            position = int(self.lengths[k] - self._left(state, k))
            todo += [(k, position, i - 1, m - others), (state - i * int(self.strides[k]), m - 1)]
            yield from _walk(k, position, i)

    def _choice(self, state: int, m: int) -> tuple[int, int, int]:
        value = self.table[state, m]
        gradients = [self._wanted(state, k) for k in range(len(self.lengths))]
        for k in range(len(self.lengths)):
            others = sum(gradients) - gradients[k]
            for i in range(1, self._left(state, k) + 1):
                rest = self.table[state - i * int(self.strides[k]), m - 1]
                if (i * float(self.join.forward_time) + rest) + self.single[others, i - 1, m] == value:
                    return k, i, others
        raise AssertionError("no choice explains the table")

    def _reverse(self, item: Reversal) -> Iterator[Operation]:
        single = self.single[0]
        todo: list[Reversal] = [item]
        while todo:
            k, position, length, m = todo.pop()
            if length == 0:
                yield Backward((k + 1, position + 1))
                continue
            i = next(
                i
                for i in range(1, length + 1)
                if (i * float(self.join.forward_time) + single[length - i, m - 1]) + single[i - 1, m]
                == single[length, m]
            )
            todo += [(k, position, i - 1, m), (k, position + i, length - i, m - 1)]
            yield from _walk(k, position, i)

    def _left(self, state: int, k: int) -> int:
        return int(state // self.strides[k] % (self.lengths[k] + 1))

    def _wanted(self, state: int, k: int) -> int:
        """Whether branch k's gradient is kept when it is done: b, or 1 once the branch has been cut."""
        return int(self.keep[k]) if self._left(state, k) == self.lengths[k] else 1

    def _single(self) -> Floats:
        """Opt0 for every number of slots that kept gradients of other branches may take."""
        longest = max(1, max(self.join.lengths))
        single = np.empty((longest, self.slots + 1))
        fill_single(float(self.join.forward_time), float(self.join.backward_time), single)
        shifted = np.full((len(self.lengths), longest, self.slots + 1), np.inf)
        for taken in range(min(len(self.lengths), self.slots + 1)):
            shifted[taken, :, taken:] = single[:, : self.slots + 1 - taken]
        return shifted


def _walk(k: int, position: int, steps: int) -> Iterator[Operation]:
    """Go forward from a stored position, keeping it."""
    yield Forward((k + 1, position + 1), "input")
    for step in range(position + 2, position + steps + 1):
        yield Forward((k + 1, step), "nothing")
