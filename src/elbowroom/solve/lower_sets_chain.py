"""`lower-sets-chain`: lower sets in a row as the stages of a chain, each computed as often as memory asks for.

002 ends by asking for strategies that compute a node more than once again. A sequence of lower sets makes a graph a
chain: stage i computes the nodes between two sets, its output is the boundary of the larger one. The chain's optimal
schedule (`persistent`) recomputes stages any number of times; read as a schedule of the graph, it leaves out what
other boundaries still hold, and liveness does the rest.

A value that several boundaries share counts once in the graph and each time in the chain, and inside a stage values
go one by one. So the budget given to the chain is only a dial: it is turned over its whole range, for several
sequences, and the fastest of the graph's schedules that fits serves. What `lower-sets-approx` finds is among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import final

import numpy as np

from elbowroom.problem import Chain, Graph, Problem, Stage
from elbowroom.schedule import Backward, Discard, Forward, Operation, Simulation, simulate
from elbowroom.schedule.liveness import with_liveness
from elbowroom.solve.lower_set_table import Mask, boundary_of, live_schedule, parts_of
from elbowroom.solve.lower_sets_approx import table_of
from elbowroom.solve.method import Found, Method, Options, Status
from elbowroom.solve.persistent import Persistent
from elbowroom.solve.store_all import StoreAll, store_all

STAGES = (64, 24, 10)  # at most so many, in sequences cut along one order
_SETTINGS = 24  # of the dial
_SLOTS = 200


@final
class LowerSetsChain(Method):
    name = "lower-sets-chain"
    kinds = ("graph",)
    summary = "lower sets in a row as stages of a chain, each computed any number of times"
    exact = False

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Graph)
        return min(simulation.peak_bytes for simulation in _candidates(problem))

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Graph)
        found = _candidates(problem)
        table = table_of(problem)
        if budget >= table.least_budget:
            found = [*found, simulate(problem, live_schedule(problem, table.fastest(budget).masks))]
        best = min((s for s in found if s.peak_bytes <= budget), key=lambda simulation: simulation.time)
        return Found(tuple(best.schedule), Status.HEURISTIC, best.time)


@lru_cache(maxsize=2)
def _candidates(graph: Graph) -> list[Simulation]:
    """What the graph's schedules take, for every sequence and setting of the dial; and those of other methods."""
    table = table_of(graph)
    chosen = [table.fastest(table.least_budget).masks, table.coarsest(table.least_budget).masks]
    others = [with_liveness(graph, store_all(graph)), *(live_schedule(graph, masks) for masks in chosen)]
    found = dict.fromkeys(others)
    for masks in (*_along_the_order(graph), *(masks for masks in chosen if len(masks) <= STAGES[0])):
        cuts = Cuts(graph, masks)
        chain = cuts.chain()
        low, high = (method.least_budget(chain, Options(slots=_SLOTS)) for method in (Persistent(), StoreAll()))
        for dial in np.unique(np.geomspace(max(1, low), max(1, low, high), _SETTINGS).astype(np.int64)):
            schedule = Persistent().find(chain, max(low, int(dial)), Options(slots=_SLOTS)).schedule
            found[cuts.on_the_graph(schedule)] = None
    return [simulate(graph, schedule) for schedule in found]


def _along_the_order(graph: Graph) -> Iterator[tuple[Mask, ...]]:
    """Sequences of the first nodes in topological order, cut where boundaries are small."""
    first = list(accumulate(graph.order, lambda mask, v: mask | 1 << v, initial=0))[1:]
    place = {v: k for k, v in enumerate(graph.order)}
    last_read = [max((place[w] for w in graph.successors[v]), default=place[v]) for v in graph.order]
    sizes = [graph.nodes[v].bytes for v in graph.order]
    boundaries = [sum(sizes[k] for k in range(end) if last_read[k] >= end) for end in range(1, len(graph) + 1)]
    for most in STAGES:
        yield tuple(first[end - 1] for end in _small(boundaries, most))
        if len(graph) <= most:
            break


class Cuts:
    """A graph cut into stages, each of which depends on earlier ones only."""

    def __init__(self, graph: Graph, masks: Sequence[Mask]) -> None:
        self.graph = graph
        self.parts = list(parts_of(graph, masks))
        self.boundaries = [boundary_of(graph, mask) for mask in (0, *masks)]

    def chain(self) -> Chain:
        stages = []
        for i, part in enumerate(self.parts, start=1):
            output = self._bytes(self.boundaries[i])
            inside = self._bytes(frozenset(part) - self.boundaries[i])
            time = sum(self.graph.nodes[v].time for v in part)
            stages.append(Stage(f"part {i}", time, 0, output, output + inside, output, inside, inside))
        return Chain(0, 0, tuple(stages))

    def on_the_graph(self, schedule: tuple[Operation, ...]) -> tuple[Operation, ...]:
        """A schedule of the chain, node by node: a stage computes what nothing in memory holds."""
        operations: list[Operation] = []
        held: set[tuple[str, int]] = {("plain", 0)}
        for operation in schedule:
            i = operation.at  # type: ignore[union-attr]
            assert isinstance(i, int)
            if isinstance(operation, Forward):
                there = frozenset().union(*map(self._nodes, held))
                operations += [Forward(v, "all") for v in self.parts[i - 1] if v not in there]
                held.add(("saved" if operation.save == "all" else "plain", i))
                if operation.save == "all":
                    held.discard(("plain", i))
                elif operation.save == "nothing":
                    held.discard(("plain", i - 1))
            elif isinstance(operation, Backward):
                operations += [Backward(v) for v in reversed(self.parts[i - 1])]
                held -= {("saved", i), ("plain", i - 1)}
            elif isinstance(operation, Discard):
                held.discard(("plain", i - 1) if operation.what == "input" else ("saved", i))
        return with_liveness(self.graph, operations)

    def _nodes(self, key: tuple[str, int]) -> frozenset[int]:
        kind, i = key
        return self.boundaries[i] | frozenset(self.parts[i - 1]) if kind == "saved" else self.boundaries[i]

    def _bytes(self, nodes: frozenset[int]) -> int:
        return sum(self.graph.nodes[v].bytes for v in nodes)


def _small(boundaries: list[int], most: int) -> list[int]:
    """Where to end stages: everywhere, or in each of so many equal windows where the boundary is smallest."""
    count = len(boundaries)
    windows = np.array_split(np.arange(1, count), min(most, count) - 1) if count > 1 else []
    return [*(int(min(window, key=lambda end: boundaries[end - 1])) for window in windows), count]
