"""A chain: stages one after the other, the last of which is the loss.

The notation of the docstrings is that of 001 ch. 2: a stage's output aℓ (`output_bytes`), everything its backward
needs āℓ (`saved_bytes`, aℓ included), the gradient δℓ with respect to its output (`gradient_bytes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from elbowroom.errors import InputError
from elbowroom.problem.validation import (
    Json,
    Prefix,
    as_amount,
    as_list,
    as_object,
    as_size,
    as_text,
    assign,
    check_holds_output,
)
from elbowroom.units import MAX_BYTES


@dataclass(frozen=True, slots=True)
class Saving:
    """One way for a stage to run its forward so that its backward can follow."""

    forward_time: float
    backward_time: float
    saved_bytes: int
    forward_overhead_bytes: int
    backward_overhead_bytes: int


_SAVING_FIELDS = tuple(f.name for f in fields(Saving))


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a chain. `alternatives` are other ways to save; way 0 is the stage's own."""

    name: str
    forward_time: float
    backward_time: float
    output_bytes: int
    saved_bytes: int
    gradient_bytes: int
    forward_overhead_bytes: int = 0
    backward_overhead_bytes: int = 0
    alternatives: tuple[Saving, ...] = ()

    def __post_init__(self) -> None:
        assign(self, "name", as_text(self.name, "name"))
        for field in ("output_bytes", "gradient_bytes"):
            assign(self, field, as_size(getattr(self, field), field))
        for field in _SAVING_FIELDS:
            assign(self, field, as_amount(getattr(self, field), field))
        check_holds_output(self.saved_bytes, self.output_bytes, "saved_bytes")
        for i, way in enumerate(self.alternatives):
            with Prefix(f"alternatives[{i}]"):
                for field in _SAVING_FIELDS:
                    as_amount(getattr(way, field), field)
                check_holds_output(way.saved_bytes, self.output_bytes, "saved_bytes")

    @property
    def ways(self) -> tuple[Saving, ...]:
        """All the ways to save, the stage's own first: a schedule's choice indexes this."""
        own = Saving(
            self.forward_time,
            self.backward_time,
            self.saved_bytes,
            self.forward_overhead_bytes,
            self.backward_overhead_bytes,
        )
        return (own, *self.alternatives)

    @classmethod
    def from_json(cls, data: Any) -> Stage:
        data = as_object(data, allowed=_STAGE_FIELDS, required=_STAGE_REQUIRED)
        own = {field: data[field] for field in _STAGE_REQUIRED}
        stage = cls(name=data.get("name", ""), **own)
        ways = []
        for i, override in enumerate(as_list(data.get("alternatives", []), "alternatives")):
            with Prefix(f"alternatives[{i}]"):
                ways.append(_alternative(stage, override))
        return cls(name=stage.name, **own, alternatives=tuple(ways)) if ways else stage

    def to_json(self) -> Json:
        data: Json = {field: getattr(self, field) for field in ("name", *_STAGE_REQUIRED)}
        if self.alternatives:
            data["alternatives"] = [
                {f: getattr(way, f) for f in _SAVING_FIELDS if getattr(way, f) != getattr(self, f)}
                for way in self.alternatives
            ]
        return data


_STAGE_REQUIRED = (
    "forward_time",
    "backward_time",
    "output_bytes",
    "saved_bytes",
    "gradient_bytes",
    "forward_overhead_bytes",
    "backward_overhead_bytes",
)
_STAGE_FIELDS = ("name", *_STAGE_REQUIRED, "alternatives")


def _alternative(stage: Stage, override: Any) -> Saving:
    """A stage's own way to save with some fields replaced.

    The output and its gradient are the same tensors however the stage saves, so an alternative may repeat
    their sizes but not change them.
    """
    override = as_object(override, allowed=("name", *_STAGE_REQUIRED))
    for field in ("output_bytes", "gradient_bytes"):
        if field in override and as_size(override[field], field) != getattr(stage, field):
            raise InputError(field, "belongs to the stage; an alternative way to save cannot change it")
    return Saving(**{f: as_amount(override.get(f, getattr(stage, f)), f) for f in _SAVING_FIELDS})


@dataclass(frozen=True)
class Chain:
    """Stages 1..n in a row, the last one being the loss.

    `input_bytes` is a0, in memory from the start; `input_gradient_bytes` is δ0, what the last backward leaves.
    """

    input_bytes: int
    input_gradient_bytes: int
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        for field in ("input_bytes", "input_gradient_bytes"):
            assign(self, field, as_size(getattr(self, field), field))
        assign(self, "stages", tuple(self.stages))
        if not self.stages:
            raise InputError("stages", "is empty; a chain needs at least the loss")
        largest = self.input_bytes + self.input_gradient_bytes + sum(map(_stage_bytes, self.stages))
        if largest > MAX_BYTES:
            raise InputError("stages", f"sizes add up to {largest} bytes; the most a plan can hold is 2^60")

    def __len__(self) -> int:
        return len(self.stages)

    @cached_property
    def output_bytes(self) -> tuple[int, ...]:
        """aℓ for ℓ = 0..n: position 0 is the chain's input."""
        return (self.input_bytes, *(stage.output_bytes for stage in self.stages))

    @cached_property
    def gradient_bytes(self) -> tuple[int, ...]:
        """δℓ for ℓ = 0..n: position 0 is the gradient of the chain's input."""
        return (self.input_gradient_bytes, *(stage.gradient_bytes for stage in self.stages))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Chain:
        data = as_object(
            data,
            allowed=("kind", "input_bytes", "input_gradient_bytes", "stages"),
            required=("input_bytes", "input_gradient_bytes", "stages"),
        )
        stages = []
        for i, item in enumerate(as_list(data["stages"], "stages")):
            with Prefix(f"stages[{i}]"):
                stages.append(Stage.from_json(item))
        return cls(data["input_bytes"], data["input_gradient_bytes"], tuple(stages))

    def to_json(self) -> Json:
        return {
            "kind": "chain",
            "input_bytes": self.input_bytes,
            "input_gradient_bytes": self.input_gradient_bytes,
            "stages": [stage.to_json() for stage in self.stages],
        }


def _stage_bytes(stage: Stage) -> int:
    """A bound on what a stage can add to any sum a solver forms."""
    ways = max(w.saved_bytes + w.forward_overhead_bytes + w.backward_overhead_bytes for w in stage.ways)
    return stage.output_bytes + 2 * stage.gradient_bytes + ways
