"""Graphs of one compiled callable, which share a budget although each is seen only when it first runs.

Graphs that run while the forwards of others wait for their backward make a row: what the earlier ones save stays
while the later ones run. A graph that is new gets what the rest of its row has left. From the next step on the whole
row is planned together. Graphs that never wait at the same time, as those of other shapes, are alternatives: they
have the budget each for themselves.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from elbowroom.capture.joint_graph import live_bytes
from elbowroom.errors import BudgetTooSmall
from elbowroom.execute.plannable import Plannable
from elbowroom.execute.region import Region
from elbowroom.execute.to_host.host_room import HostRoom
from elbowroom.measure.resident import optimizer_bytes
from elbowroom.plan.planner import Planned
from elbowroom.plan.together import least_together, peak_together
from elbowroom.session.host_link import Moving, moving_of
from elbowroom.session.options import Options
from elbowroom.session.planning import needs_trials, plan_as_predicted, plan_on_trial
from elbowroom.session.saying import too_small
from elbowroom.step.allocator import budget_for, room_within
from elbowroom.units import format_bytes

Row: TypeAlias = tuple[Region, ...]

_LOG = logging.getLogger("elbowroom")
_MOST_ROWS = 32  # planned together; where every step runs other graphs, planning each time would take for ever


@dataclass(frozen=True, eq=False)
class _Member:
    """A graph and its program in force, with the storages that it shows of what is resident, by address."""

    graph: Plannable
    planned: Planned
    parameters: Mapping[int, int]
    others: Mapping[int, int]  # the batch and buffers
    passed_on: Mapping[int, int]  # inputs that take a gradient: if other graphs ran before, it is they that hold them


class GraphGroup:
    """The graphs of one compiled callable, in the rows that they were seen to run in."""

    def __init__(self) -> None:
        self._members: dict[Region, _Member] = {}
        self._rows: list[Row] = []  # none is the beginning of another
        self._row: Row = ()  # those that have run since nothing waited
        self._runs: dict[Region, int] = {}
        self._unplanned = False  # whether a row was seen that has not been planned as a whole
        self._said: set[str] = set()
        self.host_room = HostRoom()  # for values of all graphs that move
        self._host_limit = 0
        self._left: Moving | None = None  # what the next graphs may have of the host's memory

    def moving(self, options: Options, device: torch.device) -> Moving:
        """The link, and half of the host's memory that no earlier graph was given: nobody knows how many there will
        be, and all of them may wait for their backward at once."""
        if self._left is None:
            self._left = moving_of(options, device)
            self._host_limit = self._left.host_bytes or 0
        given = self._left.shared(2)
        self._left = self._left.without(given.host_bytes or 0)
        return given

    def plan_first(
        self, region: Region, options: Options, make: Callable[[Mapping[str, int], bool], tuple[Plannable, Planned]]
    ) -> None:
        """Install a program before a graph's first run. `make` plans it with what is resident, earlier graphs
        included; told that there are none, it raises where nothing fits, else it takes the least program."""
        if not self._waiting():
            self._row = ()
        alone = not self._row
        shown = _storages(region)
        earlier = [self._members[r] for r in self._row if r in self._members]
        resident = self._resident(earlier, options, region.traced.device, shown)
        resident["earlier graphs"] = self._held()
        graph, planned = make(resident, alone)
        self._members[region] = _Member(graph, planned, *shown)
        graph.install(replace(planned, recorded=False))
        self._reserve_host()
        region.watch = partial(self._around, region, options)
        peak = sum(resident.values()) + planned.peak_bytes
        _LOG.info("planned a graph: %s of %s", format_bytes(peak), format_bytes(options.budget_bytes))

    def _around(self, region: Region, options: Options) -> AbstractContextManager[Any]:
        """Called when a program is about to run; the first time after each count of runs it is a forward."""
        if self._runs.get(region) != region.runs:
            self._runs[region] = region.runs
            self._forward(region, options)
        return nullcontext()

    def _forward(self, region: Region, options: Options) -> None:
        if not self._waiting():
            self._row = ()
            if self._unplanned:
                self._unplanned = False
                self._plan_rows(options)
        self._row = row = (*self._row, region)
        if any(known[: len(row)] == row for known in self._rows):
            return
        others = [known for known in self._rows if row[: len(known)] != known]
        is_planned = len(others) < _MOST_ROWS
        if is_planned:
            self._rows = [*others, row]
        if len(row) > 1:
            self._unplanned |= is_planned
            self._say_if_over(row, options, is_planned=is_planned)

    def _waiting(self) -> bool:
        return any(region.tickets.waiting for region in self._members)

    def _held(self) -> int:
        """Bytes that forwards hold which wait for their backward."""
        return sum(
            len(region.tickets.waiting) * member.planned.prediction.saved_bytes
            for region, member in self._members.items()
        )

    def _resident(
        self, members: Sequence[_Member], options: Options, device: torch.device, last: _Storages | None = None
    ) -> dict[str, int]:
        """What is resident while a row runs; storages that several graphs have, once."""
        shown = [(m.parameters, m.others, m.passed_on) for m in members] + ([last] if last else [])
        parameters = sum(_union(each[0] for each in shown).values())
        others = _union([*(each[1] for each in shown), shown[0][2]])
        found = {"parameters": parameters, "gradients": parameters, "batch and buffers": sum(others.values())}
        if options.optimizer is not None:
            found["optimizer"] = optimizer_bytes(options.optimizer, device)
        return found

    def _resident_in(self, row: Row, options: Options) -> dict[str, int]:
        members = [self._members[region] for region in row]
        return self._resident(members, options, members[0].graph.device)

    # --- planning rows ---

    def _plan_rows(self, options: Options) -> None:
        """Programs with which every row fits. A graph of several rows takes the one that saves least."""
        found: dict[Region, Planned] = {}
        rows = [row for row in self._rows if len(row) > 1]
        for row in rows:
            for region, planned in zip(row, self._planned_together(row, options), strict=True):
                if region not in found or _size(planned) < _size(found[region]):
                    found[region] = planned
        for row in rows:
            if self._peak(row, found) > self._room(row, options):
                found.update({region: self._members[region].graph.planner.least for region in row})
        for region, planned in found.items():
            self._members[region] = replace(self._members[region], planned=planned)
            self._members[region].graph.install(replace(planned, recorded=False))
        self._reserve_host()

    def _reserve_host(self) -> None:
        """Have the host's memory for any row that was seen. A graph that runs twice in a row takes twice as much."""
        rows = [*self._rows, tuple(self._members)]
        size = max(sum(region.host_bytes for region in row) for row in rows)
        self.host_room.reserve(size, next(iter(self._members)).traced.device)
        if size > self._host_limit:
            self._say(
                "elbowroom: a compiled model runs a graph several times before its backward, and so has "
                f"{format_bytes(size)} on the host, more than its host_budget of {format_bytes(self._host_limit)}; "
                "elbowroom.fit plans for that"
            )

    def _planned_together(self, row: Row, options: Options) -> list[Planned]:
        graphs = [self._members[region].graph for region in row]
        resident = self._resident_in(row, options)
        budget = options.budget_bytes
        try:
            if needs_trials(graphs, budget, resident):
                from elbowroom.execute.trials import Trials  # the compiler takes seconds to import

                return plan_on_trial(Trials(graphs), budget, resident, options.compilations)
            planned = plan_as_predicted(graphs, budget, resident)
            if planned is not None:
                return planned
            refusal = too_small(budget, resident, graphs)
        except BudgetTooSmall as failure:
            refusal = failure
        self._say(f"elbowroom: {refusal}. Its {len(row)} graphs run with the least programs, over budget")
        return least_together([graph.planner for graph in graphs])

    # --- what is said ---

    def _say_if_over(self, row: Row, options: Options, *, is_planned: bool) -> None:
        peak = self._peak(row, {region: self._members[region].planned for region in row})
        if peak <= self._room(row, options):
            return
        if not is_planned:
            self._say(
                f"elbowroom: a compiled model runs its graphs in more than {_MOST_ROWS} different rows. Others are "
                f"not planned together, and take more than their budget of {format_bytes(options.budget_bytes)}; "
                "elbowroom.fit sees all of a model before its first step"
            )
            return
        resident = sum(self._resident_in(row, options).values())
        cuda = self._members[row[0]].graph.device.type == "cuda"
        self._say(
            f"elbowroom: a compiled model runs {len(row)} graphs before its backward, which take "
            f"{format_bytes(budget_for(peak, resident, cuda=cuda))} in this step, more than their budget of "
            f"{format_bytes(options.budget_bytes)}: torch.compile shows a graph only when it first runs, when others "
            "hold their memory already. From the next step on they are planned together; elbowroom.fit sees all of a "
            "model before its first step"
        )

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message, stacklevel=2)

    def _peak(self, row: Row, planned: Mapping[Region, Planned]) -> int:
        return peak_together([planned[region] for region in row])

    def _room(self, row: Row, options: Options) -> int:
        resident = sum(self._resident_in(row, options).values())
        cuda = self._members[row[0]].graph.device.type == "cuda"
        return room_within(options.budget_bytes, resident, cuda=cuda, is_measured=True)


def _size(planned: Planned) -> tuple[int, int]:
    return planned.prediction.saved_bytes, planned.prediction.peak_bytes


_Storages: TypeAlias = tuple[dict[int, int], dict[int, int], dict[int, int]]


def _storages(region: Region) -> _Storages:
    """Bytes of parameters, of the batch and buffers, and of inputs that take a gradient, by address."""
    captured = region.traced
    parameters: dict[int, int] = {}
    others: dict[int, int] = {}
    passed_on: dict[int, int] = {}
    for place, (i, example) in enumerate(zip(captured.graph.inputs, region.example, strict=True)):
        tensor = example()
        address = -1 - id(captured.nodes[i]) if tensor is None else tensor.untyped_storage().data_ptr()
        takes_gradient = captured.backward_outputs[place] is not None
        kind = parameters if i in captured.graph.parameters else passed_on if takes_gradient else others
        kind[address] = live_bytes(captured.nodes[i])
    return parameters, others, passed_on


def _union(parts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    united: dict[int, int] = {}
    for part in parts:
        united |= {address: max(size, united.get(address, 0)) for address, size in part.items()}
    return united
