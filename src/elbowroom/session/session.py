"""A model under a budget: plans each new shape of input, runs the planned programs, and plans again where it must.

A session belongs to one fitted model. The first time it sees a shape it looks at the model (`looking.py`), measures
the operators, plans all graphs together within the budget (`planning.py`) and installs their programs. From then on
it checks, call by call, that the planned programs really ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from elbowroom.capture.fingerprint import fingerprint
from elbowroom.errors import BudgetTooSmall
from elbowroom.execute.plannable import Plannable, recordable
from elbowroom.execute.region import Region
from elbowroom.measure.cache import setting_of
from elbowroom.measure.measured import measured
from elbowroom.measure.resident import (
    device_bytes,
    multiplies_matrices,
    optimizer_bytes,
    resident_bytes,
    step_temporaries,
)
from elbowroom.plan.plan import Plan
from elbowroom.plan.planner import Planned
from elbowroom.plan.regions import region_plan
from elbowroom.session.calls import call_key, shown_call
from elbowroom.session.loading import confirmed
from elbowroom.session.looking import Looker, Sight
from elbowroom.session.options import Options
from elbowroom.session.planning import (
    fused_or_plain,
    needs_trials,
    plan_as_predicted,
    plan_on_trial,
    plan_one,
    plannable,
)
from elbowroom.session.saying import say_fallback, say_unplanned, too_many_shapes, too_small
from elbowroom.step.allocator import room_within
from elbowroom.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from elbowroom.execute.trials import Trials

# Of the room, for gradients. Scattered over a recording's pool they leave gaps (466 MiB in a ResNet-101's), so that
# little ones are better off in a place of their own; larger ones would take more there than the gaps do.
_LITTLE = 0.05


@dataclass
class Entry:
    """One shape of input: the graphs it runs, in order, and their plan.

    No graphs means that it runs unplanned; `unplanned` says why, or what part of it does.
    """

    graphs: list[Plannable] = field(default_factory=list)
    plan: Plan | None = None
    unplanned: str = ""
    late: list[nn.Parameter] = field(default_factory=list)  # must have no gradient when a step begins
    trials: Trials | None = None  # of programs made for it, where predictions are not exact
    instead: Session | None = None  # runs it with PyTorch's kernels, because fused ones could not

    @property
    def regions(self) -> list[Region]:
        return [graph.region for graph in self.graphs]

    @property
    def sources(self) -> list[str]:
        """The programs that run, graph by graph."""
        return [region.source for region in self.regions]


class Session:
    """Runs a step, a function of the batch that calls the model, within a budget."""

    def __init__(
        self, model: nn.Module, make_step: Callable[[nn.Module], Callable[..., Any]], options: Options
    ) -> None:
        self.model = model
        self.make_step = make_step
        self.step = step = make_step(model)
        self.options = options
        self.entries: dict[Any, Entry] = {}
        self._traced_midway: list[Region] = []  # graphs that were traced in the middle of a step
        self._said: set[str] = set()
        self._instead: Session | None = None
        limit = 8 * (options.max_shapes + 1)
        self._looker = Looker(model, step, self._plan_midway, fused=options.fuses, graph_limit=limit)

    # --- running ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.step(*args, **kwargs)
        entry = self.prepare(args, kwargs)
        if any(parameter.grad is not None for parameter in entry.late):
            entry = self._plan_again(entry, args, kwargs)
        if entry.instead is not None:
            return entry.instead(*args, **kwargs)
        if not entry.graphs:
            return self.step(*args, **kwargs)
        self._release_others(entry)
        regions = entry.regions
        before = {region: region.runs for region in regions}
        outputs = self._looker.run(args, kwargs)
        if self._traced_midway:  # the model has changed under this shape: look at it afresh before the next step
            self._traced_midway = []
            self.entries = {key: other for key, other in self.entries.items() if other is not entry}
        elif not all(region.runs > runs for region, runs in before.items()):
            self._say_unplanned("PyTorch ran it without the planned program; something it checks has changed")
        for region in before:
            if len(region.tickets.waiting) > regions.count(region):
                self._say_unplanned(
                    f"more than {self.options.forwards} of its forwards wait for their backward; pass forwards=…"
                )
        return outputs

    def _release_others(self, entry: Entry | None) -> None:
        """Recordings hold memory: only that of the shape that runs may."""
        for other in self.entries.values():
            if other is not entry:
                for region in other.regions:
                    region.release()

    # --- planning ---

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        """The entry of this shape of input, planned now if it is new."""
        key = call_key(self.model, args, kwargs)
        if key in self.entries:
            return self.entries[key]
        self._release_others(None)
        planned = sum(bool(entry.graphs) for entry in self.entries.values())
        if planned >= self.options.max_shapes:
            entry = Entry(unplanned=too_many_shapes(planned))
        elif self.options.fuses:
            entry = fused_or_plain(
                lambda: self._plan(args, kwargs),
                lambda: self._plan_unfused(args, kwargs),
                lambda why: say_fallback(type(self.model).__name__, why, self._said),
            )
        else:
            entry = self._plan(args, kwargs)
        if entry.unplanned:
            self._say_unplanned(entry.unplanned)
        self.entries[key] = entry
        return entry

    def _plan(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        sight = self._looker.look(args, kwargs)
        if not sight.regions:
            return Entry(unplanned=sight.left_out)
        resident = self._resident(sight.regions, (args, dict(kwargs)))
        resident["batch"] *= self.options.forwards
        late = self._without_gradients(sight, resident)
        if self.options.plan is not None:
            return self._load(self.options.plan, sight, resident, late)
        entry = Entry(self._graphs(sight, late), None, sight.left_out, list(late.values()))
        self._install(entry, self._found(entry, resident), resident, shown_call(args, kwargs))
        return entry

    def _plan_unfused(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        """The same with PyTorch's kernels, in a session of its own."""
        if self._instead is None:
            self._instead = Session(self.model, self.make_step, replace(self.options, kernels="torch"))
        entry = self._instead.prepare(args, kwargs)
        return Entry(plan=entry.plan, unplanned=entry.unplanned, instead=self._instead)

    def _plan_midway(self, region: Region) -> None:
        """A graph is traced in the middle of a step: something else than the shape has changed.

        It gets a plan of its own, at once, for one step.
        """
        plan_one(
            region,
            budget=self.options.budget_bytes,
            resident=self._resident([region], ()),
            estimate=self.options.estimate,
            loss_inside=self.options.loss is not None,
        )
        self._traced_midway.append(region)

    def _resident(self, regions: Sequence[Region], batch: Any) -> dict[str, int]:
        traced = [region.traced.unfused or region.traced for region in regions]
        multiplies = any(multiplies_matrices(graph.nodes) for graph in traced)
        return resident_bytes(self.model, batch, self.options.optimizer, traced[0].device, multiplies=multiplies)

    def _graphs(self, sight: Sight, late: Mapping[int, nn.Parameter]) -> list[Plannable]:
        """The step's graphs with their planners, as often as they run before the first backward."""
        loss_inside = self.options.loss is not None
        found = {
            region: plannable(
                region, measured(region.traced, estimate=self.options.estimate), loss_inside=loss_inside, late=late
            )
            for region in dict.fromkeys(sight.regions)
        }
        return [found[region] for region in sight.regions * self.options.forwards]

    def _without_gradients(self, sight: Sight, resident: Mapping[str, int]) -> dict[int, nn.Parameter]:
        """Parameters that have no gradient before the backward makes it, by their number in the only graph.

        None of them where some have one: those are kept from step to step. Several graphs might share parameters. And
        where they are little, and the step may be recorded, they are better off in a place of their own: scattered
        over a recording's pool, they leave gaps too small for large images, and it takes more in the end.
        """
        several = len(sight.regions) * self.options.forwards > 1
        if self.options.accumulates or several or self._keeps_gradients:
            return {}
        trained = {(p.data_ptr(), p.shape): p for p in self.model.parameters() if p.requires_grad}
        (region,) = sight.regions
        graph = region.traced.graph
        given = dict(zip(graph.inputs, (example() for example in region.example), strict=True))
        accumulated = {i for i, gradient in graph.gradients if graph.ops[gradient].kind == "backward"}
        tensors = {i: given[i] for i in graph.parameters if i in accumulated}
        found = {i: trained.get((t.data_ptr(), t.shape)) for i, t in tensors.items() if t is not None}
        late = {i: parameter for i, parameter in found.items() if parameter is not None}
        return {} if self._has_room_for(late.values(), region, resident) else late

    def _has_room_for(self, late: Iterable[nn.Parameter], region: Region, resident: Mapping[str, int]) -> bool:
        """Whether gradients are so little that a recording may have them in a place of their own."""
        if not self.options.records or not recordable(region.traced):
            return False
        cuda = region.traced.device.type == "cuda"
        room = room_within(self.options.budget_bytes, sum(resident.values()), cuda=cuda, is_measured=True)
        size = sum(parameter.numel() * parameter.element_size() for parameter in late)
        return size <= _LITTLE * room

    @property
    def _keeps_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.model.parameters())

    def _found(self, entry: Entry, resident: Mapping[str, int]) -> list[Planned]:
        """The best plans of an entry's graphs, as predicted or as measured."""
        budget, kept = self.options.budget_bytes, self._keeps_gradients
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

    def _install(self, entry: Entry, planned: list[Planned], resident: Mapping[str, int], inputs: str) -> None:
        for graph, found in dict(zip(entry.graphs, planned, strict=True)).items():
            graph.install(found)
        entry.plan = Plan(
            budget_bytes=self.options.budget_bytes,
            resident=resident,
            regions=tuple(
                region_plan(graph.planner, found, fingerprint(graph.measured.captured))
                for graph, found in zip(entry.graphs, planned, strict=True)
            ),
            setting=setting_of(entry.graphs[0].device),
            inputs=inputs,
            notes=_notes(entry, planned),
            late_gradients=bool(entry.late),
        )

    def _load(self, plan: Plan, sight: Sight, resident: Mapping[str, int], late: Mapping[int, nn.Parameter]) -> Entry:
        """Install a plan made earlier, if it was made for exactly this and the referee confirms it."""
        late = late if plan.late_gradients else {}
        entry = Entry(self._graphs(sight, late), None, sight.left_out, list(late.values()))
        planned = confirmed(plan, entry.graphs, resident, self.options.budget_bytes, lambda: self._trials(entry))
        self._install(entry, planned, resident, plan.inputs)
        return entry

    # --- planning again ---

    def _plan_again(self, entry: Entry, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        """Gradients of an earlier backward are there, whose memory the plan uses: plan without it from now on.

        Where they are kept once, they will be again. If that does not fit, the plan stays and it is said.
        """
        if self.options.plan is not None:
            return self._plan_stays(
                entry, "its plan is for steps that begin without; set them to None, or plan again"
            )
        known = self.entries
        self.entries = {key: other for key, other in known.items() if other is not entry}
        try:
            return self.prepare(args, kwargs)
        except BudgetTooSmall as refusal:
            self.entries = known
            least = format_bytes(refusal.least_budget)
            return self._plan_stays(entry, f"set them to None before each step, or allow {least}, to keep them")
        except BaseException:
            self.entries = known
            raise

    def _plan_stays(self, entry: Entry, remedy: str) -> Entry:
        entry.late = []  # said once
        self._say_unplanned(f"a step began with the gradients of an earlier backward; {remedy}")
        return entry

    def set_budget(self, budget: int | str) -> None:
        """Plan every shape seen so far within another budget; if one cannot, nothing changes."""
        size = parse_bytes(budget, device_bytes=device_bytes(self.model))
        self._replan(replace(self.options, budget=size, plan=None), lambda instead: instead.set_budget(size))

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the state of an optimizer that was made after `fit`, and plan every shape seen so far again.

        If one does not fit with it, nothing changes.
        """
        self._replan(
            replace(self.options, optimizer=optimizer, plan=None), lambda instead: instead.set_optimizer(optimizer)
        )

    def _replan(self, options: Options, tell_instead: Callable[[Session], None]) -> None:
        old = self.options
        entries = [entry for entry in self.entries.values() if entry.plan is not None and entry.instead is None]
        before = [(entry.graphs, entry.late, entry.trials) for entry in entries]
        self.options = options
        try:
            residents = [self._resident_now(entry) for entry in entries]
            for entry, resident in zip(entries, residents, strict=True):
                self._look_at_gradients(entry, resident)
                if options.optimizer is not old.optimizer:
                    entry.trials = None  # what a recording must leave free has changed
            found = [self._found(entry, resident) for entry, resident in zip(entries, residents, strict=True)]
            if self._instead is not None:
                tell_instead(self._instead)
        except BaseException:
            self.options = old
            for entry, known in zip(entries, before, strict=True):
                entry.graphs, entry.late, entry.trials = known
            raise
        for entry, plans, resident in zip(entries, found, residents, strict=True):
            assert entry.plan is not None
            self._install(entry, plans, resident, entry.plan.inputs)
        for key, entry in self.entries.items():
            if entry.instead is not None:
                entry.plan = entry.instead.entries[key].plan

    def _resident_now(self, entry: Entry) -> dict[str, int]:
        """What is resident, with the optimizer's state as it is or will be.

        State that was there before its optimizer was known has counted as `other` and still does: what else is in use
        now says nothing of what will be, because workspaces of matrix products come and go.
        """
        assert entry.plan is not None
        optimizer = self.options.optimizer
        state = 0 if optimizer is None else optimizer_bytes(optimizer, entry.graphs[0].device)
        return {**entry.plan.resident, "optimizer": state}

    def _look_at_gradients(self, entry: Entry, resident: Mapping[str, int]) -> None:
        """Make other planners, if gradients are to be planned otherwise now."""
        if entry.late and not self._has_room_for(entry.late, entry.regions[0], resident):
            return
        sight = Sight(tuple(entry.regions[: len(entry.regions) // self.options.forwards]), entry.unplanned)
        late = self._without_gradients(sight, resident)
        if bool(late) != bool(entry.late):
            entry.graphs = self._graphs(sight, late)
            entry.late, entry.trials = list(late.values()), None

    # --- what others ask ---

    def fuses(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether fused kernels run this shape of input, or some of it: if part is traced anew, no entry is left."""
        entry = self.entries.get(call_key(self.model, args, kwargs))
        return self.options.fuses and (entry is None or bool(entry.graphs))

    def again(self, model: nn.Module) -> Session:
        """A session with the same options for another copy of the model."""
        return Session(model, self.make_step, self.options)

    def _say_unplanned(self, why: str) -> None:
        say_unplanned(self.model, self.options, why, self._said)


def _notes(entry: Entry, planned: list[Planned]) -> tuple[str, ...]:
    notes: tuple[str, ...] = ()
    if entry.late:
        notes += ("A step begins without gradients: until the backward makes them, others use their memory.",)
    if any(plan.measured_peak_bytes is not None for plan in planned):
        fused = entry.graphs[0].measured.is_fused
        notes += (f"{'Inductor' if fused else 'PyTorch'}'s kernels: the peak is measured, times are estimates.",)
    if any(plan.recorded for plan in planned):
        notes += ("Replayed as CUDA graphs: their memory is held between steps, too.",)
    return notes
