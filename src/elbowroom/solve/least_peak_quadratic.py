"""`least-peak-quadratic`: the same optimum as `least-peak` by trying every pair of checkpoints (003 Alg. 5)."""

from __future__ import annotations

from typing import final

from elbowroom.problem import Chain, Problem
from elbowroom.solve.kernels.checkpoints import dynamic_quadratic
from elbowroom.solve.least_peak import dynamic_checkpoints, found
from elbowroom.solve.method import Found, Method, Options
from elbowroom.solve.segments import Segments


@final
class LeastPeakQuadratic(Method):
    name = "least-peak-quadratic"
    kinds = ("chain",)
    summary = "the same optimum as least-peak, by the simpler algorithm; O(stages²)"
    exact = False
    needs_budget = False

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Chain)
        return Segments(problem).peak(dynamic_checkpoints(problem, dynamic_quadratic)[0])

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Chain)
        return found(problem, *dynamic_checkpoints(problem, dynamic_quadratic))
