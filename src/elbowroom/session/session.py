"""A model under a budget: plans each new graph of it, runs the planned programs, and plans again where it must.

A session belongs to one fitted model. PyTorch tells which graph a call runs (`looking.py`); a graph that is new is
measured and planned within the budget (`planning.py`) before the call goes on. A step that cannot be one graph is
planned as several, call by call, and what no graph holds is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from elbowroom.capture.fingerprint import fingerprint
from elbowroom.errors import BudgetTooSmall, first_line
from elbowroom.execute.plannable import Plannable
from elbowroom.execute.region import Region, Stopped
from elbowroom.measure.cache import setting_of
from elbowroom.measure.measured import measured
from elbowroom.measure.resident import (
    device_bytes,
    multiplies_matrices,
    optimizer_bytes,
    resident_bytes,
    step_temporaries,
)
from elbowroom.measure.undisturbed import undisturbed
from elbowroom.plan.plan import Plan
from elbowroom.plan.planner import Planned
from elbowroom.plan.regions import region_plan
from elbowroom.session.calls import call_key, shown_call
from elbowroom.session.handle import Handle
from elbowroom.session.late_gradients import have_own_room, keeps_gradients, late_parameters
from elbowroom.session.loading import confirmed
from elbowroom.session.looking import Looker, NotWhole, Sight
from elbowroom.session.options import Options
from elbowroom.session.planning import (
    fused_or_plain,
    needs_trials,
    plan_as_predicted,
    plan_on_trial,
    plan_one,
    plannable,
)
from elbowroom.session.saying import say_fallback, too_many_shapes, too_small
from elbowroom.units import format_bytes, parse_bytes

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
    instead: Session | None = None  # runs it with PyTorch's kernels, because fused ones could not

    @property
    def regions(self) -> list[Region]:
        return [graph.region for graph in self.graphs]

    @property
    def sources(self) -> list[str]:
        """The programs that run, graph by graph."""
        return [region.source for region in self.regions]

    @property
    def begins_with_gradients(self) -> bool:
        """Whether gradients are there whose memory the plan uses."""
        return any(parameter.grad is not None for parameter in self.late)


class Session(Handle):
    """Runs a step, a function of the batch that calls the model, within a budget.

    `entries` has one for each graph that holds a whole step, under that graph; other calls are under their key.
    """

    def __init__(
        self, model: nn.Module, make_step: Callable[[nn.Module], Callable[..., Any]], options: Options
    ) -> None:
        super().__init__(model, make_step, options)
        self.entries: dict[Any, Entry] = {}
        self._keyed = False  # whether some entry is under a key
        self._running: Entry | None = None
        self._replaced: WeakSet[Region] = WeakSet()  # graphs that another one of the same key has taken the place of
        self._alternating: set[Any] = set()  # keys for which several graphs take turns
        self._traced_midway: list[Region] = []  # graphs that were traced in the middle of a step
        self._instead: Session | None = None
        self._planning = RLock()
        limit = 8 * (options.max_shapes + 1)
        self._looker = Looker(model, self.step, self._plan_midway, fused=options.fuses, graph_limit=limit)
        self._looker.looks.may_run = self._may_run

    # --- running ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._runs_plainly():
            return self.step(*args, **kwargs)
        if self._keyed:
            entry = self.entries.get(call_key(self.model, args, kwargs))
            if entry is not None:
                return self._run_apart(entry, args, kwargs)
        while True:
            try:
                outputs = self._looker.run(args, kwargs)
            except Stopped as stopped:
                region = stopped.region
            except NotWhole as refusal:
                why = refusal
                break
            else:
                self._count_waiting(self._running)
                return outputs
            entry = self._planned(region, args, kwargs)
            if not entry.graphs:
                return self._run_apart(entry, args, kwargs)
        return self._run_not_whole(why, args, kwargs)

    def _may_run(self, region: Region) -> bool:
        """Whether a graph may run now as planned. If not, `_planned` sees to it."""
        entry = self.entries.get(region)
        if entry is None or entry.begins_with_gradients:
            return False
        if entry is not self._running:
            self._release_others(entry)
            self._running = self._latest = entry
        return True

    def _run_not_whole(self, refusal: NotWhole, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if refusal.in_parts or self.options.strict:
            return self._run_apart(self._prepare_apart(refusal, args, kwargs), args, kwargs)
        outputs = self.step(*args, **kwargs)  # if it is the step that fails, it does so here, as without a plan
        self._remember(Entry(call_key(self.model, args, kwargs), unplanned=refusal.why))
        return outputs

    def _run_apart(self, entry: Entry, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A step that is not one graph: in parts, by another session, or unplanned."""
        if entry.begins_with_gradients:
            entry = self._plan_again(entry, lambda: self._plan_parts(args, kwargs))
        self._latest = entry
        if entry.instead is not None:
            return entry.instead(*args, **kwargs)
        if not entry.graphs:
            return self.step(*args, **kwargs)
        if entry is not self._running:
            self._release_others(entry)
            self._running = entry
        before = {region: region.runs for region in entry.regions}
        outputs = self._looker.run_parts(args, kwargs)
        if self._traced_midway:  # the model has changed under this shape: look at it afresh before the next step
            self._traced_midway = []
            self._forget(entry)
        elif not all(region.runs > runs for region, runs in before.items()):
            self._say_unplanned("PyTorch ran it without the planned program; something it checks has changed")
        self._count_waiting(entry)
        return outputs

    def _count_waiting(self, entry: Entry | None) -> None:
        for region in dict.fromkeys(entry.regions) if entry is not None else ():
            if len(region.tickets.waiting) > entry.regions.count(region):  # type: ignore[union-attr]
                self._say_unplanned(
                    f"more than {self.options.forwards} of its forwards wait for their backward; pass forwards=…"
                )

    def _release_others(self, entry: Entry | None) -> None:
        """Recordings hold memory: only that of the shape that runs may."""
        for other in self.entries.values():
            if other is not entry:
                for region in other.regions:
                    region.release()

    # --- planning ---

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        """The entry of this call, planned now if it is new."""
        entry = self.entries.get(call_key(self.model, args, kwargs)) if self._keyed else None
        if entry is None:
            try:
                region = self._looker.look(args, kwargs)
            except NotWhole as refusal:
                why = refusal
            else:
                entry = self._planned(region, args, kwargs)
        self._latest = entry = entry or self._prepare_apart(why, args, kwargs)
        return entry

    def _planned(self, region: Region, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        """The entry of a graph that holds a whole step, planned so that it may run."""

        def plan_new() -> Entry:
            key = call_key(self.model, args, kwargs)
            return self._plan_new(key, lambda: self._plan(key, Sight((region,)), args, kwargs), args, kwargs)

        with self._planning:
            entry = self.entries.get(region)
            if entry is None:
                return plan_new()
            if entry.begins_with_gradients:
                return self._plan_again(entry, plan_new)
            return entry

    def _prepare_apart(self, refusal: NotWhole, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        """The entry of a step that was not traced as a whole."""
        if refusal.in_parts:
            return self._plan_parts(args, kwargs)
        self._raise_own_error(args, kwargs)
        return self._remember(Entry(call_key(self.model, args, kwargs), unplanned=refusal.why))

    def _plan_parts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        key = call_key(self.model, args, kwargs)

        def plan() -> Entry:
            try:
                sight = self._looker.look_at_parts(args, kwargs)
            except TorchDynamoException as failure:
                self._looker.forget()
                self._raise_own_error(args, kwargs)
                sight = Sight((), f"tracing it failed ({type(failure).__name__}: {first_line(failure)})")
            return self._plan(key, sight, args, kwargs)

        with self._planning:
            return self._plan_new(key, plan, args, kwargs)

    def _raise_own_error(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """If a step fails without elbowroom, too, that is the error to be seen."""
        with undisturbed(self.model, self.step, args, dict(kwargs)):
            with torch.no_grad(), suppress(Exception):
                self.step(*args, **kwargs)
                return
            with torch.enable_grad():  # it may only work with gradients
                self.step(*args, **kwargs)

    def _plan_new(
        self, key: Any, plan: Callable[[], Entry], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Entry:
        self._release_others(None)
        self._running = None
        shapes = {entry.key for entry in self.entries.values() if entry.graphs}
        if key not in shapes and len(shapes) >= self.options.max_shapes:
            entry = Entry(key, unplanned=too_many_shapes(len(shapes)))
        elif self.options.fuses:
            entry = fused_or_plain(
                plan,
                lambda: self._plan_unfused(key, args, kwargs),
                lambda why: say_fallback(type(self.model).__name__, why, self.said),
            )
        else:
            entry = plan()
        return self._remember(entry)

    def _remember(self, entry: Entry) -> Entry:
        """Say what is not planned of it, then keep an entry for the calls that follow."""
        if entry.unplanned:
            self._say_unplanned(entry.unplanned)
        whole = entry.regions[0] if len(set(entry.regions)) == 1 else None
        if whole is None or whole.looks is not self._looker.looks:
            self.entries[entry.key] = entry
            self._keyed = True
            return entry
        if whole in self._replaced:
            self._alternating.add(entry.key)
        elif entry.key not in self._alternating:
            for region in [k for k, e in self.entries.items() if e.key == entry.key and isinstance(k, Region)]:
                # A number that changes is an input of the new graph; as a rule, the old one never comes again.
                self._replaced.add(region)
                del self.entries[region]
        self.entries[whole] = entry
        return entry

    def _forget(self, entry: Entry) -> None:
        self.entries = {key: other for key, other in self.entries.items() if other is not entry}

    def _plan(self, key: Any, sight: Sight, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        if not sight.regions:
            return Entry(key, unplanned=sight.left_out)
        resident = self._resident(sight.regions, (args, dict(kwargs)))
        resident["batch"] *= self.options.forwards
        late = late_parameters(self.model, sight.regions, self.options, resident)
        if self.options.plan is not None:
            return self._load(self.options.plan, key, sight, resident, late)
        entry = Entry(key, self._graphs(sight.regions, late), None, sight.left_out, list(late.values()))
        self._install(entry, self._found(entry, resident), resident, shown_call(args, kwargs))
        return entry

    def _plan_unfused(self, key: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        """The same with PyTorch's kernels, in a session of its own."""
        if self._instead is None:
            self._instead = Session(self.model, self.make_step, replace(self.options, kernels="torch"))
        entry = self._instead.prepare(args, kwargs)
        return Entry(key, plan=entry.plan, unplanned=entry.unplanned, instead=self._instead)

    def _plan_midway(self, region: Region) -> None:
        """A graph is traced in the middle of a step in parts: something else than the shape has changed.

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

    def _graphs(self, regions: Sequence[Region], late: Mapping[int, nn.Parameter]) -> list[Plannable]:
        """The step's graphs with their planners, as often as they run before the first backward."""
        loss_inside = self.options.loss is not None
        found = {
            region: plannable(
                region, measured(region.traced, estimate=self.options.estimate), loss_inside=loss_inside, late=late
            )
            for region in dict.fromkeys(regions)
        }
        return [found[region] for region in [*regions] * self.options.forwards]

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

    def _load(
        self, plan: Plan, key: Any, sight: Sight, resident: Mapping[str, int], late: Mapping[int, nn.Parameter]
    ) -> Entry:
        """Install a plan made earlier, if it was made for exactly this and the referee confirms it."""
        late = late if plan.late_gradients else {}
        entry = Entry(key, self._graphs(sight.regions, late), None, sight.left_out, list(late.values()))
        planned = confirmed(plan, entry.graphs, resident, self.options.budget_bytes, lambda: self._trials(entry))
        self._install(entry, planned, resident, plan.inputs)
        return entry

    # --- planning again ---

    def _plan_again(self, entry: Entry, plan: Callable[[], Entry]) -> Entry:
        """Gradients of an earlier backward are there, whose memory the plan uses: plan without it from now on.

        Where they are kept once, they will be again. If that does not fit, the plan stays and it is said.
        """
        if self.options.plan is not None:
            return self._plan_stays(
                entry, "its plan is for steps that begin without; set them to None, or plan again"
            )
        known = self.entries
        self._forget(entry)
        try:
            return plan()
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
        self._after_replanning()

    def _after_replanning(self) -> None:
        """What is not planned is said again, of the new budget."""
        self.said.clear()
        for entry in self.entries.values():
            if entry.instead is not None:
                entry.plan = next(e.plan for e in entry.instead.entries.values() if e.key == entry.key)
            if entry.unplanned:
                self._say_unplanned(entry.unplanned)

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
        if entry.late and not have_own_room(entry.late, entry.regions[0], self.options, resident):
            return
        regions = entry.regions[: len(entry.regions) // self.options.forwards]
        late = late_parameters(self.model, regions, self.options, resident)
        if bool(late) != bool(entry.late):
            entry.graphs = self._graphs(regions, late)
            entry.late, entry.trials = list(late.values()), None

    # --- what others ask ---

    def fuses(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether fused kernels run this shape of input, or some of it: if part is traced anew, no entry is left."""
        entry = self.entries.get(call_key(self.model, args, kwargs))
        return self.options.fuses and (entry is None or bool(entry.graphs))

    def again(self, model: nn.Module) -> Session:
        """A session with the same options for another copy of the model."""
        return Session(model, self.make_step, self.options)


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
