"""Follows a step in parts: whether the graphs that it runs are those that were planned together.

Where data or chance decide which graphs come, a step may run graphs that are all known, in a row that nobody has
planned: each has a program that fits with others. Then the next graph's program has to fit into what those before it
have left, or the one that takes least has its place for this step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from elbowroom.execute.region import Region
from elbowroom.measure.resident import give_back_cached
from elbowroom.session.steps import Entry, StepPlanner
from elbowroom.session.watching import Watch
from elbowroom.step.allocator import room_within
from elbowroom.units import format_bytes


class Row:
    """The graphs of one forward after the other. `say` is told if no program of a graph fits where it came."""

    def __init__(self, planner: StepPlanner, watch: Watch, say: Callable[[str], None]) -> None:
        self._planner, self._watch, self._say = planner, watch, say
        self._entry: Entry | None = None
        self._planned: Sequence[Region] = ()
        self._is_other = False
        self._fitted: set[Region] = set()  # planned for this forward alone
        self._replaced: dict[Region, int] = {}  # the numbers of programs that have lent their place
        self._least: WeakKeyDictionary[Region, int] = WeakKeyDictionary()  # the program that takes least, by number

    @contextmanager
    def follow(self, entry: Entry, planned: Sequence[Region], batch: Any) -> Iterator[None]:
        """In the block a forward of an entry runs, which is planned to run these graphs."""
        self._entry, self._planned, self._is_other, self._fitted = entry, planned, False, set()
        entry.batch, entry.came = batch, []
        try:
            yield
        finally:
            self._entry = None
            entry.batch, entry.came = (), []
            for region, number in self._replaced.items():
                region.current = number  # backwards that wait know theirs
            self._replaced = {}

    def was_fitted(self, region: Region) -> None:
        """A graph was planned while the forward runs, beside what is there."""
        self._fitted.add(region)

    def comes(self, region: Region) -> bool:
        """A graph is about to run, and may."""
        entry = self._entry
        if entry is not None:
            place = len(entry.came)
            self._is_other |= place >= len(self._planned) or self._planned[place] is not region
            if self._is_other and region.current >= 0 and region not in self._fitted:
                self._make_fit(region, entry)
            entry.came.append(region)
        return True

    def _make_fit(self, region: Region, entry: Entry) -> None:
        """See to it that a graph's program fits beside what the graphs before it have saved. If even the least does
        not, that is said: what the step did so far stays done."""
        left = self._room(entry) - entry.held_bytes
        if region.peak_bytes <= left:
            return
        before = region.current
        if region not in self._least:
            with self._watch.paused():
                self._planner.plan_least(region)
                self._least[region] = region.current
                give_back_cached()
        self._replaced.setdefault(region, before)
        region.current = self._least[region]
        if region.peak_bytes > left:
            least = format_bytes(self._planner.options.budget_bytes + region.peak_bytes - left)
            self._say(f"its parts came in an order that was not planned, and so they need at least {least}")

    def _room(self, entry: Entry) -> int:
        """For all that forwards save and backwards need."""
        assert entry.plan is not None
        cuda = entry.graphs[0].device.type == "cuda"
        resident, budget = entry.plan.resident_bytes, self._planner.options.budget_bytes
        return room_within(budget, resident, cuda=cuda, is_measured=True)
