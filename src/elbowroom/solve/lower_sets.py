"""`lower-sets`: the fastest sequence of lower sets, each part computed again at most once (002 §4.2)."""

from __future__ import annotations

from functools import lru_cache
from typing import final

from elbowroom.problem import Graph
from elbowroom.solve.lower_set_found import TimeCentric
from elbowroom.solve.lower_set_table import LowerSetTable, all_lower_sets


@final
class LowerSets(TimeCentric):
    name = "lower-sets"
    summary = "fastest over all sequences of lower sets; for graphs that have few"
    exact = True

    def table(self, graph: Graph) -> LowerSetTable:
        return table_of(graph)


@lru_cache(maxsize=2)
def table_of(graph: Graph) -> LowerSetTable:
    return LowerSetTable(graph, all_lower_sets(graph))
