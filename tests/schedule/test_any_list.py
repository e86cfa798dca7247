"""Any list of operations gets a verdict: it runs, or it is refused with a reason; and memory always adds up."""

from __future__ import annotations

from random import Random

from elbowroom.errors import InvalidSchedule
from elbowroom.problem import Graph, Node, Platform
from elbowroom.schedule import Backward, Discard, Forward, Loss, Offload, Prefetch, simulate
from problems import random_chain, random_join, random_towers

SAVES = ("nothing", "input", "all", "all")
WHATS = ("input", "all")


def random_operation(rng, position):
    make = rng.choice([Forward, Forward, Forward, Backward, Backward, Discard, Offload, Prefetch])
    if make is Forward:
        return Forward(position, rng.choice(SAVES))
    if make is Backward:
        return Backward(position)
    if make is Prefetch:
        return Prefetch(position, rng.choice(WHATS), rng.random() < 0.3)
    return make(position, rng.choice(WHATS))


def random_platform(rng):
    rates = [0.5, 3.0, 1e6]
    if rng.random() < 0.4:
        return Platform(rng.choice(rates))
    duplex, latency = rng.choice([None, 0, 0.4, 2.0]), rng.choice([0, 0, 0.25])
    return Platform(None, rng.choice(rates), rng.choice(rates), duplex, latency, rng.choice([None, 6, 12]))


def grow(rng, problem, positions, budget, platform):
    """A schedule grown at random, keeping each operation that the referee lets stand."""
    schedule = []
    for _ in range(60):
        candidate = Loss() if rng.random() < 0.1 else random_operation(rng, rng.choice(positions))
        try:
            simulate(problem, [*schedule, candidate], budget=budget, platform=platform)
            return [*schedule, candidate]
        except InvalidSchedule as refusal:
            if refusal.index is None:  # only the end is missing: this operation can stand
                schedule.append(candidate)
    return None


def test_random_lists_on_chains():
    rng = Random(1)
    finished = moved = 0
    for _ in range(600):
        chain = random_chain(rng, rng.randint(1, 3))
        budget = rng.choice([None, rng.randint(5, 40)])
        platform = rng.choice([None, random_platform(rng), random_platform(rng)])
        schedule = grow(rng, chain, range(1, len(chain) + 1), budget, platform)
        if schedule is None:
            continue
        finished += 1
        moved += any(isinstance(op, Offload) for op in schedule)
        result = simulate(chain, schedule, budget=budget, platform=platform)
        assert budget is None or result.peak_bytes <= budget
        assert max(span.bytes for span in result.spans) <= result.peak_bytes
        assert min(span.bytes for span in result.spans) >= 0
        assert all(span.start <= span.end for span in (*result.spans, *result.transfers))
        if platform is not None and platform.host_bytes is not None:
            assert result.host_peak_bytes <= platform.host_bytes
    assert finished > 100
    assert moved > 30


def test_random_lists_on_joins_and_graphs():
    rng = Random(2)
    finished = 0
    for _ in range(150):
        join = random_join(rng, rng.randint(1, 2), 2)
        positions = [(k, i) for k, n in enumerate(join.lengths, start=1) for i in range(1, n + 1)] or [(1, 1)]
        finished += grow(rng, join, positions, None, None) is not None
        nodes = tuple(Node(f"v{i}", 1, rng.randint(0, 5)) for i in range(3))
        graph = Graph(nodes, tuple((i, j) for i in range(3) for j in range(i + 1, 3) if rng.random() < 0.7))
        finished += grow(rng, graph, range(3), None, None) is not None
    assert finished > 50


def test_random_lists_on_towers():
    rng, finished = Random(3), 0
    for _ in range(400):
        problem = random_towers(rng, rng.randint(1, 2), 2)
        positions = [(k, i) for k, t in enumerate(problem.towers, start=1) for i in range(1, len(t) + 1)] or [(1, 1)]
        budget = rng.choice([None, rng.randint(5, 60)])
        schedule = grow(rng, problem, positions, budget, None)
        if schedule is not None:
            finished += 1
            result = simulate(problem, schedule, budget=budget)
            assert budget is None or result.peak_bytes <= budget
            assert min(span.bytes for span in result.spans) >= problem.resident_bytes
    assert finished > 100
