"""Plans a step: measures its graphs, finds the best programs within the budget, installs them; plans it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from elbowroom.capture.fingerprint import fingerprint
from elbowroom.errors import BudgetTooSmall
from elbowroom.execute.passed_on import Storage, bytes_besides, storages_behind
from elbowroom.execute.plannable import Plannable
from elbowroom.execute.region import Region
from elbowroom.execute.to_host.host_room import HostRoom
from elbowroom.measure.cache import setting_of
from elbowroom.measure.expandable_segments import was_switched_on
from elbowroom.measure.measured import measured
from elbowroom.measure.optimizer_state import state_tensors
from elbowroom.measure.resident import multiplies_matrices, optimizer_bytes, resident_bytes, step_temporaries
from elbowroom.plan.plan import Plan
from elbowroom.plan.planner import Planned
from elbowroom.plan.regions import region_plan
from elbowroom.problem.platform import Platform
from elbowroom.session.calls import shown_call
from elbowroom.session.handle import Handle
from elbowroom.session.host_link import Moving, given_host_bytes, moving_of, notes_on_moves
from elbowroom.session.late_gradients import have_own_room, keeps_gradients, late_parameters, possibly_late
from elbowroom.session.loading import confirmed, platform_here
from elbowroom.session.looking import Sight
from elbowroom.session.options import Options
from elbowroom.session.planning import (
    Planners,
    needs_trials,
    plan_as_predicted,
    plan_on_trial,
    plan_one,
    plannable,
    planned_all,
)
from elbowroom.session.saying import short_of_room, too_small
from elbowroom.session.watching import BETWEEN, OUTSIDE, WATCHED_STEPS, more_outside

if TYPE_CHECKING:
    from elbowroom.execute.trials import Trials


@dataclass
class Entry:
    """One step: the graphs it runs, in order, and their plan. `key` tells calls apart that need another plan.

    No graphs means that it runs unplanned; `unplanned` says why, or what part of it does.
    """

    key: Any
    graphs: list[Plannable] = field(default_factory=list)
    plan: Plan | None = None
    unplanned: str = ""
    late: list[nn.Parameter] = field(default_factory=list)  # must have no gradient when a step begins
    trials: Trials | None = None  # of programs made for it, where predictions are not exact
    instead: Handle | None = None  # runs it with PyTorch's kernels, because fused ones could not
    instead_entry: Entry | None = None  # its entry there
    unwatched: int = 0  # steps that are still to be watched
    unkept: list[nn.Parameter] = field(default_factory=list)  # no step that begins with their gradients was watched
    excess_bytes: int = 0  # of the latest step over the budget, for which no room is left yet
    batch: Any = ()  # what a step in parts was called with, while its forward runs
    came: list[Region] = field(default_factory=list)  # the graphs of a step in parts, as far as its forward has run
    generation: int = 0  # of the code that its graphs were traced with
    shortfall: str = ""  # why the budget is not kept although everything is planned, if it is not

    @property
    def regions(self) -> list[Region]:
        return [graph.region for graph in self.graphs]

    @property
    def sources(self) -> list[str]:
        """The programs that run, graph by graph."""
        return [region.source for region in self.regions]

    @property
    def host_bytes(self) -> int:
        """What its programs have on the host at once."""
        return sum(graph.region.host_bytes for graph in self.graphs)

    @property
    def held_bytes(self) -> int:
        """What forwards of its graphs, and of those that came in their place, have saved for backwards to come."""
        return sum(region.held_bytes for region in {*self.regions, *self.came})

    def watch_kept_gradients(self) -> None:
        """A step begins. The first ones that do so with gradients are watched anew: they may take more than all those
        that were seen."""
        if self.unkept and any(parameter.grad is not None for parameter in self.unkept):
            self.unkept, self.unwatched = [], WATCHED_STEPS

    @property
    def begins_with_gradients(self) -> bool:
        """Whether gradients are there whose memory the plan uses."""
        return any(parameter.grad is not None for parameter in self.late)


class _Found(NamedTuple):
    """Plans of an entry's graphs, and what they take to be resident.

    `shortfall` says why the budget may not be kept, if that is so. `platform` is that of a plan made earlier.
    """

    plans: list[Planned]
    resident: Mapping[str, int]
    shortfall: str = ""
    platform: Platform | None = None


class StepPlanner:
    """Plans the steps of one model within the options in force."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        self.model = model
        self.options = options
        self._planners = Planners()
        self._moves: Moving | None = None  # found when a step is first planned
        self._outside: dict[Any, int] = {}  # bytes that calls of a key were seen to take outside their plans

    # --- a new step ---

    def plan(self, key: Any, sight: Sight, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        if not sight.regions:
            return Entry(key, unplanned=sight.left_out)
        examples = [example() for region in sight.regions for example in region.example]
        passed_on = sight.passed_on or storages_behind(examples)
        resident = self._resident(sight.regions, (args, dict(kwargs)), passed_on)
        for name in {"batch", BETWEEN} & resident.keys():
            resident[name] *= self.options.forwards
        late = late_parameters(self.model, sight.regions, self.options, resident)
        if self.options.plan is not None:
            return self._load(self.options.plan, key, sight, resident, late)
        entry = Entry(key, self._graphs(sight.regions, late, resident), None, sight.left_out, list(late.values()))
        self._install(entry, self._found_early_or_late(entry, resident), shown_call(args, kwargs))
        return entry

    def plan_midway(self, region: Region, running: Entry | None, budget: int | None = None) -> int:
        """A graph is traced in the middle of a step in parts: something else than the shape has changed.

        It gets a plan of its own, at once, for one step, within what those that wait for their backward leave of the
        budget, or of another one. What those hold is returned, in bytes, with what the step has made between graphs.
        """
        resident = self._resident([region], ())
        resident["waiting"] = resident[BETWEEN] = 0
        if running is not None and running.plan is not None:
            resident["waiting"] = running.held_bytes
            resident["batch"] = running.plan.resident["batch"]  # which is that of the whole step
            resident[BETWEEN] = max(running.plan.resident.get(BETWEEN, 0), self._called_with(region, running.batch))
        plan_one(
            region,
            self._planners,
            budget=budget or self.options.budget_bytes,
            resident=resident,
            estimate=self.options.estimate,
            loss_inside=self.options.loss is not None,
        )
        return resident["waiting"] + resident[BETWEEN]

    def plan_least(self, region: Region) -> None:
        """Install the program of a graph that takes the least memory."""
        options = self.options
        plan_one(
            region,
            self._planners,
            budget=options.budget_bytes,
            resident={},
            estimate=options.estimate,
            loss_inside=options.loss is not None,
            least=True,
        )

    def _resident(self, regions: Sequence[Region], batch: Any, passed_on: Iterable[Storage] = ()) -> dict[str, int]:
        """What is resident. Of what is passed on, that which nobody else counts: what the step makes, and what is
        there before; on CUDA that is `other` anyway."""
        traced = [region.traced.unfused or region.traced for region in regions]
        multiplies = any(multiplies_matrices(graph.nodes) for graph in traced)
        optimizer, device = self.options.optimizer, traced[0].device
        resident = resident_bytes(self.model, batch, optimizer, device, multiplies=multiplies)
        there, made = bytes_besides(passed_on, self._known(batch), device)
        if made:
            resident[BETWEEN] = made
        if there and device.type != "cuda":
            resident["other"] = there
        return resident

    def _known(self, batch: Any) -> list[torch.Tensor | None]:
        """Tensors that are resident by another name."""
        parameters = list(self.model.parameters())
        leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        state = [] if self.options.optimizer is None else state_tensors(self.options.optimizer)
        return [*parameters, *(p.grad for p in parameters), *self.model.buffers(), *leaves, *state]

    def _called_with(self, region: Region, batch: Any) -> int:
        """Bytes of what a graph in the middle of a step is called with now, and nobody else counts. Inputs with a
        gradient come from graphs that wait for their backward."""
        given = [tensor for example in region.example if (tensor := example()) is not None]
        without = storages_behind(tensor for tensor in given if not tensor.requires_grad)
        there, _ = bytes_besides(without, self._known(batch), region.traced.device)
        return 0 if region.traced.device.type == "cuda" else there

    def _graphs(
        self, regions: Sequence[Region], late: Mapping[int, nn.Parameter], resident: Mapping[str, int]
    ) -> list[Plannable]:
        """The step's graphs with their planners, as often as they run before the first backward."""
        loss_inside = self.options.loss is not None
        free_bytes = self.options.budget_bytes - sum(resident.values())
        moving = self._moving(regions[0].traced.device).shared(len(regions) * self.options.forwards)
        found = {
            region: plannable(
                region,
                measured(region.traced, given=region.given, estimate=self.options.estimate, free_bytes=free_bytes),
                self._planners,
                loss_inside=loss_inside,
                late=late,
                moving=moving,
            )
            for region in dict.fromkeys(regions)
        }
        return [found[region] for region in [*regions] * self.options.forwards]

    def _moving(self, device: torch.device) -> Moving:
        """The same for all steps of a session: a plan must not change because the host has less free memory now."""
        if self._moves is None:
            self._moves = moving_of(self.options, device)
        return self._moves

    def _found_early_or_late(self, entry: Entry, resident: Mapping[str, int]) -> _Found:
        """The best plans; if gradients that have a place of their own leave too little room, with late ones."""
        try:
            return self._found_with_room(entry, resident)
        except BudgetTooSmall as refusal:
            regions = entry.regions[: len(entry.regions) // self.options.forwards]
            late = {} if entry.late else possibly_late(self.model, regions, self.options)
            if not late:
                raise
            known, early = (entry.graphs, entry.late, entry.trials), refusal
        entry.graphs = self._graphs(regions, late, resident)
        entry.late, entry.trials = list(late.values()), None
        try:
            return self._found_with_room(entry, resident)
        except BudgetTooSmall as refusal:
            entry.graphs, entry.late, entry.trials = known
            raise min(early, refusal, key=lambda each: each.least_budget) from None

    def _found_with_room(self, entry: Entry, resident: Mapping[str, int]) -> _Found:
        """The best plans that leave room for what was seen to be taken outside. If there are none, the best without,
        unless that is forbidden."""
        roomy = self._with_outside(entry, resident)
        try:
            return _Found(self._found(entry, roomy), roomy)
        except BudgetTooSmall as refusal:
            if OUTSIDE not in roomy or self.options.strict:
                raise
            return _Found(self._found(entry, resident), resident, short_of_room(refusal))

    def _found(self, entry: Entry, resident: Mapping[str, int]) -> list[Planned]:
        """The best plans of an entry's graphs, as predicted or as measured."""
        budget, kept = self.options.budget_bytes, keeps_gradients(self.model)
        if needs_trials(entry.graphs, budget, resident):
            return plan_on_trial(self._trials(entry), budget, resident, self.options.compilations, kept=kept)
        planned = plan_as_predicted(entry.graphs, budget, resident)
        if planned is None:
            raise too_small(budget, resident, entry.graphs, kept=kept)
        return planned

    def _trials(self, entry: Entry) -> Trials:
        from elbowroom.execute.trials import Trials  # the compiler takes seconds to import

        if entry.trials is None:
            left_free = step_temporaries(self.options.optimizer) if self.options.records else None
            entry.trials = Trials(entry.graphs, left_free)
        return entry.trials

    # --- installing ---

    def _install(self, entry: Entry, found: _Found, inputs: str) -> None:
        planned, resident, shortfall, platform = found
        if platform is None and any(graph.planner.platform is not None for graph in entry.graphs):
            platform = self._moving(entry.graphs[0].device).platform
        for graph, plan in dict(zip(entry.graphs, planned, strict=True)).items():
            graph.install(plan)
        entry.plan = Plan(
            budget_bytes=self.options.budget_bytes,
            resident=resident,
            regions=tuple(
                region_plan(graph.planner, plan, fingerprint(graph.measured.captured))
                for graph, plan in zip(entry.graphs, planned, strict=True)
            ),
            setting=setting_of(entry.graphs[0].device),
            inputs=inputs,
            notes=_notes(entry, planned),
            late_gradients=bool(entry.late),
            platform=platform,
        )
        entry.unwatched, entry.excess_bytes, entry.shortfall = 0 if shortfall else WATCHED_STEPS, 0, shortfall
        is_unkept = not (entry.late or shortfall or keeps_gradients(self.model))
        entry.unkept = [p for p in self.model.parameters() if p.requires_grad] if is_unkept else []

    def _load(
        self, plan: Plan, key: Any, sight: Sight, resident: Mapping[str, int], late: Mapping[int, nn.Parameter]
    ) -> Entry:
        """Install a plan made earlier, if it was made for exactly this and the referee confirms it."""
        late = late if plan.late_gradients else {}
        entry = Entry(key, self._graphs(sight.regions, late, resident), None, sight.left_out, list(late.values()))
        budget, host_bytes = self.options.budget_bytes, given_host_bytes(self.options)
        planned = confirmed(plan, entry.graphs, resident, budget, lambda: self._trials(entry), host_bytes)
        found = _Found(planned, resident, platform=platform_here(plan, host_bytes))
        self._install(entry, found, plan.inputs)
        return entry

    # --- again ---

    def replan(self, entries: Sequence[Entry], options: Options) -> None:
        """Plan steps with other options; if one cannot be, nothing changes."""
        old = self.options
        before = [(entry.graphs, entry.late, entry.trials) for entry in entries]
        self.options = options
        try:
            residents = [self._resident_now(entry) for entry in entries]
            for entry, resident in zip(entries, residents, strict=True):
                self._note_outside(entry)
                self._look_at_gradients(entry, resident)
                if options.optimizer is not old.optimizer:
                    entry.trials = None  # what a recording must leave free has changed
            found = planned_all(
                partial(self._found_early_or_late, entry, resident)
                for entry, resident in zip(entries, residents, strict=True)
            )
        except BaseException:
            self.options = old
            for entry, known in zip(entries, before, strict=True):
                entry.graphs, entry.late, entry.trials = known
            raise
        for entry, plans in zip(entries, found, strict=True):
            assert entry.plan is not None
            self._install(entry, plans, entry.plan.inputs)

    def leave_room(self, entry: Entry) -> None:
        """Plan a step again that took more than its budget, with so much left free. If that does not fit, the plan
        stays, and falls short."""
        assert entry.plan is not None
        self._note_outside(entry)
        resident = self._with_outside(entry, entry.plan.resident)
        try:
            self._install(entry, _Found(self._found(entry, resident), resident), entry.plan.inputs)
        except BudgetTooSmall as refusal:
            entry.unwatched, entry.unkept, entry.shortfall = 0, [], short_of_room(refusal)

    def _note_outside(self, entry: Entry) -> None:
        """What the latest step took too much was taken outside of its plan."""
        if entry.excess_bytes and entry.plan is not None:
            outside = more_outside(entry.plan, entry.excess_bytes)
            self._outside[entry.key] = max(outside, self._outside.get(entry.key, 0))
            entry.excess_bytes = 0

    def _with_outside(self, entry: Entry, resident: Mapping[str, int]) -> dict[str, int]:
        """What is resident, and what was seen to be taken outside the plans of such calls."""
        outside = self._outside.get(entry.key)
        return {**resident, OUTSIDE: outside} if outside else dict(resident)

    def _resident_now(self, entry: Entry) -> dict[str, int]:
        """What is resident, with the optimizer's state as it is or will be.

        State that was there before its optimizer was known has counted as `other` and still does: what else is in use
        now says nothing of what will be, because workspaces of matrix products come and go.
        """
        assert entry.plan is not None
        optimizer = self.options.optimizer
        state = 0 if optimizer is None else optimizer_bytes(optimizer, entry.graphs[0].device)
        known = {name: size for name, size in entry.plan.resident.items() if name != OUTSIDE}
        return {**known, "optimizer": state}

    def _look_at_gradients(self, entry: Entry, resident: Mapping[str, int]) -> None:
        """Make other planners, if gradients are to be planned otherwise now."""
        if entry.late and not have_own_room(entry.late, entry.regions[0], self.options, resident):
            return
        regions = entry.regions[: len(entry.regions) // self.options.forwards]
        late = late_parameters(self.model, regions, self.options, resident)
        if bool(late) != bool(entry.late):
            entry.graphs = self._graphs(regions, late, resident)
            entry.late, entry.trials = list(late.values()), None


def release_others(entries: Iterable[Entry], entry: Entry | None) -> None:
    """Recordings hold memory: only that of the step that runs may."""
    for other in entries:
        if other is not entry:
            for region in other.regions:
                region.release()


def reserve_host(room: HostRoom, entries: Iterable[Entry]) -> None:
    """Have the memory on the host that plans need. Steps take turns, so the one that needs most of it counts."""
    planned = [entry for entry in entries if entry.graphs]
    if planned:
        room.reserve(max(entry.host_bytes for entry in planned), planned[0].graphs[0].device)


def _notes(entry: Entry, planned: list[Planned]) -> tuple[str, ...]:
    notes: tuple[str, ...] = ()
    if entry.late:
        notes += ("A step begins without gradients: until the backward makes them, activations use their memory.",)
    if any(plan.measured_peak_bytes is not None for plan in planned):
        fused = entry.graphs[0].measured.is_fused
        notes += (f"{'Inductor' if fused else 'PyTorch'}'s kernels: the peak is measured, times are estimates.",)
    if any(plan.recorded for plan in planned):
        notes += ("Replayed as CUDA graphs: their memory is held between steps, too.",)
    if any(plan.program.moves for plan in planned):
        notes += notes_on_moves(entry.graphs[0].device)
    if was_switched_on():
        notes += ("PyTorch's allocator uses expandable segments: this process may take little more than the budget.",)
    return notes
