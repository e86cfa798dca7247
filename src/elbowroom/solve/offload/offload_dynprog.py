"""`offload-dynprog`: the values to move are those that are fastest if memory flows (001 § 3.3, Algorithm 5).

`prefixes.py` is the dynamic program. Its decisions say which values move, and in which way each stage saves. Where
the copies are asked for is decided for the referee, which counts a value until its copy has ended (`placing.py`).
What fits while memory flows fits there, too, if more slowly.

The idle time around the loss has two forms, and each is a method of its own name: this one counts it as it is,
`offload-dynprog-simple` as if no copy passed the loss. Each may find values that serve better than the other's, and
under two names tables, portfolios and tests can have both.
"""

from __future__ import annotations

from typing import final

from elbowroom.problem import Chain, Problem
from elbowroom.solve.method import Found, Method, Options, Status
from elbowroom.solve.offload.limits import SavedChain, bound_time
from elbowroom.solve.offload.prefixes import decide
from elbowroom.solve.offload.ways import leanest


@final
class OffloadDynprog(Method):
    name = "offload-dynprog"
    kinds = ("chain",)
    summary = "moves the values that are fastest if their memory flows, by a dynamic program; nothing is recomputed"
    exact = False
    needs_link = True

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Chain)
        return leanest(problem, options.platform).least_bytes(options.platform)

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Chain)
        return find(problem, budget, options, across_loss=True)


def find(chain: Chain, budget: int, options: Options, across_loss: bool) -> Found:
    """The schedule that moves what the dynamic program chooses.

    Its notes have the time promised in the model, and whether no decisions are faster there for certain. Only sizes
    that the host has no room for can keep the program from finding any that fit; then everything moves that can.
    """
    platform = options.platform
    decisions, exact = decide(chain, budget, platform, options.slots, across_loss, options.progress)
    bound = bound_time(chain, budget, platform)
    notes: dict[str, float] = {"bound_time": bound}
    simulation = None
    if decisions is not None:
        simulation = SavedChain(chain, decisions.ways).offloading(decisions.values, budget, platform)
        notes |= {"model_time": decisions.time, "model_exact": exact}
    if simulation is None:
        simulation = leanest(chain, platform).eager(budget, platform)
    status = Status.OPTIMAL if simulation.time <= bound * (1 + 1e-12) else Status.HEURISTIC
    return Found(tuple(simulation.schedule), status, simulation.time, notes)
