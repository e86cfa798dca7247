"""elbowroom: train in the memory you have.

`fit` a model and a batch to a number of bytes; `plan` to look first; `measure` any block of code. These need torch,
which is imported when one of them is first used. The planning core needs none: describe a problem, `solve` it within
a budget, let the referee `simulate` the schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

import elbowroom.measure  # noqa: F401
from elbowroom.errors import (
    BudgetTooSmall,
    CopyFailed,
    ElbowroomError,
    HostMemoryRefused,
    InputError,
    InvalidProgram,
    InvalidSchedule,
    Mismatch,
    OverBudget,
    Unplanned,
)
from elbowroom.plan.plan import Plan
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
from elbowroom.schedule import TimeLine, simulate
from elbowroom.showing import show_with
from elbowroom.solve import solve

_NEED_TORCH = {
    "fit": "elbowroom.api",
    "graph_of": "elbowroom.measure.graph_problem",
    "plan": "elbowroom.api",
    "measure": "elbowroom.measure.memory",
}

__all__ = [
    "BudgetTooSmall",
    "Chain",
    "CopyFailed",
    "ElbowroomError",
    "Graph",
    "HostMemoryRefused",
    "InputError",
    "InvalidProgram",
    "InvalidSchedule",
    "Join",
    "Mismatch",
    "Node",
    "OverBudget",
    "Plan",
    "Platform",
    "Saving",
    "Stage",
    "Step",
    "TimeLine",
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

# Two folders have the names of functions. Python binds a folder to its name when it is first imported, which has just
# happened for both; from here on the names mean the functions.
for _folder in ("measure", "plan"):
    globals().pop(_folder, None)


def _from(module: str, function: str) -> Callable[[], Callable[..., str]]:
    return lambda: getattr(import_module(module), function)  # type: ignore[no-any-return]


show_with("plan table", _from("elbowroom.report.plan_table", "plan_text"))
show_with("session report", _from("elbowroom.report.session_report", "session_text"))
show_with("plan picture", _from("elbowroom.report.plan_table", "plan_picture"))
show_with("measurement picture", _from("elbowroom.report.picture", "measurement_picture"))


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
