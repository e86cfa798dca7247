"""What the methods over lower sets hand over, and the two kinds of methods that they are."""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import lru_cache

from elbowroom.problem import Graph, Problem
from elbowroom.schedule import simulate
from elbowroom.solve.lower_set_table import (
    Chosen,
    LowerSetTable,
    formula_peak,
    live_schedule,
    members,
    recomputed,
)
from elbowroom.solve.method import Found, Method, Options, Status


class TimeCentric(Method):
    """The fastest sequence of a family within a budget."""

    kinds = ("graph",)

    @abstractmethod
    def table(self, graph: Graph) -> LowerSetTable:
        """The family's dynamic program, kept from one call to the next."""

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Graph)
        return self.table(problem).least_budget

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Graph)
        return fastest_found(self.table(problem), budget, exact=self.exact)


class OneAnswer(Method):
    """One schedule, built for a low peak whatever the budget."""

    kinds = ("graph",)
    exact = False
    needs_budget = False

    @abstractmethod
    def answer(self, graph: Graph) -> Found:
        """It, kept from one call to the next."""

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Graph)
        return simulate(problem, self.answer(problem).schedule).peak_bytes

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Graph)
        return self.answer(problem)


def fastest_found(table: LowerSetTable, budget: int, *, exact: bool) -> Found:
    chosen = table.fastest(budget)
    return sequence_found(table.graph, chosen, Status.OPTIMAL if exact and chosen.is_exact else Status.HEURISTIC)


@lru_cache(maxsize=2)
def coarsest_found(table: LowerSetTable) -> Found:
    """At the least budget: with large parts, discarding early lowers the peak most."""
    return sequence_found(table.graph, table.coarsest(table.least_budget), Status.LEAST_PEAK)


def sequence_found(graph: Graph, chosen: Chosen, status: Status, model_peak: int | None = None) -> Found:
    again = [graph.nodes[v].time for v in recomputed(graph, chosen.masks)]
    notes = {
        "lower_sets": [members(mask) for mask in chosen.masks],
        "overhead_time": math.fsum(again),
        "model_peak_bytes": formula_peak(graph, chosen.masks) if model_peak is None else model_peak,
    }
    time = math.fsum([*(node.time for node in graph.nodes), *again])
    return Found(live_schedule(graph, chosen.masks), status, time, notes)
