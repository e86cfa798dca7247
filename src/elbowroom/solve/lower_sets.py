"""`lower-sets`: the fastest sequence of lower sets, each part computed again at most once (002 §4.2)."""

from __future__ import annotations

from functools import lru_cache
from typing import final

from elbowroom.problem import Graph, Problem
from elbowroom.solve.lower_set_found import fastest_found
from elbowroom.solve.lower_set_table import LowerSetTable, all_lower_sets
from elbowroom.solve.method import Found, Method, Options


@final
class LowerSets(Method):
    name = "lower-sets"
    kinds = ("graph",)
    summary = "fastest over all sequences of lower sets; for graphs that have few"
    exact = True

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Graph)
        return table_of(problem).least_budget

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Graph)
        return fastest_found(table_of(problem), budget, exact=self.exact)


@lru_cache(maxsize=2)
def table_of(graph: Graph) -> LowerSetTable:
    return LowerSetTable(graph, all_lower_sets(graph))
