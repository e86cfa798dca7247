"""A model that runs stage by stage, as the user wrote it, under the same planner: the road that needs no tracing.

Taken for `stages=[…]`, and for an `nn.Sequential` that cannot be traced (module backward hooks). Coarser than
programs: a stage is saved whole, its input is kept, or nothing is; and what is kept may move to the host whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from elbowroom.capture.unplanned import hook_of_all_modules
from elbowroom.errors import BudgetTooSmall, InputError
from elbowroom.execute.by_stages.measuring import fuse_stages, has_hooks, measure_stages, stages_of
from elbowroom.execute.by_stages.runner import ChainRunner, HostSide
from elbowroom.execute.by_stages.scheduling import HostLink, Scheduled, schedule_within
from elbowroom.execute.by_stages.staying import Staying, measure_staying
from elbowroom.execute.to_host.host_room import HostRoom
from elbowroom.measure.cache import setting_of
from elbowroom.measure.resident import device_bytes, optimizer_bytes, resident_bytes
from elbowroom.plan.moved import Traffic, schedule_traffic
from elbowroom.plan.plan import Plan
from elbowroom.plan.regions import ModulePlan, RegionPlan
from elbowroom.plan.words import MOVED
from elbowroom.problem import Chain, Platform
from elbowroom.progress import progress_bar
from elbowroom.schedule import Forward, Offload, Schedule
from elbowroom.session.calls import call_key, shown_call
from elbowroom.session.handle import Handle
from elbowroom.session.host_link import Moving, moving_of, notes_on_moves
from elbowroom.session.inputs import check_optimizer, checked_loss
from elbowroom.session.options import Options
from elbowroom.session.planning import planned_all
from elbowroom.session.saying import budget_too_small, short_of_room, too_many_shapes
from elbowroom.session.watching import OUTSIDE, WATCHED_STEPS, more_outside
from elbowroom.solve import solve
from elbowroom.step.allocator import budget_for, room_within
from elbowroom.units import parse_bytes


@dataclass
class StageEntry:
    """One shape of input: its stages as measured, the plan, and what runs it. `makeup` is what they were made of.

    `resident` has all of the batch; the plan counts the input among what the stages take.
    """

    key: Any
    stages: Sequence[nn.Module]
    chain: Chain
    staying: Staying
    resident: Mapping[str, int]
    plan: Plan
    runner: ChainRunner
    makeup: Makeup
    unplanned: str = ""
    unwatched: int = WATCHED_STEPS  # steps that are still to be watched
    excess_bytes: int = 0  # of the latest step over the budget, for which no room is left yet

    @property
    def sources(self) -> list[str]:
        """None: stages run as they are, and nothing is emitted."""
        return []


Makeup: TypeAlias = tuple[tuple[nn.Module, Any], ...]


class StageSession(Handle):
    """A model as a row of stages under a budget. Called like the model, or with a target last if it has a loss."""

    def __init__(
        self,
        model: nn.Module,
        make_step: Callable[[nn.Module], Callable[..., Any]],
        options: Options,
        arguments: int,
        why: str,
    ) -> None:
        super().__init__(model, make_step, options)
        self.why = why
        self.entries: dict[Any, StageEntry] = {}
        self._given = options.stages
        inside = set(model.modules())
        self._own = [stage for stage in options.stages or () if stage in inside]
        self._loss = options.loss
        self._arguments = arguments
        self._outside: dict[Any, int] = {}  # bytes that calls of a key were seen to take outside their plans
        self._moves: Moving | None = None  # found when a step is first planned, and the same from then on
        self._host_room = HostRoom()

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if (unplanned := self._unplanned(args, kwargs)) is not None:
            self._say_unplanned(unplanned)
            return self._run_plainly(args, kwargs)
        entry = self.prepare(args, kwargs)
        inputs, target = self._divided(args)
        if entry.unwatched:
            self._begin_watching(entry)
        output = entry.runner(_one(inputs))
        self._watch.note_outputs(output)
        if self._loss is None:
            return output
        return checked_loss(self._loss(output, *target))

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StageEntry:
        """The entry of this shape of input, measured and planned now if it is new."""
        if kwargs:
            raise InputError("example", "stages take one value each; pass it by position, not by keyword")
        key = call_key(self.model, args, kwargs)
        stages = self._stages()
        entry = self.entries.get(key)
        if entry is None or entry.makeup != _makeup(stages):
            entry = self.entries[key] = self._plan(key, stages, args)
            self._reserve_host(self.entries.values())
        elif entry.excess_bytes:
            entry = self.entries[key] = self._with_more_room(entry)
            self._reserve_host(self.entries.values())
        self._latest = entry
        return entry

    def _stages(self) -> list[nn.Module]:
        """As they are now: a model may be changed between two steps."""
        return list(self._given) if self._given is not None else stages_of(self.model)

    def _unplanned(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """Why a call cannot go stage by stage, if it cannot."""
        if kwargs:
            return "stages take one value each; pass it by position, not by keyword"
        if call_key(self.model, args, kwargs) not in self.entries and len(self.entries) >= self.options.max_shapes:
            return too_many_shapes(len(self.entries))
        return hook_of_all_modules() or self._left_out()

    def _left_out(self) -> str | None:
        """What would not happen if only the stages that were given ran, if there is something.

        Of a model that was taken apart here, whatever has hooks is a stage by itself.
        """
        if self._given is None:
            return None
        outside = dict.fromkeys(self.model.modules())
        if not outside.keys() >= set(self._own):
            return "a stage that was given is no longer a part of it; fit it again with the stages that it has now"
        for stage in self._given:
            for module in stage.modules():
                outside.pop(module, None)
        hooked = next((module for module in outside if has_hooks(module)), None)
        if hooked is not None:
            return (
                f"{type(hooked).__name__} has a hook and is no stage, so the hook would not run; name a smaller part"
            )
        return None

    # --- watching ---

    def _awaits_backward(self) -> bool:
        return any(entry.runner.runs for entry in self.entries.values())

    def _begin_watching(self, entry: StageEntry) -> None:
        batch_bytes = entry.resident["batch"] - entry.plan.resident["batch"]
        self._watch.begin(entry, entry.plan, _device(self.model, ()), self.options.optimizer, batch_bytes)

    def _with_more_room(self, entry: StageEntry) -> StageEntry:
        """Plan a step again that took more than its budget. If that does not fit, the plan stays and it is said."""
        self._outside[entry.key] = more_outside(entry.plan, entry.excess_bytes)
        entry.excess_bytes = 0
        try:
            return self._scheduled_like(entry, {}, self.options)
        except BudgetTooSmall as refusal:
            return self._short_of_room(entry, refusal)

    def _short_of_room(self, entry: StageEntry, refusal: BudgetTooSmall) -> StageEntry:
        entry.unwatched = 0
        self._say_unplanned(short_of_room(refusal))
        return entry

    # --- planning again ---

    def set_budget(self, budget: int | str) -> None:
        """Plan every shape seen so far within another budget; if one cannot, nothing changes."""
        size = parse_bytes(budget, device_bytes=device_bytes(self.model))
        self._replan(replace(self.options, budget=size))

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the state of an optimizer that was made after `fit`; if that does not fit, nothing changes."""
        check_optimizer(self.model, optimizer)
        self._replan(replace(self.options, optimizer=optimizer))

    def _replan(self, options: Options) -> None:
        state = {}
        if options.optimizer is not None:
            state["optimizer"] = optimizer_bytes(options.optimizer, _device(self.model, ()))
        planned = planned_all(partial(self._scheduled_like, entry, state, options) for entry in self.entries.values())
        self._reserve_host(planned)
        self._watch.give_up()
        self.options = options
        self.said.clear()  # what is not planned is said again, of the new budget
        self.entries.update(zip(self.entries, planned, strict=True))

    def fuses(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Never: stages run as the user wrote them."""
        return False

    def again(self, model: nn.Module) -> StageSession:
        """A session with the same settings for another copy of the model."""
        if self._given is not None:
            raise InputError("stages", "belong to the original model; fit the copy with stages of its own")
        return StageSession(model, self.make_step, self.options, self._arguments, self.why)

    def _divided(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The model's inputs, and the target if the loss takes one."""
        takes_target = self._loss is not None and self._arguments > 1
        return (args[:-1], args[-1:]) if takes_target else (args, ())

    def _plan(self, key: Any, stages: list[nn.Module], args: tuple[Any, ...]) -> StageEntry:
        inputs, _ = self._divided(args)
        makeup = _makeup(stages)
        device = _device(self.model, args)
        with progress_bar("measuring stages") as report:
            stages = fuse_stages(stages, _one(inputs))
            chain = measure_stages(stages, _one(inputs), device=device, keeps_output=True, progress=report)
            staying = self._measured_staying(stages, _one(inputs), chain, device)
        chain = _with_outside(chain)
        resident = resident_bytes(self.model, args, self.options.optimizer, device)
        outside = self._outside.get(key, 0)
        called = shown_call(args, {})
        planned = partial(self._scheduled, key, stages, chain, staying, resident, called, makeup, self.options)
        try:
            return planned(outside)
        except BudgetTooSmall as refusal:
            if not outside:
                raise
            return self._short_of_room(planned(0), refusal)

    def _scheduled_like(self, known: StageEntry, state: Mapping[str, int], options: Options) -> StageEntry:
        """The same stages planned again; `state` is what else is known of what is resident."""
        resident, outside = {**known.resident, **state}, self._outside.get(known.key, 0)
        stages, chain, staying, inputs = known.stages, known.chain, known.staying, known.plan.inputs
        return self._scheduled(known.key, stages, chain, staying, resident, inputs, known.makeup, options, outside)

    def _scheduled(
        self,
        key: Any,
        stages: Sequence[nn.Module],
        chain: Chain,
        staying: Staying,
        resident: Mapping[str, int],
        inputs: str,
        makeup: Makeup,
        options: Options,
        outside: int,
    ) -> StageEntry:
        outer = {**resident, "batch": max(0, resident["batch"] - chain.input_bytes)}  # the chain counts its input
        if outside:
            outer[OUTSIDE] = outside
        device = _device(self.model, ())
        cuda = device.type == "cuda"
        room = room_within(options.budget_bytes, sum(outer.values()), cuda=cuda)
        link, moves = None, self._moves
        if moves is not None and moves.platform is not None:
            link = HostLink(moves.platform, staying.bytes, moves.preferred)
        found = schedule_within(chain, room, link)
        if not isinstance(found, Scheduled):
            raise _too_small(options.budget_bytes, outer, chain, found, device, moves=link is not None)
        platform = None if moves is None else moves.platform
        plan = _plan_of(chain, found, options.budget_bytes, outer, inputs, device, self.why, platform)
        side = HostSide(self._host_room, device, staying.sealed) if found.moves else None
        runner = ChainRunner(stages, found.runs, side)
        runner.on_backward, runner.hold = self._backward_begins, self._watch.hold
        return StageEntry(key, stages, chain, staying, resident, plan, runner, makeup)

    # --- values that move ---

    def _measured_staying(
        self, stages: Sequence[nn.Module], value: Any, chain: Chain, device: torch.device
    ) -> Staying:
        """What stays of values that move; nothing is measured if none do."""
        self._moves = self._moves or moving_of(self.options, device)
        return Staying() if self._moves.platform is None else measure_staying(stages, value, chain, device)

    def _reserve_host(self, entries: Iterable[StageEntry]) -> None:
        """Have the memory on the host that plans need. Steps take turns, so the one that needs most of it counts."""
        needed = max((entry.runner.host_bytes for entry in entries), default=0)
        self._host_room.reserve(needed, _device(self.model, ()))


def _makeup(stages: Sequence[nn.Module]) -> Makeup:
    """Which modules there are, and what each trains: if that changes, the stages cost something else."""
    modules = [module for stage in stages for module in stage.modules()]
    return tuple(
        (module, tuple((p.shape, p.dtype, p.requires_grad) for p in module._parameters.values() if p is not None))
        for module in modules
    )


def _one(inputs: tuple[Any, ...]) -> Any:
    return inputs[0] if len(inputs) == 1 else inputs


def _with_outside(chain: Chain) -> Chain:
    """Reserves room for a loss outside: one more copy of the output and of its gradient."""
    *stages, outside = chain.stages
    reserve = 2 * stages[-1].output_bytes
    outside = replace(
        outside,
        forward_overhead_bytes=outside.forward_overhead_bytes + reserve,
        backward_overhead_bytes=outside.backward_overhead_bytes + reserve,
    )
    return replace(chain, stages=(*stages, outside))


def _device(model: nn.Module, args: tuple[Any, ...]) -> torch.device:
    tensors = [*model.parameters(), *(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))]
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _too_small(
    budget: int, resident: Mapping[str, int], chain: Chain, least_bytes: int, device: torch.device, *, moves: bool
) -> BudgetTooSmall:
    least = budget_for(least_bytes, sum(resident.values()), cuda=device.type == "cuda")
    largest = [(name, size) for name, size in resident.items() if size]
    largest += [(f"what stage {stage.name} saves", stage.saved_bytes) for stage in chain.stages]
    remedy = "Raise the budget, make the batch smaller or the stages finer"
    if moves:
        remedy += "; or, if host_budget is small, raise that"
    return budget_too_small(budget, least, largest, "for these stages", remedy)


