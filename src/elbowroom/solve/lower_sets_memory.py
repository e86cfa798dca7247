"""`lower-sets-memory`: the sequence of lower sets that computes most again at the least budget (002 §4.4)."""

from __future__ import annotations

from typing import final

from elbowroom.problem import Graph, Problem
from elbowroom.schedule import simulate
from elbowroom.solve.lower_set_found import coarsest_found
from elbowroom.solve.lower_sets import table_of
from elbowroom.solve.method import Found, Method, Options


@final
class LowerSetsMemory(Method):
    name = "lower-sets-memory"
    kinds = ("graph",)
    summary = "lowest peak from few, large parts over all sequences of lower sets"
    exact = False
    needs_budget = False

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Graph)
        return simulate(problem, coarsest_found(table_of(problem)).schedule).peak_bytes

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Graph)
        return coarsest_found(table_of(problem))
