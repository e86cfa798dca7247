"""`combined`: values are kept, moved, or computed again any number of times, and copies may come and go at any time.

A second of the link is given a price (`priced.py`). For each price a dynamic program finds what to keep, to move and
to compute again; `place` asks for the copies, and the referee tells what that takes when computation has to wait. A
price of nothing moves too much, an endless one nothing at all, and the best is looked for between them. Copies take
time, so what is planned for less memory may wait less, and is tried, too.

Recomputation alone, offloading alone, `pofo` and `autocapper` are candidates, so the result is never slower than any
of these. In the end, moves are given up without which the schedule still fits and is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from math import inf
from typing import final

from elbowroom.problem import Chain, Problem
from elbowroom.schedule import Simulation, simulate
from elbowroom.schedule.simulation import total
from elbowroom.solve.floating import Floating, affords
from elbowroom.solve.method import NO_LINK, Found, Method, Options, Status
from elbowroom.solve.offload.autocapper import Autocapper
from elbowroom.solve.offload.offload_best import OffloadBest
from elbowroom.solve.offload.placing import place
from elbowroom.solve.offload.pofo import Pofo
from elbowroom.solve.offload.priced import (
    Chosen,
    LeastTable,
    Price,
    PricedTable,
    busy_time,
    computing_time,
    link_time,
)
from elbowroom.solve.offload.sets import rank
from elbowroom.solve.persistent import Persistent
from elbowroom.solve.slots import CUSTOMARY, FEWEST, divide, useful_bytes

# Prices, in units of the one at which moving all that is saved costs as much as computing it again, and how much they
# rise over the forward. Between the best and its neighbours, distances are halved some times.
_PRICES = (0.0, 0.1, 0.5, 0.8, 1.2, 1.7, 2.5, 4.0)
_LATE = (0.0, 0.4, 0.8)
_HALVINGS = 3
_SHARES = (1.0, 0.97, 0.93, 0.88, 0.8, 0.7, 0.6, 0.5)  # of the memory, to plan for
_NOTHING = 1e-9  # a difference of times that sums of numbers may have by themselves
_WORK = 1e10  # inner steps that all tables may take: about ten seconds
_OTHERS: tuple[Method, ...] = (OffloadBest(), Pofo(), Autocapper())


@final
class Combined(Method):
    name = "combined"
    kinds = ("chain",)
    summary = "keeps, moves or computes again, whichever serves best: the fastest known with a link"
    exact = False
    needs_link = True

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Chain)
        return min(least for least, _ in _Search(problem, options).beginnings())

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Chain)
        search = _Search(problem, options)
        search.run(min(budget, useful_bytes(problem)))
        best = search.best
        assert best is not None, "a budget that is no less than the least has a schedule"
        notes = {"bound_time": search.computing, "found_by": search.found_by}
        return Found(tuple(best.schedule), Status.HEURISTIC, best.time, notes)


class _Search:
    """The fastest schedule so far, and who found it."""

    def __init__(self, chain: Chain, options: Options) -> None:
        self.chain, self.options, self.platform = chain, options, options.platform
        self.remat: Method = Floating() if affords(len(chain), options.slots or CUSTOMARY) else Persistent()
        # No schedule takes less than everything once.
        self.computing = total(min(way.forward_time + way.backward_time for way in s.ways) for s in chain.stages)
        self.best: Simulation | None = None
        self.chosen: Chosen | None = None
        self.found_by = ""

    def beginnings(self) -> Iterator[tuple[int, Callable[[int], object]]]:
        """Budgets from which on there is a schedule, and what finds it within any such budget."""
        for method in (*_OTHERS, self.remat):
            yield method.least_budget(self.chain, self.options), partial(self._try_method, method)
        table = LeastTable(self.chain, self.platform)
        chosen = table.chosen(table.least_bytes)
        # With little room on the host this may be too much to move.
        if place(self.chain, chosen.computing, chosen.moves, table.least_bytes, self.platform) is not None:
            yield table.least_bytes, partial(self._try, "least", chosen)

    def run(self, budget: int) -> None:
        for least, begin in self.beginnings():
            if budget >= least and not self._perfect:
                begin(budget)
        self._try_prices(budget)
        self._give_up_moves(budget)

    @property
    def _perfect(self) -> bool:
        return self.best is not None and self.best.time <= self.computing * (1 + _NOTHING)

    def _try_method(self, method: Method, budget: int) -> None:
        found = method.find(self.chain, budget, replace(self.options, progress=lambda part: None))
        platform = self.platform if method.needs_link else NO_LINK
        self._note(method.name, simulate(self.chain, found.schedule, budget=budget, platform=platform))

    def _note(self, name: str, found: Simulation | None, chosen: Chosen | None = None) -> float:
        if found is None:
            return inf
        if self.best is None or rank(found) < rank(self.best):
            self.best, self.chosen, self.found_by = found, chosen, name
        return found.time

    def _try(self, name: str, chosen: Chosen, budget: int) -> float:
        """Note what is chosen, unless even without any wait it would take longer than the best."""
        least = max(computing_time(self.chain, chosen), busy_time(self.chain, self.platform, chosen))
        if self.best is not None and least >= self.best.time:
            return least
        placed = place(self.chain, chosen.computing, chosen.moves, budget, self.platform)
        return self._note(name, placed, chosen)

    # --- prices ----------------------------------------------------------------------------------------------

    def _try_prices(self, budget: int) -> None:
        n = len(self.chain)
        kinds = 2 + max(len(stage.ways) for stage in self.chain.stages)
        tries = len(_PRICES) * len(_LATE) + 2 * _HALVINGS
        steps = tries * kinds * n**3 / 6
        slots = self.options.slots or max(FEWEST, min(CUSTOMARY, int(_WORK / steps)))
        self.division = divide(self.chain, budget, slots, rows=kinds * n * n, steps=steps)
        unit = self._price_of_all()
        times: dict[float, dict[float, float]] = {late: {} for late in _LATE}
        for done, (late, price) in enumerate(self._prices(times)):
            self.options.progress(min(1.0, done / tries))
            if self._perfect:
                return
            times[late][price] = self._try_price(Price(price * unit, late), budget)

    def _price_of_all(self) -> float:
        """At this price, moving every saved set once costs as much as running every forward again."""
        moving = sum(link_time(stage.saved_bytes, self.platform) for stage in self.chain.stages)
        again = sum(stage.forward_time for stage in self.chain.stages)
        return again / moving if moving > 0 else 1.0

    def _prices(self, times: dict[float, dict[float, float]]) -> Iterator[tuple[float, float]]:
        """What to try next, given how long the schedules take that were found so far."""
        yield from product(_LATE, _PRICES)
        late = min(times, key=lambda late: (min(times[late].values()), late))
        of_this = times[late]
        for _ in range(_HALVINGS):
            ordered = sorted(of_this)
            best = min(range(len(ordered)), key=lambda k: of_this[ordered[k]])
            neighbours = ordered[max(0, best - 1) : best + 2]
            for low, high in pairwise(neighbours):
                yield late, (low + high) / 2

    def _try_price(self, price: Price, budget: int) -> float:
        """The time of the fastest schedule with that price, of those for all the memory and for less."""
        slots, spare = self.division.slots, self.division.spare
        table = PricedTable(self.chain, self.platform, price, self.division.unit, slots + spare)
        amounts = dict.fromkeys([slots + spare, slots + spare // 2, *(int(share * slots) for share in _SHARES)])
        tried: set[Chosen] = set()
        times = [inf]
        for amount in amounts:
            if table.cost(amount) < inf:
                chosen = table.chosen(amount)
                if chosen not in tried:
                    tried.add(chosen)
                    times.append(self._try("prices", chosen, budget))
        return min(times)

    def _give_up_moves(self, budget: int) -> None:
        """Leave out one move after the other as long as that is faster."""
        improved = self.chosen is not None
        while improved and self.chosen is not None and self.best is not None:
            before, chosen = self.best.time, self.chosen
            for move in chosen.moves:
                fewer = tuple(each for each in self.chosen.moves if each != move)
                self._try("prices", Chosen(chosen.computing, fewer), budget)
            improved = self.best.time < before
