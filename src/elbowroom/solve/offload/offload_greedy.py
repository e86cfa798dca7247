"""`offload-greedy`: offload the first values of the chain, as few of them as the budget allows (001 § 3.2).

If any part of any value may move, moving the first bytes is fastest, as many as the peak without moves exceeds the
budget (Theorem 8; `schedule/fluid.py` evaluates that model). Whole values move here: the first ones, until the rest
fits. Where the host has not room for all values, those too large for what is left of it are passed over.

Of several ways in which stages may save, those are taken with which the model of parts is fastest, among the stages'
own ways and the best ones for every price of a byte (`ways.py`).
"""

from __future__ import annotations

import math
from typing import final

from elbowroom.problem import Chain, Platform, Problem
from elbowroom.schedule.fluid import frac_time
from elbowroom.solve.method import Found, Method, Options, Status
from elbowroom.solve.offload.limits import SavedChain, bound_time
from elbowroom.solve.offload.ways import leanest, priced


@final
class OffloadGreedy(Method):
    name = "offload-greedy"
    kinds = ("chain",)
    summary = "moves the first values to the host, as few as fit; nothing is recomputed"
    exact = False
    needs_link = True

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Chain)
        return leanest(problem, options.platform).least_bytes(options.platform)

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Chain)
        platform = options.platform
        saved, model_time = _fastest_ways(problem, budget, platform)
        values = _fewest_first(saved, budget, platform)
        simulation = saved.offloading(values, budget, platform) or saved.eager(budget, platform)
        bound = bound_time(problem, budget, platform)
        status = Status.OPTIMAL if simulation.time <= bound * (1 + 1e-12) else Status.HEURISTIC
        notes = {"bound_time": bound}
        if model_time < math.inf:  # with little room on the host, whole values may fit where the first bytes do not
            notes["model_time"] = model_time
        return Found(tuple(simulation.schedule), status, simulation.time, notes)


def _fastest_ways(chain: Chain, budget: int, platform: Platform) -> tuple[SavedChain, float]:
    """The ways in which parts of values move fastest, and the time that takes."""
    best, best_time = leanest(chain, platform), math.inf
    for saved in (best, *priced(chain)):
        if saved.least_bytes(platform) <= budget and saved.time < best_time:
            time = frac_time(chain, saved.peak_bytes - budget, budget, platform, saved.ways)
            if time < best_time:
                best, best_time = saved, time
    return best, best_time


def _fewest_first(saved: SavedChain, budget: int, platform: Platform) -> list[int]:
    """As few of the values that go first as let the rest stay."""
    values = saved.eager_values(platform)
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if saved.bytes_without(values[:middle]) <= budget:
            high = middle
        else:
            low = middle + 1
    return values[:high]
