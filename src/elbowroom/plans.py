"""A plan: what to save and what to recompute in one training step, with its prediction, as one JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from elbowroom.errors import InputError
from elbowroom.joint import Joint
from elbowroom.planning import Planned, Planner
from elbowroom.program import Program, peak_in_a_row
from elbowroom.stages.structure import Structure

FORMAT = 1


@dataclass(frozen=True)
class ModulePlan:
    """What happens to the operators of one module of the user's model."""

    module: str
    operators: int
    saved_bytes: int
    replays: int  # most often that one of its operators runs again
    forward_time_s: float
    replay_time_s: float

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class RegionPlan:
    """The plan of one captured graph. `order` is the backward program's order of operators.

    `structure` says what the graph looks like, `why` how the plan compares with the others that were found; `apart`
    whether parts of gradients are copied so that the rest can go.
    """

    fingerprint: str
    method: str
    order: tuple[int, ...]
    peak_bytes: int  # above what is resident
    saved_bytes: int
    time_s: float
    plain_peak_bytes: int
    plain_saved_bytes: int
    plain_time_s: float
    timeline: tuple[int, ...]
    modules: tuple[ModulePlan, ...]
    structure: Structure | None = None
    why: str = ""
    apart: bool = True


@dataclass(frozen=True)
class Plan:
    """Budget, what is resident, and a plan for every graph of the model at one shape of input.

    `peak_bytes` is the predicted peak of the step with everything in it; `time_s` the operators' time together,
    `plain_time_s` without any recomputation.
    """

    budget_bytes: int
    resident: Mapping[str, int]
    regions: tuple[RegionPlan, ...]
    setting: Mapping[str, str]
    inputs: str
    notes: tuple[str, ...] = field(default=())
    late_gradients: bool = False  # the step begins without them, and others use their memory until the backward

    @property
    def resident_bytes(self) -> int:
        return sum(self.resident.values())

    @property
    def start_bytes(self) -> int:
        """What is there when a step begins."""
        return self.resident_bytes - (self.resident.get("gradients", 0) if self.late_gradients else 0)

    @property
    def peak_bytes(self) -> int:
        return self.resident_bytes + peak_in_a_row((region.peak_bytes, region.saved_bytes) for region in self.regions)

    @property
    def plain_peak_bytes(self) -> int:
        """What the step would take with everything saved."""
        return self.resident_bytes + peak_in_a_row((r.plain_peak_bytes, r.plain_saved_bytes) for r in self.regions)

    @property
    def time_s(self) -> float:
        return sum(region.time_s for region in self.regions)

    @property
    def plain_time_s(self) -> float:
        return sum(region.plain_time_s for region in self.regions)

    def table(self, depth: int | None = None) -> str:
        """The plan for people: what the step takes, then module by module what is saved and what runs again."""
        from elbowroom.report.plan_table import plan_text

        return plan_text(self, depth)

    def picture(self, *, width: int = 72, height: int = 8) -> str:
        """Memory over the step as predicted, as a block chart."""
        from elbowroom.report.plan_table import plan_picture

        return plan_picture(self, width, height)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "plan",
            "format": FORMAT,
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "plain_peak_bytes": self.plain_peak_bytes,
            "time_s": self.time_s,
            "plain_time_s": self.plain_time_s,
            "resident": dict(self.resident),
            "setting": dict(self.setting),
            "inputs": self.inputs,
            "notes": list(self.notes),
            "late_gradients": self.late_gradients,
            "regions": [_region_to_json(region) for region in self.regions],
        }

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        try:
            if data["kind"] != "plan" or data["format"] != FORMAT:
                raise InputError("plan", f"this is not a plan of format {FORMAT}")
            return cls(
                budget_bytes=int(data["budget_bytes"]),
                resident={str(k): int(v) for k, v in data["resident"].items()},
                regions=tuple(_region_from_json(region) for region in data["regions"]),
                setting={str(k): str(v) for k, v in data["setting"].items()},
                inputs=str(data["inputs"]),
                notes=tuple(map(str, data.get("notes", ()))),
                late_gradients=bool(data.get("late_gradients", False)),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as failure:
            if isinstance(failure, InputError):
                raise
            raise InputError("plan", f"this is not a plan file: {failure!r}"[:200]) from failure

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json()))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError) as failure:
            raise InputError("plan", f"{path} cannot be read: {failure}"[:200]) from failure
        return cls.from_json(data)


def region_plan(planner: Planner, planned: Planned, fingerprint: str) -> RegionPlan:
    """A graph's program as data, with what it does to each module."""
    prediction, plain = planned.prediction, planner.everything.prediction
    return RegionPlan(
        fingerprint=fingerprint,
        method=planned.method,
        order=tuple(instruction.op for instruction in planned.program.backward),
        peak_bytes=prediction.peak_bytes,
        saved_bytes=prediction.saved_bytes,
        time_s=prediction.time_s,
        plain_peak_bytes=plain.peak_bytes,
        plain_saved_bytes=plain.saved_bytes,
        plain_time_s=plain.time_s,
        timeline=(*prediction.forward_bytes, prediction.between_bytes, *prediction.backward_bytes),
        modules=_modules(planner.joint, planned.program),
        structure=planner.structure,
        why=planned.why,
        apart=planned.program.apart,
    )


def _modules(joint: Joint, program: Program) -> tuple[ModulePlan, ...]:
    replays = program.replays
    saved = set(program.saved)
    by_module: dict[str, list[int]] = {}
    for op in joint.forward:
        by_module.setdefault(joint.ops[op].module, []).append(op)
    counted: set[int] = set()
    rows = []
    for module, ops in by_module.items():
        storages = {s for op in ops if op in saved for s in joint.storages(op)} - counted
        counted |= storages
        rows.append(
            ModulePlan(
                module=module,
                operators=len(ops),
                saved_bytes=joint.bytes_of(storages),
                replays=max((replays.get(op, 0) for op in ops if not joint.ops[op].is_view), default=0),
                forward_time_s=sum(joint.ops[op].time for op in ops),
                replay_time_s=sum(joint.ops[op].time * replays.get(op, 0) for op in ops),
            )
        )
    return tuple(rows)


def _region_to_json(region: RegionPlan) -> dict[str, Any]:
    data = {name: getattr(region, name) for name in region.__dataclass_fields__}
    data["modules"] = [module.to_json() for module in region.modules]
    data["structure"] = region.structure and asdict(region.structure)
    return data


def _region_from_json(data: Any) -> RegionPlan:
    return RegionPlan(
        fingerprint=str(data["fingerprint"]),
        method=str(data["method"]),
        order=tuple(map(int, data["order"])),
        peak_bytes=int(data["peak_bytes"]),
        saved_bytes=int(data["saved_bytes"]),
        time_s=float(data["time_s"]),
        plain_peak_bytes=int(data["plain_peak_bytes"]),
        plain_saved_bytes=int(data["plain_saved_bytes"]),
        plain_time_s=float(data["plain_time_s"]),
        timeline=tuple(map(int, data["timeline"])),
        modules=tuple(ModulePlan(**module) for module in data["modules"]),
        structure=Structure(**data["structure"]) if data.get("structure") else None,  # older plans say neither
        why=str(data.get("why", "")),
        apart=bool(data.get("apart", True)),
    )
