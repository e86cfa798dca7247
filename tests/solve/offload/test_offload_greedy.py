"""`offload-greedy` moves the fewest first values that fit; and the ways to save that offloading chooses between."""

from __future__ import annotations

import math
from itertools import product
from random import Random

import pytest

from elbowroom.problem import Platform
from elbowroom.schedule import Offload, simulate
from elbowroom.schedule.fluid import frac_time
from elbowroom.solve import METHODS, Options, Status, solve
from elbowroom.solve.offload.limits import SavedChain
from elbowroom.solve.offload.ways import fastest, leanest, priced
from offloaded import random_case
from problems import byte_chain, random_chain

LINK = Platform(bandwidth=2)


def moved_values(schedule):
    return [op.at if op.what == "all" else 0 for op in schedule if isinstance(op, Offload)]


def test_the_first_values_go_that_are_missing_and_no_more():
    """001 § 3.2: the fewest whose sum reaches the peak minus the budget, at every budget."""
    rng = Random(1)
    several = 0
    for _ in range(25):
        chain = random_chain(rng, rng.randint(2, 9), any_gradients=True)
        saved = SavedChain.own(chain)
        for budget in range(saved.least_bytes(LINK), saved.peak_bytes + 1):
            result = solve(chain, budget, "offload-greedy", platform=LINK)
            count = next(k for k in range(len(chain) + 1) if sum(saved.value_bytes[:k]) >= saved.peak_bytes - budget)
            assert moved_values(result.schedule) == [v for v in range(count) if saved.value_bytes[v]]
            assert result.notes["model_time"] == frac_time(chain, saved.peak_bytes - budget, budget, LINK)
            assert result.time >= result.notes["model_time"] - 1e-9
            several += count > 1
    assert several > 50


def test_every_budget_and_host_budget_is_kept():
    rng = Random(2)
    for _ in range(80):
        chain, platform, _ = random_case(rng, 7, alternatives=True)
        floor = METHODS["offload-greedy"].least_budget(chain, Options(platform=platform))
        for budget in (floor, floor + 1, floor + 3, floor + 9):
            result = solve(chain, budget, "offload-greedy", platform=platform)
            again = simulate(chain, result.schedule, budget=budget, platform=platform)
            assert again.peak_bytes <= budget
            assert platform.host_bytes is None or again.host_peak_bytes <= platform.host_bytes
            assert result.time >= result.notes["bound_time"] - 1e-9
            if result.status is Status.OPTIMAL:
                assert result.time == pytest.approx(result.notes["bound_time"])


def test_other_ways_serve_where_they_are_faster():
    """With ways to choose from, the model of parts is never slower than with the stages' own, and often faster."""
    rng = Random(3)
    faster = 0
    for _ in range(80):
        chain = random_chain(rng, rng.randint(2, 8), alternatives=True)
        own = SavedChain.own(chain)
        budget = max(own.least_bytes(LINK), own.peak_bytes - rng.randint(0, 9))
        result = solve(chain, budget, "offload-greedy", platform=LINK)
        alone = frac_time(chain, own.peak_bytes - budget, budget, LINK)
        assert result.notes["model_time"] <= alone + 1e-9
        faster += result.notes["model_time"] < alone - 1e-9
    assert faster > 10


def test_the_least_budget_is_that_of_the_leanest_ways():
    rng = Random(4)
    for _ in range(120):
        chain = random_chain(rng, rng.randint(1, 6), alternatives=True, any_gradients=True)
        every = [SavedChain(chain, ways) for ways in product(*(range(len(s.ways)) for s in chain.stages))]
        assert leanest(chain, LINK).least_bytes(LINK) == min(saved.least_bytes(LINK) for saved in every)
        assert fastest(chain).time == min(saved.time for saved in every)


def test_for_every_price_of_a_byte_the_best_ways_are_among_those_tried():
    rng = Random(5)
    for _ in range(120):
        chain = random_chain(rng, rng.randint(1, 5), alternatives=True)
        every = [SavedChain(chain, ways) for ways in product(*(range(len(s.ways)) for s in chain.stages))]
        tried = list(priced(chain))
        for price in (0, rng.random() / 10, rng.random(), 5 * rng.random(), 1e3):
            cost = [min(s.time + price * sum(s.value_bytes) for s in some) for some in (every, tried)]
            assert cost[0] == pytest.approx(cost[1])


def test_a_long_chain_with_little_room():
    chain = byte_chain(Random(6), 60)
    saved = SavedChain.own(chain)
    platform = Platform(bandwidth=sum(saved.value_bytes) / saved.time)
    budget = saved.least_bytes(platform)
    result = solve(chain, budget, "offload-greedy", platform=platform)
    assert result.peak_bytes <= budget
    assert result.notes["bound_time"] * (1 - 1e-9) <= result.notes["model_time"] <= result.time < math.inf
