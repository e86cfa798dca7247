"""Schedules that compute again and move, for a price of the link's time: the dynamic program of `kernels/moving.py`.

A price of nothing moves all it can; an endless one moves nothing, and the schedule is that of `persistent`. What lies
between is how much computing a second of the link is worth. That is not the same all the time: what the forward makes
late has little time to leave before the backward wants it, so the price may rise along the chain.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from elbowroom.problem import Chain, Platform
from elbowroom.progress import Progress
from elbowroom.schedule import Backward, Forward, Operation
from elbowroom.schedule.simulation import total
from elbowroom.solve.kernels.costs import costs_of, need_all, slots_up, ways_of
from elbowroom.solve.kernels.moving import Inputs, fill_distance, fill_least_moving
from elbowroom.solve.kernels.persistent import fill_reach, row_of
from elbowroom.solve.offload.placing import Move, bytes_of


@dataclass(frozen=True)
class Price:
    """Seconds of computing for a second of the link. `late` says how it rises over the forward: from 1 − late of it
    at the beginning to 1 + late at the end."""

    seconds: float
    late: float = 0.0


@dataclass(frozen=True)
class Chosen:
    """What is computed in which order, and what moves meanwhile."""

    computing: tuple[Operation, ...]
    moves: tuple[Move, ...]


Choice = tuple[Literal["save", "split"], int]  # in which way stage s saves, or where the stages are split
Decide = Callable[[int, int, int, int | None], tuple[bool, Choice]]


class _State(NamedTuple):
    """Backwards t to s are to run with memory m. `kind` says what the input of s is, whose room m includes; None says
    that it stays, outside of m. `made` is the operation that left the input there."""

    s: int
    t: int
    m: int
    kind: int | None
    made: int


class _Coming(NamedTuple):
    """The next operation needs the input of s, which went to the host after the operation `made`."""

    s: int
    kind: int
    made: int


class _Numbers:
    """A chain as the dynamic program sees it, in units of so many bytes."""

    def __init__(self, chain: Chain, platform: Platform, price: Price, unit: int) -> None:
        self.n = len(chain)
        self.costs = costs_of(chain, unit)
        self.inputs = _inputs(chain, platform, price, unit)
        self.reach = np.zeros((self.n + 1, self.n + 1), dtype=np.int64)
        fill_reach(self.costs, self.reach)

    def kind_after(self, s: int, way: int) -> int:
        """What the input of stage s + 1 is when stage s saves in a way."""
        return int(self.inputs.first[s + 1] + 1 + way - self.costs.first_way[s])

    def saving_needs(self, s: int, t: int, way: int) -> int:
        return slots_up(self.costs, need_all(self.costs, way, s, t))

    def split_needs(self, s: int, t: int, split: int) -> int:
        return slots_up(self.costs, self.costs.gradient[t] + self.reach[s, split])

    def spelled(self, m: int, decide: Decide) -> Chosen:
        """The operations that follow from decisions: whether a state's input moves, and what is done first."""
        computing: list[Operation] = []
        moves: list[Move] = []
        todo: list[_State | _Coming | Operation] = [_State(1, self.n, m, int(self.inputs.first[1]), -1)]
        while todo:
            item = todo.pop()
            if isinstance(item, _State):
                todo += reversed(list(self._first_of(item, len(computing) - 1, *decide(*item[:4]))))
            elif isinstance(item, _Coming):
                alone = item.kind == self.inputs.first[item.s]
                moves.append(Move(*_named(item.s, alone), item.made, len(computing)))
            else:
                computing.append(item)
        return Chosen(tuple(computing), tuple(moves))

    def _first_of(
        self, state: _State, last: int, moved: bool, choice: Choice
    ) -> Iterator[_State | _Coming | Operation]:
        """The first operations of a state and the states that follow. `last` is the operation before them."""
        s, t, m, kind, made = state
        size = 0 if kind is None else int(self.inputs.sizes[kind])
        m, held = (m, size) if moved else (m - size, 0)
        back = [_Coming(s, kind, made)] if moved and kind is not None else []
        what, which = choice
        if what == "save":
            yield Forward(s, "all", which - int(self.costs.first_way[s]))
            if t > s:
                yield _State(s + 1, t, m, self.kind_after(s, which), last + 1)
            yield from back
            yield Backward(s)
        else:
            yield Forward(s, "input")
            yield from (Forward(h, "nothing") for h in range(s + 1, which + 1))
            yield _State(which + 1, t, m, int(self.inputs.first[which + 1]), last + which - s + 1)
            yield from back
            yield _State(s, which, m - held, None, -1)


