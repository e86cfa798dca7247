"""The integer program against an exhaustive search over the schedules that it describes."""

from __future__ import annotations

from heapq import heappop, heappush
from random import Random

import pytest

from elbowroom.errors import InputError
from elbowroom.problem import Graph, Node
from elbowroom.schedule import simulate
from elbowroom.solve import METHODS, Options, Status, solve
from elbowroom.solve import milp as method
from problems import random_graph


def least_time(graph, budget):
    """Over stages that each end with a backward; in a stage, forwards in topological order, discards at any time.

    A state is the stage, the next node that may run, and the values in memory. Written against the referee's rules,
    not against the program's variables.
    """
    order = graph.order
    n = len(order)
    size = {v: graph.nodes[v].bytes for v in order}

    def gradients(stage):
        done = set(order[n - stage :])
        return {u for u in order[: n - stage] if any(w in done for w in graph.successors[u])}

    best: dict = {}
    tie = 0
    queue = [(0.0, tie, 0, 0, frozenset())]
    while queue:
        time, _, stage, at, values = heappop(queue)
        if stage == n:
            return time
        if (stage, at, values) in best:
            continue
        best[stage, at, values] = time
        held = sum(size[u] for u in gradients(stage))
        here = sum(size[v] for v in values)
        moves = [(time, stage, at, values - {v}) for v in values]
        if at < n - stage:
            v = order[at]
            moves.append((time, stage, at + 1, values))
            if v not in values and set(graph.predecessors[v]) <= values and here + held + size[v] <= budget:
                moves.append((time + graph.nodes[v].time, stage, at + 1, values | {v}))
        last = order[n - 1 - stage]
        if {last, *graph.predecessors[last]} <= values:
            new = ({last, *graph.predecessors[last]}) - gradients(stage)
            if here + held + sum(size[u] for u in new) <= budget:
                moves.append((time, stage + 1, 0, values - {last}))
        for move in moves:
            tie += 1
            heappush(queue, (move[0], tie, *move[1:]))
    return float("inf")


def test_it_equals_an_exhaustive_search():
    rng = Random(5)
    for _ in range(40):
        graph = random_graph(rng, rng.randint(1, 6), density=0.5)
        least = METHODS["milp"].least_budget(graph, Options())
        assert least_time(graph, least) < float("inf")
        assert least == 0 or least_time(graph, least - 1) == float("inf")
        for budget in (least, least + 2, least + 6):
            result = solve(graph, budget, "milp")
            assert result.status is Status.OPTIMAL
            assert result.time == pytest.approx(least_time(graph, budget))
            assert result.notes["gap"] == 0


def test_it_is_never_slower_than_lower_sets():
    """Each node computed twice at most, in parts, is one of the things it may do, if there is one order only."""
    rng = Random(6)
    for _ in range(8):
        nodes = random_graph(rng, 9).nodes
        skips = [(i, j) for j in range(9) for i in range(j - 1) if rng.random() < 0.2]
        graph = Graph(nodes, tuple((i, i + 1) for i in range(8)) + tuple(skips))
        least = METHODS["lower-sets"].least_budget(graph, Options())
        for budget in (least, least + 5):
            assert solve(graph, budget, "milp").time <= solve(graph, budget, "lower-sets").time + 1e-6


def test_rounding_keeps_the_budget_or_is_not_used(monkeypatch):
    """Without time for the integer program, its relaxation is rounded."""
    real = method.milp

    def no_time(cost, **arguments):
        if "integrality" not in arguments:
            return real(cost, **arguments)
        arguments["options"] = {"time_limit": 0.0, "node_limit": 0}
        found = real(cost, **arguments)
        found.x = None
        return found

    monkeypatch.setattr(method, "milp", no_time)
    method._lowest.cache_clear()
    rng = Random(8)
    below = 0
    for _ in range(15):
        graph = random_graph(rng, 8)
        everything = METHODS["store-all"].least_budget(graph, Options())
        least = METHODS["milp"].least_budget(graph, Options())
        below += least < everything
        result = solve(graph, least, "milp")
        assert result.peak_bytes <= least <= everything
        assert simulate(graph, result.schedule, budget=least)
        assert result.time >= result.notes["bound_time"] - 1e-6
    method._lowest.cache_clear()
    assert below > 5


def test_large_graphs_are_refused_with_a_remedy():
    graph = Graph(tuple(Node("", 1, 1) for _ in range(method.MOST_NODES + 1)), ())
    with pytest.raises(InputError, match="use 'lower-sets'"):
        solve(graph, 1000, "milp")
