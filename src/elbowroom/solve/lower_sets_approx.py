"""`lower-sets-approx`: the fastest sequence of lower sets that single nodes generate (002 §4.3)."""

from __future__ import annotations

from functools import lru_cache
from typing import final

from elbowroom.problem import Graph, Problem
from elbowroom.solve.lower_set_found import fastest_found
from elbowroom.solve.lower_set_table import LowerSetTable, pruned_lower_sets
from elbowroom.solve.method import Found, Method, Options


@final
class LowerSetsApprox(Method):
    name = "lower-sets-approx"
    kinds = ("graph",)
    summary = "fastest over sequences of one lower set per node; O(nodes²) steps"
    exact = False

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Graph)
        return table_of(problem).least_budget

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Graph)
        return fastest_found(table_of(problem), budget, exact=self.exact)


@lru_cache(maxsize=2)
def table_of(graph: Graph) -> LowerSetTable:
    return LowerSetTable(graph, pruned_lower_sets(graph), approximate=True)