class PricedTable(_Numbers):
    """The filled table for one price of a second of the link, for any memory up to `slots` slots of `unit` bytes."""

    def __init__(
        self,
        chain: Chain,
        platform: Platform,
        price: Price,
        unit: int,
        slots: int,
        progress: Progress = lambda part: None,
    ) -> None:
        super().__init__(chain, platform, price, unit)
        self.slots = slots
        self.stays = np.empty((self.n * (self.n + 1) // 2, slots + 1))
        self.moves = np.empty((len(self.inputs.sizes), self.n + 1, slots + 1))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for distance in range(self.n):  # pairs at one distance do not depend on each other
                list(pool.map(partial(self._fill, distance=distance), range(1, self.n - distance + 1)))
                progress((distance + 1) / self.n)

    def _fill(self, s: int, distance: int) -> None:
        spare = np.empty(self.slots + 1)
        fill_distance(self.costs, self.reach, self.inputs, s, distance, self.stays, self.moves, spare)

    def cost(self, slots: int) -> float:
        """The least cost with so many slots, the price of what moves included."""
        return float(self.moves[self.inputs.first[1], self.n, slots])

    def chosen(self, slots: int) -> Chosen:
        """What the table chose for so many slots, with which its cost is finite."""
        return self.spelled(slots, self._decide)

    def _decide(self, s: int, t: int, m: int, kind: int | None) -> tuple[bool, Choice]:
        """The first choice with which the cost is the state's."""
        kept, held, price = m, 0, 0.0
        if kind is not None:
            size = int(self.inputs.sizes[kind])
            kept, held, price = m - size, size, float(self.inputs.prices[kind])
        if kind is None or (kept >= 0 and self.stays[row_of(s, t, self.n), kept] == self.moves[kind, t, m]):
            value = self.stays[row_of(s, t, self.n), kept]
            return False, next(choice for choice, cost in self._choices(s, t, kept, 0) if cost == value)
        value = self.moves[kind, t, m]
        return True, next(choice for choice, cost in self._choices(s, t, m, held) if price + cost == value)

    def _choices(self, s: int, t: int, m: int, held: int) -> Iterator[tuple[Choice, float]]:
        for way in ways_of(self.costs, s):
            if m >= held + self.saving_needs(s, t, way):
                after = self.moves[self.kind_after(s, way), t, m] if t > s else 0.0
                time = self.costs.way_time[way] if t > s else self.costs.last_time[way]
                yield ("save", way), float(time + after)
        for split in range(s, t):
            if m >= held + self.split_needs(s, t, split):
                cost = self.costs.elapsed[split] - self.costs.elapsed[s - 1]
                left = self.stays[row_of(s, split, self.n), m - held]
                yield ("split", split), float((cost + left) + self.moves[self.inputs.first[split + 1], t, m])


class LeastTable(_Numbers):
    """The fewest bytes with which each state can be done at all, however long that takes."""

    def __init__(self, chain: Chain, platform: Platform) -> None:
        super().__init__(chain, platform, Price(0.0), 1)
        self.stays = np.zeros((self.n + 1, self.n + 1), dtype=np.int64)
        self.moves = np.zeros((len(self.inputs.sizes), self.n + 1), dtype=np.int64)
        fill_least_moving(self.costs, self.reach, self.inputs, self.stays, self.moves)
        self.least_bytes = int(self.moves[self.inputs.first[1], self.n])

    def chosen(self, budget: int) -> Chosen:
        """A schedule for any budget from the least on: what fits first, staying rather than moving."""
        return self.spelled(budget, self._decide)

    def _decide(self, s: int, t: int, m: int, kind: int | None) -> tuple[bool, Choice]:
        size = 0 if kind is None else int(self.inputs.sizes[kind])
        if kind is None or m - size >= self.stays[s, t]:
            return False, next(self._fitting(s, t, m - size, 0))
        return True, next(self._fitting(s, t, m, size))

    def _fitting(self, s: int, t: int, m: int, held: int) -> Iterator[Choice]:
        for way in ways_of(self.costs, s):
            after = self.moves[self.kind_after(s, way), t] if t > s else 0
            if m >= max(held + self.saving_needs(s, t, way), after):
                yield "save", way
        for split in range(s, t):
            after = self.moves[self.inputs.first[split + 1], t]
            if m >= max(held + max(self.split_needs(s, t, split), self.stays[s, split]), after):
                yield "split", split


def computing_time(chain: Chain, chosen: Chosen) -> float:
    """What all operations take together."""
    times, backward = [], {}
    for operation in chosen.computing:
        assert isinstance(operation, Forward | Backward)
        at = operation.at
        assert isinstance(at, int)
        if isinstance(operation, Forward):
            way = chain.stages[at - 1].ways[operation.way]
            backward[at] = way.backward_time
            times.append(way.forward_time)
        else:
            times.append(backward[at])
    return total(times)


def busy_time(chain: Chain, platform: Platform, chosen: Chosen) -> float:
    """How long the link is busy at least, or the busier of its directions where it has two."""
    assert platform.rate_to_host is not None
    assert platform.rate_from_host is not None
    sizes = [bytes_of(chain, chosen.computing, move) for move in chosen.moves]
    waits = len(sizes) * platform.seconds_per_copy
    out, back = waits + sum(sizes) / platform.rate_to_host, waits + sum(sizes) / platform.rate_from_host
    return out + back if platform.takes_turns else max(out, back)


def _named(s: int, alone: bool) -> tuple[int, Literal["input", "all"]]:
    """The input of stage s as operations name it: on its own, or inside the saved set of the stage before."""
    return (s, "input") if alone else (s - 1, "all")


def _inputs(chain: Chain, platform: Platform, price: Price, unit: int) -> Inputs:
    sizes: list[int] = []
    prices: list[float] = []
    first = [0]
    elapsed = 0.0
    whole = sum(stage.forward_time for stage in chain.stages) or 1.0
    for s in range(1, len(chain) + 1):
        first.append(len(sizes))
        alternatives = [chain.output_bytes[s - 1]]
        if s > 1:
            alternatives += [way.saved_bytes for way in chain.stages[s - 2].ways]
        now = price.seconds * (1.0 + price.late * (2 * elapsed / whole - 1.0))
        sizes += alternatives
        prices += [now * link_time(size, platform) for size in alternatives]
        elapsed += chain.stages[s - 1].forward_time
    first.append(len(sizes))
    slots = -(-np.array(sizes, dtype=np.int64) // unit)
    return Inputs(np.array(first, dtype=np.int64), slots, np.array(prices, dtype=np.float64))


def link_time(size: int, platform: Platform) -> float:
    """How long the link is busy until a value has gone and come back."""
    out, back = platform.rate_to_host, platform.rate_from_host
    assert out is not None
    assert back is not None
    return size / out + size / back + 2 * platform.seconds_per_copy
