"""`acg`: the least sum of all checkpoints and the largest segment between them (Feng and Huang's problem, 003 §2.3).

A segment is *independent*: only checkpoints join it to the rest. Segments in an order in which each depends on
earlier ones only are the parts of a sequence of lower sets, and two that do not depend on each other may be parts of
their own. So the answer is exact over all sequences, where all lower sets are tried. The objective is
`model_peak_bytes`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import final

from elbowroom.problem import Graph
from elbowroom.solve.lower_set_found import OneAnswer, sequence_found
from elbowroom.solve.lower_set_table import LowerSetTable, few_lower_sets
from elbowroom.solve.lower_sets_approx import table_of
from elbowroom.solve.method import Found, Status


@final
class Acg(OneAnswer):
    name = "acg"
    summary = "least sum of checkpoints and largest segment between them, each recomputed once"

    def answer(self, graph: Graph) -> Found:
        return _found(graph)


@lru_cache(maxsize=2)
def _found(graph: Graph) -> Found:
    family = few_lower_sets(graph)
    table = table_of(graph) if family is None else LowerSetTable(graph, family)
    chosen, objective = table.smallest()
    return sequence_found(graph, chosen, Status.LEAST_PEAK, objective)
