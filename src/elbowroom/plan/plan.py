"""A plan: what to save and what to compute again in one training step, with its prediction, as one JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elbowroom.errors import InputError
from elbowroom.plan.files import (
    FORMAT,
    READABLE,
    Fields,
    platform_from_json,
    platform_to_json,
    region_from_json,
    region_to_json,
    shown_formats,
)
from elbowroom.plan.moved import Traffic
from elbowroom.plan.regions import RegionPlan
from elbowroom.problem.platform import Platform
from elbowroom.schedule.link import Direction
from elbowroom.schedule.timeline import Span, TimeLine
from elbowroom.showing import shown_as
from elbowroom.step.referee import peak_in_a_row


@dataclass(frozen=True)
class Plan:
    """Budget, what is resident, and a plan for every graph of the model at one shape of input.

    `peak_bytes` is the peak of the step with everything in it; `time_s` the operators' time together, and what
    computing waits for the link; `plain_time_s` the operators' time without any recomputation. `platform` is the link
    over which values may move to the host, and the memory that all of them together have there; None if none may.
    """

    budget_bytes: int
    resident: Mapping[str, int]
    regions: tuple[RegionPlan, ...]
    setting: Mapping[str, str]
    inputs: str
    notes: tuple[str, ...] = field(default=())
    late_gradients: bool = False  # the step begins without them, and others use their memory until the backward
    platform: Platform | None = None

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
    def predicted_peak_bytes(self) -> int:
        """The peak as the referee predicts it, whatever was measured."""
        return self.resident_bytes + peak_in_a_row((r.predicted_peak_bytes, r.saved_bytes) for r in self.regions)

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

    @property
    def method(self) -> str:
        """How its graphs were planned; what several have in common is said once."""
        return "; ".join(dict.fromkeys(region.method for region in self.regions))

    @property
    def extra_time(self) -> float:
        """Recomputation, and waiting for the link, as a share of the step's time without any."""
        return self.time_s / self.plain_time_s - 1 if self.plain_time_s else 0.0

    @property
    def recorded(self) -> bool:
        """Whether it is replayed as CUDA graphs."""
        return any(region.recorded for region in self.regions)

    @property
    def traffic(self) -> list[Traffic]:
        """What moves to the host and back, graph by graph; empty if nothing does."""
        return [region.traffic for region in self.regions if region.traffic is not None]

    def moved_bytes(self, direction: Direction) -> int:
        """Bytes that a step copies to the host, or back."""
        return sum(traffic.bytes_moved(direction) for traffic in self.traffic)

    @property
    def host_bytes(self) -> int:
        """What is held on the host for values that move: those of all graphs are there at the same time."""
        return sum(traffic.host_bytes for traffic in self.traffic)

    @property
    def host_budget_bytes(self) -> int | None:
        """What the values that move may have on the host."""
        return None if self.platform is None else self.platform.host_bytes

    @property
    def copying_s(self) -> float:
        """How long the link is busy, both directions added up."""
        return sum((traffic.copying_s for traffic in self.traffic), 0.0)

    @property
    def waits_s(self) -> float:
        """How long computing stands still for the link; the rest of the copying hides behind it."""
        return sum((traffic.waits_s for traffic in self.traffic), 0.0)

    @property
    def timeline(self) -> TimeLine:
        """Memory over the step, what is resident included, and what moves beside it: the graphs' forwards in order,
        then their backwards in reverse, all operations equally wide. Where a peak was measured, everything is moved
        up or down to meet it."""
        forwards: list[int] = []
        backwards: list[int] = []
        held = self.resident_bytes
        for region in self.regions:
            base = held + region.peak_bytes - region.predicted_peak_bytes
            forwards += [base + size for size in region.forward_levels]
            backwards[:0] = [base + size for size in region.backward_levels]
            held += region.saved_bytes
        levels = [*forwards, *backwards]
        transfers, waiting = self._lanes(levels)
        return TimeLine.of_levels(levels, self.resident_bytes, transfers, waiting)

    def _lanes(self, levels: Sequence[int]) -> tuple[list[Span], set[int]]:
        """The transfers of all graphs on the step's time line, and the operations that wait for some."""
        transfers: list[Span] = []
        waiting: set[int] = set()
        first, last = 0, len(levels)
        for region in self.regions:
            turn = len(region.forward_levels)
            last -= len(region.backward_levels)
            place = [*range(first, first + turn), *range(last, last + len(region.backward_levels))]
            first += turn
            if region.traffic is None:
                continue
            waiting.update(place[at] for at in region.traffic.waits_at)
            for each in region.traffic.transfers:
                # What is on its way when the forward ends has arrived before the graphs that follow have run.
                is_early = first < last and each.begins < turn <= each.ends
                begins, ends = place[each.begins], first - 1 if is_early else place[each.ends]
                level = levels[begins]
                transfers.append(Span(float(begins), ends + 1.0, level, begins, each.direction, each.bytes))
        return transfers, waiting

    def table(self, depth: int | None = None) -> str:
        """The plan for people: what the step takes, then module by module what is saved and what runs again."""
        return shown_as("plan table", self, depth)

    def picture(self, *, width: int = 72, height: int = 8) -> str:
        """Memory over the step as predicted, as a block chart."""
        return shown_as("plan picture", self, width, height)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "plan",
            "format": FORMAT,
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "plain_peak_bytes": self.plain_peak_bytes,
            "time_s": self.time_s,
            "plain_time_s": self.plain_time_s,
            "resident": dict(self.resident),
            "setting": dict(self.setting),
            "inputs": self.inputs,
            "notes": list(self.notes),
            "late_gradients": self.late_gradients,
            **platform_to_json(self.platform),
            "host_bytes": self.host_bytes,
            "moved_bytes": self.moved_bytes("to host"),
            "copying_s": self.copying_s,
            "waits_s": self.waits_s,
            "regions": [region_to_json(region) for region in self.regions],
        }

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """A plan of this format or an older one; an `InputError` names the field that is wrong."""
        fields = Fields(data, "plan")
        if fields.get("kind") != "plan" or fields.get("format") not in READABLE:
            raise InputError("plan", f"this is not a plan of a format that is known ({shown_formats()})")
        regions = fields.list("regions")
        if not regions:
            raise InputError("plan.regions", "is empty")
        return cls(
            budget_bytes=fields.size("budget_bytes"),
            resident=fields.sizes("resident"),
            regions=tuple(
                region_from_json(region, fields.get("format"), f"plan.regions[{i}]")
                for i, region in enumerate(regions)
            ),
            setting=fields.texts("setting"),
            inputs=fields.text("inputs"),
            notes=tuple(map(str, fields.list("notes", ()))),
            late_gradients=fields.flag("late_gradients", False),
            platform=platform_from_json(fields),
        )

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json()))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError, RecursionError) as failure:
            raise InputError("plan", f"{path} cannot be read: {failure}"[:200]) from failure
        return cls.from_json(data)
