"""Confirming a plan made earlier before it may run: what a file says is believed only as far as it can be seen.

It must be for this graph, on this device, with these versions. The referee plays its program: one that cannot run, or
takes more than the file says, is refused with the referee's reason. Where predictions are not exact, the program also
runs on trial and must fit as measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from elbowroom.capture.fingerprint import fingerprint
from elbowroom.errors import InputError, InvalidProgram
from elbowroom.execute.plannable import Plannable, recordable
from elbowroom.measure.cache import setting_of
from elbowroom.measure.random_state import random_state_kept
from elbowroom.plan.plan import Plan
from elbowroom.plan.planner import Planned
from elbowroom.plan.regions import Order, RegionPlan
from elbowroom.plan.together import peak_together
from elbowroom.problem.platform import Platform
from elbowroom.session.planning import needs_trials
from elbowroom.step.allocator import room_within
from elbowroom.step.program import Program, make_program
from elbowroom.step.referee import predict
from elbowroom.step.slab import slab_of
from elbowroom.step.timeline import time_line
from elbowroom.units import format_bytes

if TYPE_CHECKING:
    from elbowroom.execute.trials import Trials


def confirmed(
    plan: Plan,
    graphs: Sequence[Plannable],
    resident: Mapping[str, int],
    budget: int,
    trials: Callable[[], Trials],
    host_bytes: int | None = None,
) -> list[Planned]:
    """The plans of a file for the graphs of a step, or an `InputError` that says why they cannot be had.

    Values that move do so as the file says, whatever moves otherwise, within `host_bytes` or what the file allows.
    """
    _check_made_for(plan, graphs)
    platform = platform_here(plan, host_bytes)
    is_exact = not needs_trials(graphs, budget, resident)
    pairs = zip(graphs, plan.regions, strict=True)
    planned = [_played(graph, region, platform, is_exact) for graph, region in pairs]
    _check_host(graphs, planned, None if platform is None else platform.host_bytes)
    cuda = graphs[0].device.type == "cuda"
    room = room_within(budget, sum(resident.values()), cuda=cuda, is_measured=True)
    if plan.recorded or not is_exact:
        return _tried(planned, trials(), resident, budget, room)
    if peak_together(planned) > room:
        raise _too_large(peak_together(planned), resident, budget)
    return planned


def _check_made_for(plan: Plan, graphs: Sequence[Plannable]) -> None:
    if len(graphs) != len(plan.regions):
        raise InputError("plan", f"it has {len(plan.regions)} graphs and the model {len(graphs)}; plan again")
    for graph, region in zip(graphs, plan.regions, strict=True):
        if fingerprint(graph.measured.captured) != region.fingerprint:
            raise InputError("plan", "it was made for another model, shape, dtype or version of PyTorch; plan again")
        if region.recorded and not (graph.measured.is_fused and recordable(graph.measured.captured)):
            raise InputError("plan", "it is replayed as CUDA graphs, and this graph cannot be; plan again")
    setting = setting_of(graphs[0].device)
    different = [key for key, value in setting.items() if plan.setting.get(key) != value]
    if different:
        was, now = plan.setting.get(different[0]), setting[different[0]]
        raise InputError("plan", f"it was made with {different[0]} {was}, and this is {now}; plan again")


def platform_here(plan: Plan, host_bytes: int | None) -> Platform | None:
    """The link that a plan was made for, with the memory that the host gives here, or what the plan says."""
    if plan.platform is None or host_bytes is None:
        return plan.platform
    return replace(plan.platform, host_bytes=host_bytes)


def _check_host(graphs: Sequence[Plannable], planned: Sequence[Planned], host_bytes: int | None) -> None:
    """What all graphs have on the host is there at the same time."""
    pairs = zip(graphs, planned, strict=True)
    needed = sum(slab_of(graph.planner.graph, plan.program).bytes for graph, plan in pairs)
    if host_bytes is not None and needed > host_bytes:
        needs, has = format_bytes(needed), format_bytes(host_bytes)
        raise InputError("plan", f"it moves values that take {needs} on the host, and the host budget is {has}")


def _played(graph: Plannable, region: RegionPlan, platform: Platform | None, is_exact: bool) -> Planned:
    """A region's program with the referee's own prediction.

    Where that is exact, the file must not say less. Elsewhere workspaces differ from one measurement to the next,
    and a trial decides. What all graphs have on the host is checked afterwards.
    """
    planner = graph.planner
    link = None if platform is None else replace(platform, host_bytes=None)
    try:
        program = _program(graph, region)
        prediction = predict(planner.graph, program, planner.around, link)
    except InvalidProgram as refusal:
        raise InputError("plan", f"the referee refuses it: {refusal}; plan again") from None
    if is_exact and isinstance(region.program, Program) and prediction.peak_bytes > region.predicted_peak_bytes:
        says, takes = format_bytes(region.predicted_peak_bytes), format_bytes(prediction.peak_bytes)
        raise InputError(
            "plan",
            f"it says that it takes {says}, and the referee counts {takes} with what was measured here; plan again",
        )
    planned = Planned(program, prediction, region.method, recorded=region.recorded, why=region.why)
    if not program.moves:
        return planned
    time_s = time_line(planner.graph, program, planner.around, link).time
    return replace(planned, waits_s=max(0.0, time_s - prediction.time_s), platform=platform)


def _program(graph: Plannable, region: RegionPlan) -> Program:
    if isinstance(region.program, Program):
        return region.program
    if region.program is None:
        raise InputError("plan", "it is for a model that runs stage by stage; plan again")
    return _from_order(graph, region.program)


def _from_order(graph: Plannable, order: Order) -> Program:
    step = graph.planner.graph
    known = {*step.forward, *step.backward}
    unknown = [op for op in order.ops if op not in known]
    if unknown:
        raise InvalidProgram(f"there is no operator {unknown[0]} that could run in the backward")
    return make_program(step, order.ops, copies_parts=order.copies_parts)


def _tried(
    planned: list[Planned], trials: Trials, resident: Mapping[str, int], budget: int, room: int
) -> list[Planned]:
    with random_state_kept():
        tried = trials.try_again(planned)
    if tried is None:
        raise InputError("plan", "it is replayed as CUDA graphs, and here it cannot be recorded; plan again")
    if tried.peak_bytes > room:
        raise _too_large(tried.peak_bytes, resident, budget)
    return tried.measured


def _too_large(peak: int, resident: Mapping[str, int], budget: int) -> InputError:
    needed = sum(resident.values()) + peak
    return InputError("plan", f"it needs {format_bytes(needed)} and the budget is {format_bytes(budget)}; plan again")
