"""The integer program of `offload-milp`: its variables and rows, and what HiGHS answers.

The docstring of `offload_milp.py` has the formulas; each function here names those that it adds by their number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from elbowroom.problem import Chain, Platform
from elbowroom.solve.linear import IntegerProgram, Sum, no, total

Direction: TypeAlias = Literal["out", "back"]
Transfer: TypeAlias = tuple[Direction, int]  # of value ā_k


@dataclass(frozen=True)
class Copy:
    """One copy of a solution: when it starts, and the operation after which it does so at the earliest."""

    transfer: Transfer
    start: float
    after: int
    during_next: bool = False  # it starts while the operation after that runs


@dataclass(frozen=True)
class Answer:
    """What HiGHS found: what nothing is faster than, the time of its solution, the way of each stage, all copies."""

    bound: float
    time: float = float("inf")
    ways: tuple[int, ...] = ()
    copies: tuple[Copy, ...] = ()


class Program:
    """The program of one chain, budget and platform. `slowest` is the time of a schedule that is known.

    Operations have numbers: i < n is forward i + 1, the others are backward 2n − i.
    """

    def __init__(self, chain: Chain, budget: int, platform: Platform, slowest: float) -> None:
        self.chain, self.platform, self.n = chain, platform, len(chain)
        # HiGHS has one tolerance, 10^-6, for all rows. Thousandths of the budget and of the time are told apart well.
        self.unit_s, self.unit_bytes = slowest / 1000, max(1, budget) / 1000
        self.room = Sum(budget / self.unit_bytes)
        self.model = IntegerProgram()
        self._choose_ways()
        self.values = [k for k in range(self.n) if max(self._sizes(k)) > 0]
        self._make_variables()
        self._computing_in_order()
        self._copies_in_time()
        self._copies_in_order()
        self._moments()
        self._memory_of_operations()
        self._memory_of_prefetches()
        if platform.host_bytes is not None:
            self._memory_of_the_host(platform.host_bytes)
        self._link_is_busy()

    def fastest(self, seconds: float) -> Answer:
        return self._solve(self._end(2 * self.n - 1), seconds)

    def earliest(self, time: float, seconds: float) -> Answer:
        """Among the solutions that take no longer than that, the one whose operations begin earliest, all in all."""
        self.model.at_least(Sum(time / self.unit_s), self._end(2 * self.n - 1))
        return self._solve(total(self.begin), seconds)

    # --- sizes and times ---

    def _sizes(self, k: int) -> list[float]:
        """Of ā_k in each way of its stage, in parts of the budget."""
        sizes = [way.saved_bytes for way in self.chain.stages[k - 1].ways] if k else [self.chain.input_bytes]
        return [size / self.unit_bytes for size in sizes]

    def _copy_times(self, transfer: Transfer) -> list[float]:
        """Of each way, alone on the link."""
        direction, k = transfer
        rate = self.platform.rate_to_host if direction == "out" else self.platform.rate_from_host
        assert rate is not None
        latency = self.platform.seconds_per_copy
        return [(latency + size * self.unit_bytes / rate) / self.unit_s for size in self._sizes(k)]

    def _choose_ways(self) -> None:
        """One way for each stage."""
        self.way: list[list[Sum]] = [[Sum(1.0)]]  # of ā_0, which is made in one way
        for stage in self.chain.stages:
            several = len(stage.ways) > 1
            self.way.append([self.model.binary() for _ in stage.ways] if several else [Sum(1.0)])
            if several:
                self.model.equal(total(self.way[-1]), Sum(1.0))

    def _of_way(self, k: int, numbers: Iterable[float]) -> Sum:
        return total(way * number for way, number in zip(self.way[k], numbers, strict=True))

    def _size(self, k: int) -> Sum:
        return self._of_way(k, self._sizes(k))

    def _stage_of(self, i: int) -> int:
        return i + 1 if i < self.n else 2 * self.n - i

    def _operation_times(self, i: int) -> list[float]:
        ways = self.chain.stages[self._stage_of(i) - 1].ways
        return [(way.forward_time if i < self.n else way.backward_time) / self.unit_s for way in ways]

    def _duration(self, i: int) -> Sum:
        return self._of_way(self._stage_of(i), self._operation_times(i))

    def _absent(self, k: int) -> range:
        """The operations while which ā_k may be gone: after forward k + 1 and before backward k + 1."""
        return range(k + 1, 2 * self.n - 1 - k)

    # --- variables ---

    def _make_variables(self) -> None:
        n, slack = self.n, 1001.0  # thousandths; wide enough that rounding does not cut the known schedule off
        head, least = [0.0], [min(self._operation_times(i)) for i in range(2 * n)]
        for time in least:
            head.append(head[-1] + time)
        tail = [head[-1] - before for before in head]
        self.begin = [self.model.variable(head[i], max(head[i], slack - tail[i])) for i in range(2 * n)]
        self.moves = {k: self.model.binary() for k in self.values}
        self.start: dict[Transfer, Sum] = {}
        self.copying: dict[Transfer, Sum] = {}  # how long, 0 if the value stays
        for k in self.values:
            latest = max(head[k], slack - tail[2 * n - 1 - k])
            for transfer in (("out", k), ("back", k)):
                self.start[transfer] = self.model.variable(head[k], latest)
                self.copying[transfer] = self._if_moved(k, self._copy_times(transfer))
        self.left = {(k, i): self.model.binary() for k in self.values for i in self._absent(k)}
        self.back = {(k, i): self.model.binary() for k in self.values for i in self._absent(k)}
        self.within = {(k, i): self.model.binary() for k in self.values for i in self._absent(k)}
        self.first = self._orders()

    def _if_moved(self, k: int, numbers: list[float]) -> Sum:
        """What a number of ā_k's way is if ā_k moves, and else 0."""
        if len(numbers) == 1:
            return self.moves[k] * numbers[0]
        product = self.model.variable(0.0, max(numbers))
        self.model.at_least(product, self._of_way(k, numbers) + (self.moves[k] - 1.0) * max(numbers))
        self.model.at_least(product, self.moves[k] * min(numbers))
        return product

    def _orders(self) -> dict[tuple[Transfer, Transfer], Sum]:
        """first[A, B] for copies of two values: 1 if A has ended when B starts."""
        turns, bounded = self.platform.takes_turns, self.platform.host_bytes is not None
        first: dict[tuple[Transfer, Transfer], Sum] = {}
        for j in self.values:
            for k in self.values:
                if j < k:
                    for lane in (("out", j), ("out", k)), (("back", j), ("back", k)):
                        first[lane] = self.model.binary()
                        first[lane[1], lane[0]] = self.moves[k] - first[lane]  # asked for only if j moves
                if j != k:
                    first[("out", j), ("back", k)] = self.model.binary()
                    if turns:
                        first[("back", k), ("out", j)] = self.moves[k] - first[("out", j), ("back", k)]
                    elif bounded:
                        first[("back", k), ("out", j)] = self.model.binary()
        return first

    # --- time ---

    def _end(self, i: int) -> Sum:
        return self.begin[i] + self._duration(i) if i >= 0 else Sum()

    def _end_of(self, transfer: Transfer) -> Sum:
        return self.start[transfer] + self.copying[transfer]

    def _computing_in_order(self) -> None:
        """(1)"""
        for i in range(1, 2 * self.n):
            self.model.at_least(self.begin[i], self._end(i - 1))

    def _copies_in_time(self) -> None:
        """(2), (3)"""
        for k in self.values:
            self.model.at_least(self.start["out", k], self._end(k - 1))
            self.model.at_least(self.start["back", k], self._end_of(("out", k)))
            self.model.at_least(self.start["back", k], self._end(k))
            self.model.at_least(self.begin[2 * self.n - 1 - k], self._end_of(("back", k)))

    def _copies_in_order(self) -> None:
        """(4)"""
        for (one, other), order in self.first.items():
            both = (self.moves[one[1]], self.moves[other[1]])
            if not order.constant and len(order.terms) == 1:  # the other of the two orders follows from it
                for moves in both:
                    self.model.at_least(moves, order)
            self.model.at_least(self.start[other], self._end_of(one), order, *both)

    def _moments(self) -> None:
        """(5), (6)"""
        for k in self.values:
            before, left_before = Sum(), Sum()
            for i in self._absent(k):
                left, back, within = self.left[k, i], self.back[k, i], self.within[k, i]
                self.model.at_least(self.begin[i], self._end_of(("out", k)), left)
                self.model.at_least(self.start["back", k], self.begin[i], no(back))
                self.model.at_least(self.begin[i], self.start["back", k], back)
                self.model.at_least(self.start["back", k], self._end(i), no(within))
                for smaller, larger in ((before, back), (back, within), (back, left), (left_before, left)):
                    self.model.at_least(larger, smaller)
                before, left_before = within, left
            for last in (before, left_before):
                self.model.at_least(self.moves[k], last)

    # --- memory ---

    def _there(self, k: int, absent: Sum, *needs: Sum) -> Sum:
        """The bytes of ā_k, or 0 where it is absent; at least these, if all `needs` are 1."""
        sizes = self._sizes(k)
        if len(sizes) == 1:
            return no(absent) * sizes[0]
        there = self.model.variable(0.0, max(sizes))
        self.model.at_least(there, self._size(k) - absent * max(sizes), *needs)
        self.model.at_least(there, no(absent) * min(sizes), *needs)
        return there

    def _held(self, i: int) -> tuple[Sum, list[int]]:
        """While operation i runs: the bytes that are there whatever moves, and the values that may be gone."""
        n, stage, ways = self.n, self._stage_of(i), self.chain.stages[self._stage_of(i) - 1].ways
        delta = [size / self.unit_bytes for size in self.chain.gradient_bytes]
        if i < n:
            overhead = self._of_way(stage, [way.forward_overhead_bytes / self.unit_bytes for way in ways])
            gradients = delta[n]
        else:
            overhead = self._of_way(stage, [way.backward_overhead_bytes / self.unit_bytes for way in ways])
            gradients = delta[stage] + delta[stage - 1]
        return self._size(stage) + self._size(stage - 1) + overhead + gradients, list(range(stage - 1))

    def _held_after(self, i: int) -> tuple[Sum, list[int]]:
        """The same between operation i and the next."""
        n = self.n
        newest = i + 1 if i < n else 2 * n - 1 - i
        gradient = self.chain.gradient_bytes[n if i < n else newest]
        return self._size(newest) + gradient / self.unit_bytes, list(range(newest))

    def _fits(self, held: Sum, values: list[int], there: dict[int, Sum], *needs: Sum) -> None:
        """What is there fits the budget, if all `needs` are 1."""
        others = total(there[k] if k in there else self._size(k) for k in values)
        self.model.at_least(self.room, held + others, *needs)

    def _memory_of_operations(self) -> None:
        """(7)"""
        for i in range(2 * self.n):
            held, values = self._held(i)
            moving = [k for k in values if k in self.moves]
            there = {k: self._there(k, self.left[k, i] - self.back[k, i]) for k in moving}
            self._fits(held, values, there)

    def _memory_of_prefetches(self) -> None:
        """(8)"""
        for k in self.values:
            others = [j for j in self.values if j != k]
            gone = {j: self.first[("out", j), ("back", k)] - self.first[("back", j), ("back", k)] for j in others}
            there = {j: self._there(j, gone[j], self.moves[k]) for j in others}
            before = Sum()
            for i in range(k, 2 * self.n - 1 - k):
                if i > k:
                    self._fits(*self._held(i), there, self.within[k, i] - self.back[k, i])
                    before = self.within[k, i]
                then = self.back.get((k, i + 1), self.moves[k])
                self._fits(*self._held_after(i), there, then - before)

    def _memory_of_the_host(self, host_bytes: int) -> None:
        """(9)"""
        host = Sum(host_bytes / self.unit_bytes)
        for k in self.values:
            others = [j for j in self.values if j != k]
            held = Sum()
            for j in others:
                gone = self.first[("out", j), ("out", k)] - self.first[("back", j), ("out", k)]
                held = held + self._there(j, no(gone), self.moves[k])
            self.model.at_least(host, held + self._size(k), self.moves[k])

    # --- what follows from the above, and makes the search short ---

    def _link_is_busy(self) -> None:
        """(10)"""
        for k in self.values:
            inner = [j for j in self.values if j >= k]
            made, needed = self._end(k - 1), self.begin[2 * self.n - 1 - k]
            out = total(self.copying["out", j] for j in inner)
            back = total(self.copying["back", j] for j in inner)
            for busy in [out + back] if self.platform.takes_turns else [out, back]:
                self.model.at_least(needed - made, busy)
            for i in self._absent(k):
                gone = [j for j in inner if (j, i) in self.left]
                left = total(self.left[j, i] * min(self._copy_times(("out", j))) for j in gone)
                self.model.at_least(self.begin[i] - made, left)
                to_come = ((self.moves[j] - self.back[j, i]) * min(self._copy_times(("back", j))) for j in gone)
                self.model.at_least(needed - self.begin[i], total(to_come))

    # --- solving ---

    def _solve(self, cost: Sum, seconds: float) -> Answer:
        found = self.model.least(cost, seconds)
        bound = found.bound * self.unit_s
        return Answer(bound) if found.solution is None else self._read(found.solution, bound)

    def _read(self, x: NDArray[np.float64], bound: float) -> Answer:
        copies = []
        for k in self.values:
            if self.moves[k].at(x) > 0.5:
                last = max((i for i in self._absent(k) if self.within[k, i].at(x) < 0.5), default=k)
                during = (k, last + 1) in self.back and self.back[k, last + 1].at(x) < 0.5
                copies.append(Copy(("out", k), self.start["out", k].at(x), k - 1))
                copies.append(Copy(("back", k), self.start["back", k].at(x), last, during))
        copies.sort(key=lambda copy: copy.start)
        ways = tuple(int(np.argmax([way.at(x) for way in each])) for each in self.way[1:])
        time = self._end(2 * self.n - 1).at(x) * self.unit_s
        return Answer(bound, time, ways, tuple(copies))
