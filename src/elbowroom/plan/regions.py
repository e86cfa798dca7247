"""The plan of one captured graph, as data."""

from __future__ import annotations

from dataclasses import dataclass

from elbowroom.plan.moved import Traffic, traffic_of
from elbowroom.plan.planner import Planned, Planner
from elbowroom.plan.stages.structure import Structure
from elbowroom.step.graph import StepGraph
from elbowroom.step.program import Program


@dataclass(frozen=True)
class Order:
    """The order in which a backward runs operators. A program follows from it (plan files, format 1)."""

    ops: tuple[int, ...]
    copies_parts: bool = True


@dataclass(frozen=True)
class ModulePlan:
    """What happens to the operators of one module of the user's model."""

    module: str
    operators: int
    saved_bytes: int
    reruns: int  # most often that one of its operators runs again
    forward_time_s: float
    rerun_time_s: float
    moved_bytes: int = 0  # that go to the host and come back


@dataclass(frozen=True)
class RegionPlan:
    """The plan of one captured graph. `program` is what it runs, or an order from which that follows; None for a
    model that runs stage by stage.

    Bytes are above what is resident. `predicted_peak_bytes` is what the referee says, `measured_peak_bytes` what a
    trial took, if there was one. `recorded`: the program is replayed as CUDA graphs. `forward_levels` and
    `backward_levels` are the bytes in use during each operation, as predicted; the first of `backward_levels` is the
    moment between the two. `time_s` is the operators' time with all waiting for the link. `structure` says what the
    graph looks like, `why` how the plan compares with the others. `traffic` is what moves, if anything does.
    """

    fingerprint: str
    method: str
    program: Program | Order | None
    predicted_peak_bytes: int
    saved_bytes: int
    time_s: float
    plain_peak_bytes: int
    plain_saved_bytes: int
    plain_time_s: float
    forward_levels: tuple[int, ...]
    backward_levels: tuple[int, ...]
    modules: tuple[ModulePlan, ...]
    structure: Structure | None = None
    why: str = ""
    measured_peak_bytes: int | None = None
    recorded: bool = False
    traffic: Traffic | None = None

    @property
    def peak_bytes(self) -> int:
        """As measured, if it was; else as predicted."""
        return self.predicted_peak_bytes if self.measured_peak_bytes is None else self.measured_peak_bytes


def region_plan(planner: Planner, planned: Planned, fingerprint: str) -> RegionPlan:
    """A graph's program as data, with what it does to each module, and to the link."""
    prediction, plain = planned.prediction, planner.everything.prediction
    traffic, platform = None, planned.platform or planner.platform
    if planned.program.moves:
        assert platform is not None  # else the referee has refused
        traffic = traffic_of(planner.graph, planned.program, planner.around, platform)
    return RegionPlan(
        fingerprint=fingerprint,
        method=planned.method,
        program=planned.program,
        predicted_peak_bytes=prediction.peak_bytes,
        saved_bytes=prediction.saved_bytes,
        time_s=planned.time_s,
        plain_peak_bytes=plain.peak_bytes,
        plain_saved_bytes=plain.saved_bytes,
        plain_time_s=plain.time_s,
        forward_levels=prediction.forward_bytes,
        backward_levels=(prediction.between_bytes, *prediction.backward_bytes),
        modules=_modules(planner.graph, planned.program, traffic),
        structure=planner.structure,
        why=planned.why,
        measured_peak_bytes=planned.measured_peak_bytes,
        recorded=planned.recorded,
        traffic=traffic,
    )


def _modules(graph: StepGraph, program: Program, traffic: Traffic | None) -> tuple[ModulePlan, ...]:
    reruns = program.reruns
    saved = set(program.saved)
    moved = {each.value: each.bytes for each in traffic.values} if traffic is not None else {}
    by_module: dict[str, list[int]] = {}
    for op in graph.forward:
        by_module.setdefault(graph.ops[op].module, []).append(op)
    counted: set[int] = set()
    rows = []
    for module, ops in by_module.items():
        storages = {s for op in ops if op in saved for s in graph.storages(op)} - counted
        counted |= storages
        rows.append(
            ModulePlan(
                module=module,
                operators=len(ops),
                saved_bytes=graph.bytes_of(storages),
                reruns=max((reruns.get(op, 0) for op in ops if not graph.ops[op].is_view), default=0),
                forward_time_s=sum(graph.ops[op].time for op in ops),
                rerun_time_s=sum(graph.ops[op].time * reruns.get(op, 0) for op in ops),
                moved_bytes=sum(moved.get(op, 0) for op in ops),
            )
        )
    return tuple(rows)