def _plan_of(
    chain: Chain,
    found: Scheduled,
    budget: int,
    resident: Mapping[str, int],
    inputs: str,
    device: torch.device,
    why: str,
    platform: Platform | None,
) -> Plan:
    result = found.result
    everything = sum(stage.forward_time + stage.backward_time for stage in chain.stages)
    plain = solve(chain, solver="store-all")
    assert result.simulation is not None
    traffic = schedule_traffic(chain, result.simulation, found.host_bytes)
    region = RegionPlan(
        fingerprint=hashlib.sha256(str(chain.to_json()).encode()).hexdigest()[:32],
        method=f"stage by stage, {result.solver}{'' if traffic is None else MOVED}",
        program=None,
        predicted_peak_bytes=found.peak_bytes,
        saved_bytes=sum(chain.stages[k].saved_bytes for k in _saved_at_loss(chain, result.schedule)),
        time_s=result.time,
        plain_peak_bytes=plain.peak_bytes,
        plain_saved_bytes=sum(stage.saved_bytes for stage in chain.stages),
        plain_time_s=everything,
        forward_levels=tuple(span.bytes + found.fixed_bytes for span in result.simulation.spans),
        backward_levels=(),
        modules=_modules(chain, result.schedule, traffic),
        traffic=traffic,
    )
    notes = (why, *(() if traffic is None else notes_on_moves(device)))
    return Plan(budget, dict(resident), (region,), setting_of(device), inputs, notes, platform=platform)


