"""`offload-dynprog-simple`: `offload-dynprog` with the simple form of the idle time around the loss (001 § 3.3.3.1).

It counts (Δ_F⁺ + Δ_B⁺)/β, as if all copies to the host ended before the first backward began, and none came back
before the last forward had ended. The schedule is not bound by that. Fewer prefixes differ then, so the search is
faster and merges fewer of them.
"""

from __future__ import annotations

from typing import final

from elbowroom.problem import Chain, Problem
from elbowroom.solve.method import Found, Method, Options
from elbowroom.solve.offload.offload_dynprog import find
from elbowroom.solve.offload.ways import leanest


@final
class OffloadDynprogSimple(Method):
    name = "offload-dynprog-simple"
    kinds = ("chain",)
    summary = "as offload-dynprog, but counting as if no copy passed the loss"
    exact = False
    needs_link = True

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Chain)
        return leanest(problem, options.platform).least_bytes(options.platform)

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Chain)
        return find(problem, budget, options, across_loss=False)
