"""`lower-sets-memory`: the sequence of lower sets that computes most again at the least budget (002 §4.4)."""

from __future__ import annotations

from typing import final

from elbowroom.problem import Graph
from elbowroom.solve.lower_set_found import OneAnswer, coarsest_found
from elbowroom.solve.lower_sets import table_of
from elbowroom.solve.method import Found


@final
class LowerSetsMemory(OneAnswer):
    name = "lower-sets-memory"
    summary = "lowest peak from few, large parts over all sequences of lower sets"

    def answer(self, graph: Graph) -> Found:
        return coarsest_found(table_of(graph))
