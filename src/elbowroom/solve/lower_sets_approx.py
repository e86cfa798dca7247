"""`lower-sets-approx`: the fastest sequence of lower sets that single nodes generate (002 §4.3)."""

from __future__ import annotations

from functools import lru_cache
from typing import final

from elbowroom.problem import Graph
from elbowroom.solve.lower_set_found import TimeCentric
from elbowroom.solve.lower_set_table import LowerSetTable, pruned_lower_sets


@final
class LowerSetsApprox(TimeCentric):
    name = "lower-sets-approx"
    summary = "fastest over sequences of one lower set per node; O(nodes²) steps"
    exact = False

    def table(self, graph: Graph) -> LowerSetTable:
        return table_of(graph)


@lru_cache(maxsize=2)
def table_of(graph: Graph) -> LowerSetTable:
    return LowerSetTable(graph, pruned_lower_sets(graph), approximate=True)
