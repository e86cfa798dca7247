"""`milp`: an integer program after Checkmate, solved by HiGHS: any number of recomputations, with a proven gap.

The backwards run in reverse topological order. Each ends a *stage*, in which forwards may run before it, each at most
once and in topological order. A binary variable says whether a forward runs in a stage; for each of the stage's steps
(its forwards, then its backward) a variable says whether a value is in memory meanwhile. These need not be declared
integer: they are as small as the forwards allow, and so are 0 or 1. Which gradients are in memory follows from the
order alone.

HiGHS is given a time limit. If it has found nothing by then, the linear relaxation is rounded: values are kept where
it keeps more than a certain part of them, and whatever else a stage reads is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

import numpy as np
from scipy.optimize import Bounds, LinearConstraint
from scipy.sparse import csr_array

from elbowroom.errors import InputError
from elbowroom.problem import Graph, Problem
from elbowroom.schedule import Backward, Forward, Operation, simulate
from elbowroom.schedule.liveness import with_liveness
from elbowroom.solve.linear import milp
from elbowroom.solve.method import Found, Method, Options, Status
from elbowroom.solve.store_all import store_all

SECONDS = 20.0
MOST_NODES = 60
_THRESHOLDS = (0.5, 0.3, 0.7, 0.1, 0.9)


@final
class Milp(Method):
    name = "milp"
    kinds = ("graph",)
    summary = "any number of recomputations, by an integer program with a time limit; for small graphs"
    exact = False

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Graph)
        return simulate(problem, _lowest(problem)).peak_bytes

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Graph)
        answer = Program(problem).fastest(budget)
        candidates = [_lowest(problem), *answer.schedules]
        simulations = [simulate(problem, schedule) for schedule in candidates]
        best = min((s for s in simulations if s.peak_bytes <= budget), key=lambda s: s.time)
        gap = max(0.0, best.time - answer.bound) / answer.bound if answer.bound > 0 else 0.0
        status = Status.OPTIMAL if gap <= 1e-6 else Status.HEURISTIC
        return Found(tuple(best.schedule), status, best.time, {"gap": round(gap, 6), "bound_time": answer.bound})


@lru_cache(maxsize=2)
def _lowest(graph: Graph) -> tuple[Operation, ...]:
    """The schedule with the lowest peak found."""
    candidates = [with_liveness(graph, store_all(graph)), *Program(graph).lowest().schedules]
    return min(candidates, key=lambda schedule: simulate(graph, schedule).peak_bytes)


@dataclass(frozen=True)
class Answer:
    """Schedules to choose from, and what none can beat."""

    schedules: list[tuple[Operation, ...]]
    bound: float


class Program:
    """The integer program of one graph. Nodes are known by their place in the topological order."""

    def __init__(self, graph: Graph) -> None:
        if len(graph) > MOST_NODES:
            raise InputError("nodes", f"{len(graph)} are too many for an integer program; use 'lower-sets'")
        self.graph = graph
        place = {v: k for k, v in enumerate(graph.order)}
        self.bytes = [graph.nodes[v].bytes for v in graph.order]
        self.times = [graph.nodes[v].time for v in graph.order]
        self.unit = max(1, sum(self.bytes))  # bytes; tolerances are for numbers around one
        self.reads = [sorted(place[u] for u in graph.predecessors[v]) for v in graph.order]
        self.readers = [sorted(place[w] for w in graph.successors[v]) for v in graph.order]
        self.count = 0
        self.runs: dict[tuple[int, int], int] = {}  # (stage, node) → variable
        self.lives: dict[tuple[int, int, int], int] = {}  # (stage, step, node) → variable; the last step: backward
        for stage in range(len(graph)):
            for k in self._nodes(stage):
                self.runs[stage, k] = self._new()
            for step in range(len(self._nodes(stage)) + 1):
                for i in self._nodes(stage):
                    self.lives[stage, step, i] = self._new()
        self.peak = self._new()

    def fastest(self, budget: int) -> Answer:
        cost = np.zeros(self.count)
        for (_, k), variable in self.runs.items():
            cost[variable] = self.times[k]
        return self._solve(cost, budget)

    def lowest(self) -> Answer:
        cost = np.zeros(self.count)
        cost[self.peak] = 1.0
        return self._solve(cost, 4 * self.unit)

    # --- the constraints ---

    def _nodes(self, stage: int) -> range:
        """Those whose backward is still to come."""
        return range(len(self.graph) - stage)

    def _new(self) -> int:
        self.count += 1
        return self.count - 1

    def _constraints(self) -> Iterator[tuple[dict[int, float], float]]:
        """Each says that a sum of variables is at most something."""
        for stage in range(len(self.graph)):
            last = len(self._nodes(stage)) - 1
            yield from self._computing(stage, last)
            yield from self._living(stage, last)
            yield from self._fitting(stage, last)

    def _computing(self, stage: int, last: int) -> Iterator[tuple[dict[int, float], float]]:
        """A forward has what it reads, and leaves its value; the backward has what it reads."""
        for k in self._nodes(stage):
            for i in (k, *self.reads[k]):
                yield {self.runs[stage, k]: 1.0, self.lives[stage, k, i]: -1.0}, 0.0
        for i in (last, *self.reads[last]):
            yield {self.lives[stage, last + 1, i]: -1.0}, -1.0

    def _living(self, stage: int, last: int) -> Iterator[tuple[dict[int, float], float]]:
        """A value was there at the step before, or is computed now."""
        for step in range(last + 2):
            for i in self._nodes(stage):
                row = {self.lives[stage, step, i]: 1.0}
                if step > 0:
                    row[self.lives[stage, step - 1, i]] = -1.0
                elif stage > 0:
                    row[self.lives[stage - 1, last + 2, i]] = -1.0
                if step == i:
                    row[self.runs[stage, i]] = -1.0
                yield row, 0.0

    def _fitting(self, stage: int, last: int) -> Iterator[tuple[dict[int, float], float]]:
        """What is in memory at each step stays below the peak."""
        held, new = self._gradients(last)
        for step in range(last + 2):
            row = {self.lives[stage, step, i]: self.bytes[i] / self.unit for i in self._nodes(stage)}
            row[self.peak] = -1.0
            yield row, -(held + (new if step == last + 1 else 0)) / self.unit

    def _gradients(self, last: int) -> tuple[int, int]:
        """Bytes of gradients that are there before a node's backward, and of those that it makes."""
        held = {i for i in range(last + 1) if any(w > last for w in self.readers[i])}
        new = {i for i in (last, *self.reads[last]) if i not in held}
        return sum(self.bytes[i] for i in held), sum(self.bytes[i] for i in new)

    # --- solving ---

    def _solve(self, cost: Any, budget: int) -> Answer:
        rows, columns, values, limits = [], [], [], []
        for number, (row, limit) in enumerate(self._constraints()):
            rows += [number] * len(row)
            columns += list(row)
            values += list(row.values())
            limits.append(limit)
        matrix = csr_array((values, (rows, columns)), shape=(len(limits), self.count))
        constraints = LinearConstraint(matrix, -np.inf, np.array(limits))
        integer, high = np.zeros(self.count), np.ones(self.count)
        integer[list(self.runs.values())] = 1
        high[self.peak] = budget / self.unit
        common: dict[str, Any] = {"constraints": constraints, "bounds": Bounds(0.0, high)}
        found = milp(cost, integrality=integer, options={"time_limit": SECONDS}, **common)
        if found.x is not None:
            return Answer([self._schedule(found.x)], float(found.mip_dual_bound or 0.0))
        relaxed = milp(cost, options={"time_limit": SECONDS}, **common)
        if relaxed.x is None:
            return Answer([], 0.0)
        return Answer([self._rounded(relaxed.x, threshold) for threshold in _THRESHOLDS], float(relaxed.fun))

    def _schedule(self, x: Any) -> tuple[Operation, ...]:
        return self._written(
            [k for k in self._nodes(stage) if x[self.runs[stage, k]] > 0.5] for stage in range(len(self.graph))
        )

    def _rounded(self, x: Any, threshold: float) -> tuple[Operation, ...]:
        """Keep what the relaxation keeps more than that, and compute the rest again."""
        stages: list[list[int]] = []
        there: set[int] = set()
        for stage in range(len(self.graph)):
            last = len(self._nodes(stage)) - 1
            wanted = {last, *self.reads[last]} - there
            waiting = list(wanted)
            while waiting:
                missing = set(self.reads[waiting.pop()]) - there - wanted
                wanted |= missing
                waiting += missing
            stages.append(sorted(wanted))
            kept = {i for i in range(last) if x[self.lives[stage, last + 1, i]] > threshold}
            there = (there | wanted) & kept
        return self._written(stages)

    def _written(self, stages: Iterable[list[int]]) -> tuple[Operation, ...]:
        order = self.graph.order
        operations: list[Operation] = []
        for stage, nodes in enumerate(stages):
            operations += [Forward(order[k], "all") for k in nodes]
            operations.append(Backward(order[len(order) - 1 - stage]))
        return with_liveness(self.graph, operations)
