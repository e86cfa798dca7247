"""Sets of values that go to the host: what the methods share that choose one.

Everything is saved and nothing is recomputed, so a schedule is told by the way in which each stage saves and by the
values that move. The referee grades every such choice, and the fastest is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from elbowroom.problem import Chain, Platform
from elbowroom.schedule import Forward, Offload, Operation, Simulation
from elbowroom.solve.method import Found, Status
from elbowroom.solve.offload.limits import SavedChain, bound_time
from elbowroom.solve.offload.ways import leanest, priced


@dataclass(frozen=True)
class Choice:
    """The way in which each stage saves, and the values ā_k that move."""

    ways: tuple[int, ...]
    values: frozenset[int]


def saved_chains(chain: Chain, platform: Platform) -> list[SavedChain]:
    """The ways of all stages together that methods try which do not choose ways themselves.

    These are the stages' own ways, the fastest, those that save least, and those that need the least budget.
    """
    own, *others = priced(chain)
    return list({saved.ways: saved for saved in (own, *others[:1], *others[-1:], leanest(chain, platform))}.values())


def least_budget(chain: Chain, platform: Platform) -> int:
    """The least within which everything runs if as much moves as can, in whatever ways."""
    return leanest(chain, platform).least_bytes(platform)


def choice_of(schedule: Sequence[Operation]) -> Choice:
    """The choice that a schedule without recomputation carries out."""
    forwards = {op.at: op.way for op in schedule if isinstance(op, Forward)}
    values = {(op.at if op.what == "all" else 0) for op in schedule if isinstance(op, Offload)}
    return Choice(tuple(forwards[at] for at in sorted(forwards)), frozenset(values))  # type: ignore[type-var,arg-type]


class Trials:
    """Choices that the referee has graded within one budget on one platform, and the fastest of them.

    Each trial has notes, and those of the fastest are the result's.
    """

    def __init__(self, chain: Chain, budget: int, platform: Platform) -> None:
        self.chain, self.budget, self.platform = chain, budget, platform
        self.bound = bound_time(chain, budget, platform)
        self.times: dict[Choice, float] = {}  # infinite for what does not fit
        self.best: Simulation | None = None
        self.notes: dict[str, Any] = {}

    @property
    def best_time(self) -> float:
        return math.inf if self.best is None else float(self.best.time)

    @property
    def reached(self) -> bool:
        """Whether nothing can be faster."""
        return self.best_time <= self.bound * (1 + 1e-9)

    def attempt(self, saved: SavedChain, values: Iterable[int], **notes: Any) -> float:
        """The time with these values on the host; those that cannot move or have no bytes are passed over."""
        sizes = saved.value_bytes
        moved = frozenset(k for k in values if k < len(self.chain) - 1 and sizes[k])
        choice = Choice(saved.ways, moved)
        if choice not in self.times:
            simulation = self._simulation(saved, moved)
            self.times[choice] = math.inf if simulation is None else float(simulation.time)
            if simulation is not None:
                self.take(simulation, **notes)
        return self.times[choice]

    def attempt_eager(self) -> None:
        """What fits the least budget: everything moves that can."""
        saved = leanest(self.chain, self.platform)
        self.attempt(saved, saved.eager_values(self.platform))

    def take(self, simulation: Simulation, **notes: Any) -> None:
        """A schedule that the referee has run within the budget on the platform."""
        if self.best is None or rank(simulation) < rank(self.best):
            self.best, self.notes = simulation, notes

    def found(self) -> Found:
        assert self.best is not None, "the budget is below the least"
        status = Status.OPTIMAL if self.best.time <= self.bound * (1 + 1e-12) else Status.HEURISTIC
        notes = {"bound_time": self.bound, **self.notes}
        return Found(tuple(self.best.schedule), status, float(self.best.time), notes)

    def _simulation(self, saved: SavedChain, values: frozenset[int]) -> Simulation | None:
        on_host = sum(saved.value_bytes[k] for k in values)  # all at once, before the first comes back
        room = self.platform.host_bytes
        if (room is not None and on_host > room) or saved.bytes_without(list(values)) > self.budget:
            return None
        return saved.offloading(sorted(values), self.budget, self.platform)


def rank(simulation: Simulation) -> tuple[float, float, int]:
    """Of schedules that are equally fast, the one that moves less is better."""
    return simulation.time, simulation.link_time, simulation.peak_bytes
