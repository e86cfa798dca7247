"""What the methods over lower sets hand over: the schedule of a sequence, and the sequence itself."""

from __future__ import annotations

import math
from functools import lru_cache

from elbowroom.problem import Graph
from elbowroom.schedule.liveness import with_liveness
from elbowroom.solve.lower_set_table import (
    Chosen,
    LowerSetTable,
    canonical_schedule,
    canonical_time,
    formula_peak,
    recomputed,
)
from elbowroom.solve.method import Found, Status


def fastest_found(table: LowerSetTable, budget: int, *, exact: bool) -> Found:
    chosen = table.fastest(budget)
    return sequence_found(table.graph, chosen, Status.OPTIMAL if exact and chosen.is_exact else Status.HEURISTIC)


@lru_cache(maxsize=2)
def coarsest_found(table: LowerSetTable) -> Found:
    """At the least budget: with large parts, discarding early lowers the peak most."""
    return sequence_found(table.graph, table.coarsest(table.least_budget), Status.LEAST_PEAK)


def sequence_found(graph: Graph, chosen: Chosen, status: Status, model_peak: int | None = None) -> Found:
    again = [graph.nodes[v].time for v in recomputed(graph, chosen.masks[:-1])]  # the last part is still there
    notes = {
        "lower_sets": [[v for v in range(len(graph)) if mask >> v & 1] for mask in chosen.masks],
        "overhead_time": math.fsum(again),
        "model_peak_bytes": formula_peak(graph, chosen.masks) if model_peak is None else model_peak,
    }
    schedule = with_liveness(graph, canonical_schedule(graph, chosen.masks))
    return Found(schedule, status, canonical_time(graph, chosen.masks), notes)
