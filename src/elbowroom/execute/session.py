"""A model under a budget: captures it at each new shape of input, plans, and runs the planned programs.

A session belongs to one fitted model. The first time it sees a shape it traces the model (computing outputs only, so
that nothing is saved and nothing in the model changes), measures the operators, plans all graphs together within the
budget and installs their programs. From then on it checks, call by call, that the planned programs really ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from elbowroom.capture.backend import capture_settings, make_backend
from elbowroom.capture.fingerprint import fingerprint
from elbowroom.capture.joint_graph import Captured
from elbowroom.capture.unplanned import hooked_modules, unplanned_nodes
from elbowroom.errors import BudgetTooSmall, ElbowroomError, InputError, Unplanned
from elbowroom.execute.emit import copied_gradients
from elbowroom.execute.region import Looks, Region
from elbowroom.execute.settings import (
    Settings,
    call_key,
    compiling_failed,
    room_within,
    say_fallback,
    say_unplanned,
    shown,
)
from elbowroom.execute.too_small import neither_fits, too_small
from elbowroom.measuring.cache import setting_of
from elbowroom.measuring.ops import measure_ops
from elbowroom.measuring.resident import (
    device_bytes,
    multiplies_matrices,
    resident_bytes,
    rounded,
    step_temporaries,
)
from elbowroom.planning import Planned, Planner, peak_together, plan_together
from elbowroom.plans import Plan, region_plan
from elbowroom.program import Surroundings, make_program
from elbowroom.report.progress import progress_bar
from elbowroom.units import format_bytes, parse_bytes

_UNFORESEEN = 0.05  # of a peak, on a GPU; 1 % is the most that was seen
_LITTLE = 0.05  # of the room, for gradients


@dataclass
class Entry:
    """One shape of input: the graphs it runs, in order (a graph may run twice), and their plan.

    No graphs means that it runs unplanned; `unplanned` says why, or what part of it does.
    """

    regions: list[Region] = field(default_factory=list)
    plan: Plan | None = None
    unplanned: str = ""
    planners: list[Planner] = field(default_factory=list)
    late: list[nn.Parameter] = field(default_factory=list)  # must have no gradient when a step begins
    trials: Any = None  # of programs made for it, where predictions are not exact
    instead: Session | None = None  # runs it with PyTorch's kernels, because fused ones could not


class Session:
    """Runs a step, a function of the batch that calls the model, within a budget."""

    def __init__(
        self, model: nn.Module, make_step: Callable[[nn.Module], Callable[..., Any]], settings: Settings
    ) -> None:
        self.model = model
        self.make_step = make_step
        self.step = step = make_step(model)
        self.settings = settings
        self.entries: dict[Any, Entry] = {}
        self._looks = Looks()
        self._refusals: list[str] = []
        self._late: list[tuple[Region, Captured]] = []  # graphs traced in the middle of a step, as they were traced
        self._said: set[str] = set()
        self._instead: Session | None = None
        backend = make_backend(
            self._on_capture, self._refusals.append, self._looks, fused=settings.kernels == "inductor"
        )
        self._compiled = torch.compile(step, backend=backend, dynamic=False)

    # --- running ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.step(*args, **kwargs)
        entry = self.prepare(args, kwargs)
        if any(parameter.grad is not None for parameter in entry.late):
            entry = self._plan_again(entry, args, kwargs)
        if entry.instead is not None:
            return entry.instead(*args, **kwargs)
        if not entry.regions:
            return self.step(*args, **kwargs)
        self._release_others(entry)
        before = {region: region.runs for region in entry.regions}
        with capture_settings(self._graph_limit), _own_errors():
            outputs = self._compiled(*args, **kwargs)
        if self._late:  # the model has changed under this shape: look at it afresh before the next step
            for region, captured in self._late:
                region.captured = captured
            self._late = []
            self.entries = {key: other for key, other in self.entries.items() if other is not entry}
        elif not all(region.runs > runs for region, runs in before.items()):
            self._say_unplanned("PyTorch ran it without the planned program; something it checks has changed")
        for region in before:
            if len(region.tickets.waiting) > entry.regions.count(region):
                self._say_unplanned(
                    f"more than {self.settings.forwards} of its forwards wait for their backward; pass forwards=…"
                )
        return outputs

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        """The entry of this shape of input, planned now if it is new."""
        key = call_key(self.model, args, kwargs)
        if key in self.entries:
            return self.entries[key]
        self._release_others(None)
        planned = sum(bool(entry.regions) for entry in self.entries.values())
        if planned >= self.settings.max_shapes:
            entry = Entry(unplanned=f"it has seen {planned} shapes already; raise max_shapes or pad to fewer shapes")
        elif self.settings.kernels == "inductor":
            entry = self._plan_fused(args, kwargs)
        else:
            entry = self._plan(self._record(args, kwargs), args, kwargs)
        if entry.unplanned:
            self._say_unplanned(entry.unplanned)
        self.entries[key] = entry
        return entry

    def _plan_again(self, entry: Entry, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        """Gradients of an earlier backward are there, whose memory the plan uses: plan without it from now on.

        Where they are kept once, they will be again. If that does not fit, the plan stays and it is said.
        """
        if self.settings.plan is not None:
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

    def fuses(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether fused kernels run this shape of input, or some of it: if part is traced anew, no entry is left."""
        entry = self.entries.get(call_key(self.model, args, kwargs))
        return self.settings.kernels == "inductor" and (entry is None or bool(entry.regions))

    def _release_others(self, entry: Entry | None) -> None:
        """Recordings hold memory: only that of the shape that runs may."""
        for other in self.entries.values():
            if other is not entry:
                for region in other.regions:
                    region.release()

    @property
    def _graph_limit(self) -> int:
        return 8 * (self.settings.max_shapes + 1)

    # --- capturing ---

    def _on_capture(self, region: Region) -> None:
        if self._looks.calls is not None:
            return
        # Traced outside `prepare`: something else than the shape changed. It gets a plan of its own, at once, for one
        # step: with PyTorch's kernels, of which it is known what they take without a trial.
        captured = region.captured
        region.captured = captured.unfused or captured
        around = surroundings(region, self.settings.loss_inside)
        measure_region(region, self.settings.estimate)
        resident = self._resident([region], ())
        planner = Planner(region.captured.joint, around)
        planned = planner.best(room_within(self.settings.budget_bytes, resident, region.captured.device))
        if planned is None:
            raise too_small(self.settings.budget_bytes, resident, [planner], region.captured.device)
        region.install(planned.program)
        self._late.append((region, captured))

    def _record(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Region], str]:
        """The graphs that one call runs, in order, and what they leave out. Changes no buffer, no random state."""
        self._refusals[:] = []
        if hooked := hooked_modules(self.model):
            return [], (
                f"module {hooked[0]!r} has a backward hook, which tracing does not see; remove it, or pass stages=[…]"
            )
        self._looks.calls = []
        try:
            with random_state_kept(), torch.enable_grad(), capture_settings(self._graph_limit), _own_errors():
                outputs = self._compiled(*args, **kwargs)
            left_out = unplanned_nodes(self.model, outputs)
        finally:
            regions, self._looks.calls = self._looks.calls, None
        if self._refusals:
            return regions, self._refusals[0]
        if not regions:
            return [], "PyTorch did not trace it"
        if left_out:
            return regions, (
                f"part of it runs outside the traced graphs ({left_out}); TORCH_LOGS=graph_breaks shows where "
                "tracing stops, and stages=[…] needs no tracing"
            )
        return regions, ""

    # --- planning ---

    def _plan(self, recorded: tuple[list[Region], str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        regions, unplanned = recorded
        if not regions:
            return Entry(unplanned=unplanned)
        resident = self._resident(regions, (args, dict(kwargs)))
        resident["batch"] *= self.settings.forwards
        regions = regions * self.settings.forwards
        late = self._without_gradients(regions, resident)
        if self.settings.plan is not None:
            loaded = self._loaded(regions, self.settings.plan)
            return Entry(regions, loaded, unplanned, late=list(late.values()) if loaded.late_gradients else [])
        entry = Entry(regions, None, unplanned, self._planners(regions, late), list(late.values()))
        self._install(entry, self._found(entry, resident), resident, shown(args, kwargs))
        return entry

    def _resident(self, regions: Sequence[Region], batch: Any) -> dict[str, int]:
        graphs = [region.captured.unfused or region.captured for region in regions]
        multiplies = any(multiplies_matrices(graph.nodes) for graph in graphs)
        device = regions[0].captured.device
        return resident_bytes(self.model, batch, self.settings.optimizer, device, multiplies=multiplies)

    def _plan_fused(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        """With Inductor's kernels; where that fails or does not fit, with PyTorch's, and it is said."""
        try:
            return self._plan(self._record(args, kwargs), args, kwargs)
        except (InputError, Unplanned):
            raise
        except BudgetTooSmall as refusal:
            failure: Exception = refusal
            why = f"compiled, it needs at least {format_bytes(refusal.least_budget)}"
        except Exception as other:
            failure, why = other, compiling_failed(other)
        unfused = self._unfused()
        try:
            entry = unfused.prepare(args, kwargs)
        except BudgetTooSmall as refusal:
            raise neither_fits(failure, refusal) from None
        say_fallback(type(self.model).__name__, why, self._said)
        return Entry(plan=entry.plan, unplanned=entry.unplanned, instead=unfused)

    def _unfused(self) -> Session:
        if self._instead is None:
            self._instead = Session(self.model, self.make_step, replace(self.settings, kernels="torch"))
        return self._instead

    def _without_gradients(self, regions: list[Region], resident: Mapping[str, int]) -> dict[int, nn.Parameter]:
        """Parameters that have no gradient before the backward makes it, by their number in the only graph.

        None of them where some have one: those are kept from step to step. Several graphs might share parameters. And
        where they are little, and the step may be recorded, they are better off in a place of their own: scattered
        over a recording's pool, they leave gaps too small for large images, and it takes more in the end.
        """
        if self.settings.accumulates or len(regions) > 1 or self._keeps_gradients:
            return {}
        trained = {(p.data_ptr(), p.shape): p for p in self.model.parameters() if p.requires_grad}
        (region,) = regions
        joint = region.captured.joint
        given = dict(zip(joint.inputs, (example() for example in region.example), strict=True))
        accumulated = {i for i, gradient in joint.gradients if joint.ops[gradient].kind == "backward"}
        tensors = {i: given[i] for i in joint.parameters if i in accumulated}
        found = {i: trained.get((t.data_ptr(), t.shape)) for i, t in tensors.items() if t is not None}
        late = {i: parameter for i, parameter in found.items() if parameter is not None}
        return {} if self._has_room_for(late.values(), region, resident) else late

    def _has_room_for(self, late: Iterable[nn.Parameter], region: Region, resident: Mapping[str, int]) -> bool:
        """Whether gradients are so little that a recording may have them in a place of their own."""
        if not self._records:
            return False
        from elbowroom.execute.recording import recordable

        room = room_within(self.settings.budget_bytes, resident, region.captured.device, is_measured=True)
        size = sum(parameter.numel() * parameter.element_size() for parameter in late)
        return recordable(region.captured) and size <= _LITTLE * room

    @property
    def _records(self) -> bool:
        return self.settings.kernels == "inductor" and self.settings.cuda_graphs

    @property
    def _keeps_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.model.parameters())

    def _planners(self, regions: list[Region], late: Mapping[int, nn.Parameter]) -> list[Planner]:
        planners = {}
        for region in dict.fromkeys(regions):
            measure_region(region, self.settings.estimate)
            around = surroundings(region, self.settings.loss_inside, late)
            planners[region] = Planner(region.captured.joint, around)
        return [planners[region] for region in regions]

    def set_budget(self, budget: int | str) -> None:
        """Plan every shape seen so far within another budget; if one cannot, nothing changes."""
        old = self.settings
        self.settings = replace(
            old, budget_bytes=parse_bytes(budget, device_bytes=device_bytes(self.model)), plan=None
        )
        entries = [entry for entry in self.entries.values() if entry.plan is not None and entry.instead is None]
        before = [(entry.planners, entry.late, entry.trials) for entry in entries]
        try:
            for entry in entries:
                self._look_at_gradients(entry)
            found = [self._found(entry, entry.plan.resident) for entry in entries]  # type: ignore[union-attr]
            if self._instead is not None:
                self._instead.set_budget(budget)
        except BaseException:
            self.settings = old
            for entry, known in zip(entries, before, strict=True):
                entry.planners, entry.late, entry.trials = known
            raise
        for entry, plans in zip(entries, found, strict=True):
            assert entry.plan is not None
            self._install(entry, plans, entry.plan.resident, entry.plan.inputs)
        for key, entry in self.entries.items():
            if entry.instead is not None:
                entry.plan = entry.instead.entries[key].plan

    def _look_at_gradients(self, entry: Entry) -> None:
        """Make planners, if there are none (for a loaded plan), or if gradients are to be planned otherwise now."""
        assert entry.plan is not None
        resident = entry.plan.resident
        if entry.planners and entry.late and not self._has_room_for(entry.late, entry.regions[0], resident):
            return
        late = self._without_gradients(entry.regions, resident)
        if not entry.planners or bool(late) != bool(entry.late):
            entry.planners = self._planners(entry.regions, late)
            entry.late, entry.trials = list(late.values()), None

    def _found(self, entry: Entry, resident: Mapping[str, int]) -> list[Planned]:
        device, budget = entry.regions[0].captured.device, self.settings.budget_bytes
        room = room_within(budget, resident, device, is_measured=True)
        if self.settings.kernels == "inductor" or (device.type == "cuda" and not fits_easily(entry.planners, room)):
            return self._tried(entry, room, resident)
        with progress_bar("planning") as report:
            for planner in entry.planners:
                planner.report = report
            planned = plan_together(entry.planners, room)
        if planned is None:
            raise self._too_small(entry, resident)
        return planned

    def _tried(self, entry: Entry, room: int, resident: Mapping[str, int]) -> list[Planned]:
        """The fastest program that was measured within the room."""
        from elbowroom.execute.trials import Trials

        fused = self.settings.kernels == "inductor"
        if entry.trials is None:
            left_free = step_temporaries(self.settings.optimizer) if self._records else None
            entry.trials = Trials(entry.regions, entry.planners, left_free)
        with random_state_kept(), progress_bar("planning and compiling" if fused else "planning") as report:
            tried = entry.trials.best(room, self.settings.compilations, report)
        if tried is None:
            raise self._too_small(entry, resident, entry.trials.least_bytes)
        measured: list[Planned] = tried.measured
        return measured

    def _too_small(self, entry: Entry, resident: Mapping[str, int], measured: int = 0) -> BudgetTooSmall:
        budget, device = self.settings.budget_bytes, entry.regions[0].captured.device
        return too_small(budget, resident, entry.planners, device, measured, kept=self._keeps_gradients)

    def _install(self, entry: Entry, planned: list[Planned], resident: Mapping[str, int], inputs: str) -> None:
        regions = []
        for region, found in dict(zip(entry.regions, planned, strict=True)).items():
            region.install(found.program, recorded=found.recorded)
        for region, found, planner in zip(entry.regions, planned, entry.planners, strict=True):
            regions.append(region_plan(planner, found, fingerprint(region.captured)))
        entry.plan = Plan(
            budget_bytes=self.settings.budget_bytes,
            resident=resident,
            regions=tuple(regions),
            setting=setting_of(entry.regions[0].captured.device),
            inputs=inputs,
            notes=_notes(entry, planned),
            late_gradients=bool(entry.late),
        )

    def again(self, model: nn.Module) -> Session:
        """A session with the same settings for another copy of the model."""
        return Session(model, self.make_step, self.settings)

    def _loaded(self, regions: list[Region], plan: Plan) -> Plan:
        """Install a plan made earlier, if it was made for exactly this."""
        if len(regions) != len(plan.regions):
            raise InputError("plan", f"it has {len(plan.regions)} graphs and the model {len(regions)}; plan again")
        for region, planned in zip(regions, plan.regions, strict=True):
            if fingerprint(region.captured) != planned.fingerprint:
                raise InputError(
                    "plan", "it was made for another model, shape, dtype or version of PyTorch; plan again"
                )
        setting = setting_of(regions[0].captured.device)
        different = [key for key, value in setting.items() if plan.setting.get(key) != value]
        if different:
            was, now = plan.setting.get(different[0]), setting[different[0]]
            raise InputError("plan", f"it was made with {different[0]} {was}, and this is {now}; plan again")
        if plan.peak_bytes > self.settings.budget_bytes:
            raise InputError(
                "plan",
                f"it needs {format_bytes(plan.peak_bytes)} and the budget is "
                f"{format_bytes(self.settings.budget_bytes)}; plan again",
            )
        for region, planned in dict(zip(regions, plan.regions, strict=True)).items():
            region.install(make_program(region.captured.joint, planned.order, apart=planned.apart))
        return plan

    def _say_unplanned(self, why: str) -> None:
        say_unplanned(self.model, self.settings, why, self._said)


def _notes(entry: Entry, planned: list[Planned]) -> tuple[str, ...]:
    notes: tuple[str, ...] = ()
    if entry.late:
        notes += ("A step begins without gradients: until the backward makes them, others use their memory.",)
    if entry.trials is not None:
        fused = entry.regions[0].captured.cones is not None
        notes += (f"{'Inductor' if fused else 'PyTorch'}'s kernels: the peak is measured, times are estimates.",)
    if any(plan.recorded for plan in planned):
        notes += ("Replayed as CUDA graphs: their memory is held between steps, too.",)
    return notes


def fits_easily(planners: Sequence[Planner], room: int) -> bool:
    """Whether everything can be saved, however much more than predicted PyTorch's kernels and the allocator take."""
    return (1 + _UNFORESEEN) * peak_together([planner.everything for planner in planners]) <= room


def surroundings(region: Region, loss_inside: bool, late: Mapping[int, nn.Parameter] = {}) -> Surroundings:
    """What to reserve around a graph. A loss outside gets room for one more copy of outputs and gradients."""
    joint, device = region.captured.joint, region.captured.device
    outputs = joint.bytes_of({s for op in (*joint.results, *joint.arriving) for s in joint.storages(op)})
    on_cpu = device.type == "cpu"
    return Surroundings(
        outside_bytes=0 if loss_inside else outputs,
        keeps_arriving=_KEEPS_ARRIVING,
        state_bytes=torch.default_generator.get_state().numel() if on_cpu else 0,
        late={i: rounded(p.numel() * p.element_size(), device) for i, p in late.items()},
        copied=copied_gradients(region.captured),
    )


# Since 2.13 autograd lets go of the gradients it hands to a function.
_KEEPS_ARRIVING = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 13)


def measure_region(region: Region, estimate: bool) -> None:
    with random_state_kept(), progress_bar("measuring operators") as report:
        if region.captured.cones is None:
            measure_ops(region.captured, estimate=estimate, report=report)
        else:
            from elbowroom.measuring.fused import measure_fused

            region.channels_last = measure_fused(region.captured, estimate=estimate, report=report)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Our errors as they are, not wrapped in PyTorch's report about a backend that failed."""
    try:
        yield
    except BackendCompilerFailed as report:
        if isinstance(report.inner_exception, ElbowroomError):
            raise report.inner_exception from None
        raise


@contextmanager
def random_state_kept() -> Iterator[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield
