"""elbowroom: train in the memory you have.

`fit` a model and a batch to a number of bytes; `plan` to look first; `measure` any block of code. These need torch,
which is imported when one of them is first used. The planning core needs none: describe a problem, `solve` it within
a budget, let the referee `simulate` the schedule.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

from elbowroom.errors import BudgetTooSmall, ElbowroomError, InputError, InvalidSchedule, Mismatch, Unplanned
from elbowroom.plans import Plan
from elbowroom.problem import (
    Chain,
    Graph,
    Join,
    Node,
    Platform,
    Saving,
    Stage,
    Step,
    Tower,
    Towers,
    problem_from_json,
)
from elbowroom.schedule import simulate
from elbowroom.solve import solve

_NEED_TORCH = {
    "fit": "elbowroom.api",
    "graph_of": "elbowroom.capture.forward_graph",
    "plan": "elbowroom.api",
    "measure": "elbowroom.measuring.memory",
}

__all__ = [
    "BudgetTooSmall",
    "Chain",
    "ElbowroomError",
    "Graph",
    "InputError",
    "InvalidSchedule",
    "Join",
    "Mismatch",
    "Node",
    "Plan",
    "Platform",
    "Saving",
    "Stage",
    "Step",
    "Tower",
    "Towers",
    "Unplanned",
    "fit",
    "graph_of",
    "measure",
    "plan",
    "problem_from_json",
    "simulate",
    "solve",
]


def __getattr__(name: str) -> Any:
    """The names that need torch, imported when first asked for."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'elbowroom' has no attribute {name!r}")
    try:
        found = getattr(import_module(_NEED_TORCH[name]), name)
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        raise ElbowroomError(f"elbowroom.{name} needs PyTorch 2.11 or newer: pip install torch") from missing
    globals()[name] = found
    return found
