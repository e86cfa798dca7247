"""Exact methods against exhaustive searches over memory states."""

from __future__ import annotations

from random import Random

import pytest

from elbowroom.problem import Chain, Join, Stage
from elbowroom.solve import METHODS, Options, solve
from exhaustive import least_time_chain, least_time_join
from problems import random_chain, random_join

INF = float("inf")


def time_of(problem, budget, name):
    result = solve(problem, budget, name)
    return result.time if result.feasible else INF


@pytest.mark.parametrize("seed", range(10))
def test_floating_and_persistent_equal_exhaustive_search(seed):
    """3,000 chains over the ten seeds, at up to six budgets each around the least ones, where it is hardest."""
    rng = Random(seed)
    for case in range(300):
        alternatives = case % 3 == 0
        chain = random_chain(rng, rng.randint(1, 5 if alternatives else 6), alternatives=alternatives)
        least = {n: METHODS[n].least_budget(chain, Options()) for n in ("floating", "persistent")}
        budgets = {least["floating"] - 1, least["floating"], least["persistent"] - 1, least["persistent"]}
        budgets |= {least["persistent"] + rng.randint(1, 5), least["persistent"] + rng.randint(3, 12)}
        for budget in budgets:
            if budget >= 0:
                assert time_of(chain, budget, "floating") == least_time_chain(chain, budget)
                expected = least_time_chain(chain, budget, persistent=True)
                assert time_of(chain, budget, "persistent") == expected


def test_the_counter_example_where_persistence_costs():
    """001 §2.3.1, in the model with saved sets, n = 5 and M = 15: 12 against 13."""
    n = 5
    last = n + 2
    sizes = {1: 1, last: 4, last + 1: 0}
    times = {1: n - 2, 2: 2}
    stages = tuple(
        Stage(f"s{i}", times.get(i, 0), 0, sizes.get(i, 3), sizes.get(i, 3), sizes.get(i, 3))
        for i in range(1, last + 2)
    )
    chain = Chain(0, 0, stages)
    assert solve(chain, 15, "floating").time == 12
    assert solve(chain, 15, "persistent").time == 13


def test_floating_is_not_the_optimum_when_a_gradient_outgrows_its_activation():
    """001 Lemma 3 silently needs δ ≤ a. Here δ2 = 5 > a2 = 2, and recomputing ahead of backward 3, while the
    gradient in memory is still small, is faster than any schedule of the lemma's class."""
    numbers = [(0, 2, 5, 10, 0, 0, 0), (3, 3, 2, 2, 5, 3, 2), (2, 4, 2, 2, 0, 1, 0), (2, 0, 2, 6, 1, 2, 1)]
    numbers.append((3, 2, 0, 4, 1, 2, 1))
    chain = Chain(3, 2, tuple(Stage(f"s{i}", *values) for i, values in enumerate(numbers)))
    assert solve(chain, 17, "floating").time == 28
    assert least_time_chain(chain, 17) == 26


@pytest.mark.parametrize("seed", range(4))
def test_join_equals_exhaustive_search(seed):
    rng = Random(100 + seed)
    for _ in range(40):
        branches = rng.randint(1, 3)
        join = random_join(rng, branches, {1: 7, 2: 4, 3: 2}[branches])
        floor = METHODS["join"].least_budget(join, Options())
        for slots in (floor - 1, floor, floor + 1, floor + 2):
            assert time_of(join, slots, "join") == least_time_join(join, slots)


@pytest.mark.parametrize(
    ("lengths", "slots", "times"),
    [
        ((10, 10, 10), (7, 9, 13, 16), (132, 94, 81, 78)),
        ((5, 25), (5, 7, 9, 13), (159, 101, 86, 80)),
        ((30,), (5, 7, 9, 13), (117, 94, 83, 79)),
    ],
)
def test_join_reproduces_the_known_values(lengths, slots, times):
    join = Join(lengths, 1, 1, 1, (1,) * len(lengths))
    assert tuple(solve(join, m, "join").time for m in slots) == times
    assert solve(join, sum(lengths) + len(lengths), "join").time == 61


def test_equiv_chain_is_never_faster_than_join_and_worse_when_slots_are_few():
    join = Join((10, 10, 10), 1, 1, 1, (1, 1, 1))
    for slots in (9, 12, 15, 33):
        assert solve(join, slots, "equiv-chain").time >= solve(join, slots, "join").time
    assert solve(join, 9, "equiv-chain").time > 1.5 * solve(join, 9, "join").time
