"""What the methods share that recompute and offload: schedules to fall back to, and graded results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elbowroom.problem import Chain
from elbowroom.schedule import Simulation, simulate
from elbowroom.solve.method import Found, Options, Status
from elbowroom.solve.offload.leanest import Leanest
from elbowroom.solve.offload.placing import place, save_all
from elbowroom.solve.offload.ways import fastest
from elbowroom.solve.persistent import find as find_persistent


@dataclass(frozen=True)
class Graded:
    """A schedule as the referee ran it, and the time that its method's own model promised for it, if it has one."""

    simulation: Simulation
    promise: float | None = None

    @property
    def rank(self) -> tuple[float, int]:
        return self.simulation.time, self.simulation.peak_bytes

    def found(self, chain: Chain, **notes: Any) -> Found:
        promise = {} if self.promise is None else {"promised_time": self.promise}
        told = {**promise, "bound_time": computing_time(chain), **notes}
        return Found(tuple(self.simulation.schedule), Status.HEURISTIC, self.simulation.time, told)


def computing_time(chain: Chain) -> float:
    """Every operation once, each stage saved in its fastest way: what no schedule beats."""
    return fastest(chain).time


def without_need(chain: Chain, budget: int) -> Found | None:
    """The schedule that saves all in the fastest ways, if it fits: then nothing needs to be moved or recomputed."""
    saved = fastest(chain)
    if saved.peak_bytes > budget:
        return None
    simulation = simulate(chain, save_all(chain, saved.ways))
    notes = {"promised_time": simulation.time, "bound_time": saved.time}
    return Found(tuple(simulation.schedule), Status.NO_RECOMPUTATION, simulation.time, notes)


def fallback(lean: Leanest, budget: int, options: Options) -> Graded:
    """A schedule for any budget that is no smaller than the least: without moves if that is possible."""
    chain, platform = lean.chain, options.platform
    if budget >= lean.entries.alone[0]:
        found = find_persistent(chain, budget, Options(options.slots), save_early=True)
        simulation = simulate(chain, found.schedule, budget=budget, platform=platform)
        return Graded(simulation, simulation.time)
    moving = lean.schedule(platform)
    placed = place(chain, moving.computing, moving.moves, budget, platform)
    assert placed is not None, "the leanest schedule fits the least budget"
    return Graded(placed)
