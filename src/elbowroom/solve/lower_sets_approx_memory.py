"""`lower-sets-approx-memory`: the same over sequences of one lower set per node (002 §4.3, §4.4)."""

from __future__ import annotations

from typing import final

from elbowroom.problem import Graph
from elbowroom.solve.lower_set_found import OneAnswer, coarsest_found
from elbowroom.solve.lower_sets_approx import table_of
from elbowroom.solve.method import Found


@final
class LowerSetsApproxMemory(OneAnswer):
    name = "lower-sets-approx-memory"
    summary = "lowest peak from few, large parts over sequences of one lower set per node"

    def answer(self, graph: Graph) -> Found:
        return coarsest_found(table_of(graph))
