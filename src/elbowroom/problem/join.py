"""A join: chains of equal steps that meet at the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from elbowroom.errors import InputError
from elbowroom.problem.validation import (
    Json,
    as_count,
    as_flag,
    as_list,
    as_object,
    as_time,
    assign,
)

MAX_STEPS = 1_000_000  # of a join: its file is small however long its schedules are


@dataclass(frozen=True)
class Join:
    """K chains of equal steps that meet at the loss; memory counts in slots, one per value (000, 001 ch. 1).

    `keep_gradients[k]` says whether the gradient of branch k's input must still be there at the end
    (the vector b of 001; all ones in 000).
    """

    lengths: tuple[int, ...]
    forward_time: float
    backward_time: float
    loss_time: float
    keep_gradients: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = tuple(as_count(n, f"lengths[{k}]") for k, n in enumerate(as_list(self.lengths, "lengths")))
        keep = tuple(
            as_flag(b, f"keep_gradients[{k}]") for k, b in enumerate(as_list(self.keep_gradients, "keep_gradients"))
        )
        if not lengths:
            raise InputError("lengths", "is empty; a join needs at least one branch")
        if sum(lengths) > MAX_STEPS:
            raise InputError("lengths", f"add up to {sum(lengths)} steps; the most is {MAX_STEPS}")
        if len(keep) != len(lengths):
            raise InputError("keep_gradients", f"has {len(keep)} entries for {len(lengths)} branches")
        assign(self, "lengths", lengths)
        assign(self, "keep_gradients", keep)
        for field in ("forward_time", "backward_time", "loss_time"):
            assign(self, field, as_time(getattr(self, field), field))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Join:
        names = tuple(f.name for f in fields(cls))
        data = as_object(data, allowed=("kind", *names), required=names)
        return cls(**{name: data[name] for name in names})

    def to_json(self) -> Json:
        return {
            "kind": "join",
            "lengths": list(self.lengths),
            "forward_time": self.forward_time,
            "backward_time": self.backward_time,
            "loss_time": self.loss_time,
            "keep_gradients": list(self.keep_gradients),
        }