def _saved_at_loss(chain: Chain, schedule: Schedule) -> list[int]:
    """Stages that are saved on the device when the loss begins: what moves is on the host then, or on its way."""
    saved: list[int] = []
    for operation in schedule:
        if operation == Forward(len(chain), "all"):
            break
        if isinstance(operation, Forward) and operation.save == "all" and isinstance(operation.at, int):
            saved.append(operation.at - 1)
        if isinstance(operation, Offload) and operation.what == "all":
            saved = [k for k in saved if k + 1 != operation.at]
    return saved


def _modules(chain: Chain, schedule: Schedule, traffic: Traffic | None) -> tuple[ModulePlan, ...]:
    moved: dict[int, int] = {}
    for value in traffic.values if traffic is not None else ():
        moved[value.value] = moved.get(value.value, 0) + value.bytes
    runs: dict[int, int] = {}
    for operation in schedule:
        if isinstance(operation, Forward) and isinstance(operation.at, int):
            runs[operation.at] = runs.get(operation.at, 0) + 1
    kept = set(_saved_at_loss(chain, schedule))
    return tuple(
        ModulePlan(
            module=stage.name,
            operators=1,
            saved_bytes=stage.saved_bytes if k in kept else 0,
            reruns=runs.get(k + 1, 1) - 1,
            forward_time_s=stage.forward_time,
            rerun_time_s=stage.forward_time * (runs.get(k + 1, 1) - 1),
            moved_bytes=moved.get(k + 1, 0),
        )
        for k, stage in enumerate(chain.stages[:-1])
    )
