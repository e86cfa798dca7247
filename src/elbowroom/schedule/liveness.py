"""Liveness analysis for schedules of graphs: every value goes as soon as nothing reads it any more.

A pass of its own: it takes any valid schedule, keeps the order of its computations, drops those whose values nobody
reads, and places the discards anew. Time never rises and the peak never rises.
"""

from __future__ import annotations

from elbowroom.problem import Graph
from elbowroom.schedule.operations import Backward, Discard, Forward, Operation, Schedule


def with_liveness(graph: Graph, schedule: Schedule) -> tuple[Operation, ...]:
    """The same computations, as far as they are needed, with every value discarded after its last reader."""
    computations = [operation for operation in schedule if not isinstance(operation, Discard)]
    needed: list[bool] = [True] * len(computations)
    last: dict[int, int] = {}  # node → index of the last reader of the value that is there before this point
    discards: dict[int, list[int]] = {}  # index → values that go after it
    for index in range(len(computations) - 1, -1, -1):
        operation = computations[index]
        v = operation.at  # type: ignore[union-attr]
        assert isinstance(v, int)
        if isinstance(operation, Forward):
            needed[index] = v in last
            reader = last.pop(v, None)
            if reader is not None and not _ends(computations[reader], v):
                discards.setdefault(reader, []).append(v)
            if not needed[index]:
                continue
        reads = graph.predecessors[v] if isinstance(operation, Forward) else (v, *graph.predecessors[v])
        for u in reads:
            last.setdefault(u, index)
    live: list[Operation] = []
    for index, operation in enumerate(computations):
        if needed[index]:
            live.append(operation)
            live += [Discard(v) for v in sorted(discards.get(index, ()))]
    return tuple(live)


def _ends(operation: Operation, v: int) -> bool:
    """A backward takes its own node's value with it."""
    return isinstance(operation, Backward) and operation.at == v
