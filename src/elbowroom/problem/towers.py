"""Towers: chains of unequal steps that meet at the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from elbowroom.errors import InputError
from elbowroom.problem.validation import (
    Json,
    Prefix,
    as_flag,
    as_list,
    as_object,
    as_size,
    as_text,
    as_time,
    assign,
    check_holds_output,
)
from elbowroom.units import MAX_BYTES


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a tower. Without `saved_bytes` its backward needs its input alone, as in a join; with them, a
    saved set that a forward makes, as in a chain. `weight_bytes` (weights, their gradients) are always there."""

    name: str
    forward_time: float
    backward_time: float
    output_bytes: int
    gradient_bytes: int
    saved_bytes: int | None = None
    forward_overhead_bytes: int = 0
    backward_overhead_bytes: int = 0
    weight_bytes: int = 0

    def __post_init__(self) -> None:
        assign(self, "name", as_text(self.name, "name"))
        for field in ("forward_time", "backward_time"):
            assign(self, field, as_time(getattr(self, field), field))
        for field in _STEP_SIZES:
            assign(self, field, as_size(getattr(self, field), field))
        if self.saved_bytes is not None:
            assign(self, "saved_bytes", as_size(self.saved_bytes, "saved_bytes"))
            check_holds_output(self.saved_bytes, self.output_bytes, "saved_bytes")

    @classmethod
    def from_json(cls, data: Any) -> Step:
        names = tuple(f.name for f in fields(cls))
        data = as_object(data, allowed=names, required=names[1:])
        return cls(**{"name": "", **data})

    def to_json(self) -> Json:
        return {f.name: getattr(self, f.name) for f in fields(self)}


_STEP_SIZES = (
    "output_bytes", "gradient_bytes", "forward_overhead_bytes", "backward_overhead_bytes", "weight_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Tower:
    """A row of steps that ends at the loss. Its input is in memory from the start; the gradient of that input stays
    to the end if it is to be kept."""

    input_bytes: int
    input_gradient_bytes: int
    steps: tuple[Step, ...]
    keep_gradient: int = 0

    def __post_init__(self) -> None:
        for field in ("input_bytes", "input_gradient_bytes"):
            assign(self, field, as_size(getattr(self, field), field))
        assign(self, "keep_gradient", as_flag(self.keep_gradient, "keep_gradient"))
        assign(self, "steps", tuple(self.steps))

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def output_bytes(self) -> tuple[int, ...]:
        """Of every position: 0 is the input, ℓ what step ℓ makes."""
        return (self.input_bytes, *(step.output_bytes for step in self.steps))

    @property
    def gradient_bytes(self) -> tuple[int, ...]:
        return (self.input_gradient_bytes, *(step.gradient_bytes for step in self.steps))

    @classmethod
    def from_json(cls, data: Any) -> Tower:
        names = tuple(f.name for f in fields(cls))
        data = as_object(data, allowed=names, required=names)
        steps = []
        for i, item in enumerate(as_list(data["steps"], "steps")):
            with Prefix(f"steps[{i}]"):
                steps.append(Step.from_json(item))
        return cls(**{**data, "steps": tuple(steps)})

    def to_json(self) -> Json:
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**data, "steps": [step.to_json() for step in self.steps]}


@dataclass(frozen=True)
class Towers:
    """Unequal chains that meet at the loss: a Join with times and sizes of its own for every step.

    With `in_place`, an operation writes over what it reads for the last time, as the papers on joins have it. With
    `shared_weights`, steps of the same number in all towers share theirs: a Siamese network.
    """

    towers: tuple[Tower, ...]
    loss_time: float
    loss_overhead_bytes: int = 0
    in_place: int = 0
    shared_weights: int = 0

    def __post_init__(self) -> None:
        assign(self, "towers", tuple(self.towers))
        assign(self, "loss_time", as_time(self.loss_time, "loss_time"))
        assign(self, "loss_overhead_bytes", as_size(self.loss_overhead_bytes, "loss_overhead_bytes"))
        for field in ("in_place", "shared_weights"):
            assign(self, field, as_flag(getattr(self, field), field))
        if not self.towers:
            raise InputError("towers", "is empty; there must be at least one")
        if self.shared_weights:
            self._check_shared()
        largest = sum(map(_tower_bytes, self.towers)) + self.loss_overhead_bytes
        if largest > MAX_BYTES:
            raise InputError("towers", f"sizes add up to {largest} bytes; the most a plan can hold is 2^60")

    def _check_shared(self) -> None:
        for k, tower in enumerate(self.towers):
            for i, (own, first) in enumerate(zip(tower.steps, self.towers[0].steps, strict=False)):
                if own.weight_bytes != first.weight_bytes:
                    raise InputError(
                        f"towers[{k}].steps[{i}].weight_bytes",
                        f"{own.weight_bytes} cannot be shared with the first tower's {first.weight_bytes}",
                    )

    @property
    def resident_bytes(self) -> int:
        """Weights, which are there all the time: shared ones once."""
        counted: tuple[Tower, ...] = (max(self.towers, key=len),) if self.shared_weights else self.towers
        return sum(step.weight_bytes for tower in counted for step in tower.steps)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Towers:
        names = tuple(f.name for f in fields(cls))
        data = as_object(data, allowed=("kind", *names), required=names)
        towers = []
        for k, item in enumerate(as_list(data["towers"], "towers")):
            with Prefix(f"towers[{k}]"):
                towers.append(Tower.from_json(item))
        return cls(tuple(towers), *(data[name] for name in names[1:]))

    def to_json(self) -> Json:
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"kind": "towers", **data, "towers": [tower.to_json() for tower in self.towers]}


def _tower_bytes(tower: Tower) -> int:
    """A bound on what a tower can add to any sum a solver forms."""
    steps = sum(
        step.output_bytes + 2 * step.gradient_bytes + (step.saved_bytes or 0) + step.weight_bytes
        + step.forward_overhead_bytes + step.backward_overhead_bytes
        for step in tower.steps
    )  # fmt: skip
    return tower.input_bytes + tower.input_gradient_bytes + steps
