"""`revolve`: checkpoints as in automatic differentiation, saving all only right before each backward.

On a homogeneous chain this is Griewank and Walther's optimum; on any other it is the heterogeneous form used as a
baseline in 001 ch. 2, by the same dynamic program as `persistent` with early saving left out. Every forward runs
at least twice but the last, which is what `persistent` saves.
"""

from __future__ import annotations

from typing import final

from elbowroom.problem import Chain, Problem
from elbowroom.solve.method import Found, Method, Options
from elbowroom.solve.persistent import find, least_budget


@final
class Revolve(Method):
    name = "revolve"
    kinds = ("chain",)
    summary = "checkpoints as in automatic differentiation: optimal there, a baseline for training"
    exact = True

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Chain)
        return least_budget(problem, save_early=False)

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Chain)
        return find(problem, budget, options, save_early=False)
