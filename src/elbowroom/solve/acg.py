"""`acg`: the least sum of all checkpoints and the largest segment between them (Feng and Huang's problem, 003 §2.3).

A segment is *independent*: only checkpoints join it to the rest. Segments in an order in which each depends on
earlier ones only are the parts of a sequence of lower sets, and two that do not depend on each other may be parts of
their own. So the answer is exact over all sequences, where all lower sets are tried. The objective is
`model_peak_bytes`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import final

from elbowroom.errors import InputError
from elbowroom.problem import Graph, Problem
from elbowroom.schedule import simulate
from elbowroom.solve.lower_set_found import sequence_found
from elbowroom.solve.lower_set_table import LowerSetTable, all_lower_sets, pruned_lower_sets
from elbowroom.solve.method import Found, Method, Options, Status

FEW_SETS = 4_000


@final
class Acg(Method):
    name = "acg"
    kinds = ("graph",)
    summary = "least sum of checkpoints and largest segment between them, each recomputed once"
    exact = False
    needs_budget = False

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Graph)
        return simulate(problem, _found(problem).schedule).peak_bytes

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Graph)
        return _found(problem)


@lru_cache(maxsize=2)
def _found(graph: Graph) -> Found:
    try:
        table = LowerSetTable(graph, all_lower_sets(graph, FEW_SETS))
    except InputError:
        table = LowerSetTable(graph, pruned_lower_sets(graph), approximate=True)
    chosen, objective = table.smallest()
    return sequence_found(graph, chosen, Status.LEAST_PEAK, objective)
