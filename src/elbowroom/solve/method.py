"""The one interface behind which every method stands, and what it returns.

A method is a final class with a name, the kinds of problems it takes, and two abilities: to say the least budget
it can work with, and to find a schedule within a budget that is no smaller. It never grades its own work: `solve`
runs the referee over every schedule and reports what the referee measured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from elbowroom.problem import Platform, Problem
from elbowroom.progress import Progress
from elbowroom.schedule import Operation, Schedule, Simulation, schedule_to_json

NO_LINK = Platform()


@dataclass(frozen=True)
class Options:
    """How to solve: `slots` to divide the budget into, `segments` for the sequential method, where it runs."""

    slots: int | None = None
    segments: int | None = None
    progress: Progress = lambda part: None
    platform: Platform = NO_LINK


class Status(Enum):
    """How good a result is, in words that say what to try next."""

    OPTIMAL = "no schedule of this class is faster within the budget"
    ROUNDED = "fastest with sizes rounded up to slots; more --slots may find a faster one"
    TIGHT = "the budget is too close to the least for slots; more --slots or a few more bytes may be faster"
    NO_RECOMPUTATION = "everything is saved and nothing is recomputed"
    HEURISTIC = "fits, but nothing proves it fastest; an exact method may be faster"
    LEAST_PEAK = "built for the lowest peak, not for speed; to spend a budget on speed try 'auto'"
    INFEASIBLE = "no schedule of this method fits; raise the budget to the least one"


@dataclass(frozen=True)
class Found:
    """What a method hands over: a schedule, the time it promises (if it knows), and anything else worth telling."""

    schedule: tuple[Operation, ...]
    status: Status
    time: float | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


class Method(ABC):
    """One way to schedule. Subclasses are final; they live one to a file."""

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    summary: ClassVar[str]
    exact: ClassVar[bool]  # whether it finds the fastest schedule of its class
    needs_budget: ClassVar[bool] = True
    needs_link: ClassVar[bool] = False  # whether it moves values to the host and back

    @abstractmethod
    def least_budget(self, problem: Problem, options: Options) -> int:
        """The smallest budget within which `find` succeeds."""

    @abstractmethod
    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        """A schedule whose peak is at most `budget`, which is at least the least budget."""


@dataclass(frozen=True)
class Result:
    """The answer to a problem: the schedule, what the referee measured, and a status that says what to do next."""

    solver: str
    status: Status
    message: str
    seconds: float
    budget: int | None
    simulation: Simulation | None = None
    least_budget: int | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def feasible(self) -> bool:
        return self.simulation is not None

    @property
    def schedule(self) -> Schedule:
        return self._simulated.schedule

    @property
    def time(self) -> float:
        return self._simulated.time

    @property
    def peak_bytes(self) -> int:
        return self._simulated.peak_bytes

    @property
    def _simulated(self) -> Simulation:
        if self.simulation is None:
            raise ValueError(self.message)
        return self.simulation

    def to_json(self) -> dict[str, Any]:
        """The machine interface's answer."""
        common = {"solver": self.solver, "status": self.status.name.lower(), "message": self.message}
        if self.simulation is None:
            return {"feasible": False, "least_budget": self.least_budget, **common}
        return {
            "feasible": True,
            **common,
            "time": self.time,
            "peak_bytes": self.peak_bytes,
            "recomputed_forwards": self.simulation.recomputed_forwards,
            **self.notes,
            "solve_seconds": round(self.seconds, 6),
            "schedule": schedule_to_json(self.schedule),
        }
