"""`pofo`: its tables against an exhaustive search of its class, and against `persistent` where the link is slow."""

from __future__ import annotations

import math
from random import Random

import pytest

from elbowroom.problem import Platform
from elbowroom.solve import METHODS, Options, solve
from elbowroom.solve.offload.leanest import Leanest
from elbowroom.solve.offload.pofo_reading import readings
from elbowroom.solve.offload.pofo_table import Table
from exhaustive_pofo import best_time
from problems import random_chain

EXACT = 10**6  # more levels than any of these chains has bytes


def promised(chain, budget, platform, slots=EXACT):
    """The best time in the table's own model."""
    found = next(readings(Table(Leanest(chain), budget, Options(slots, platform=platform)), breadth=1), None)
    return float("inf") if found is None else found[0].promise


def compare_with_all(seed, count, stages):
    rng = Random(seed)
    moving = 0
    for number in range(count):
        chain = random_chain(rng, rng.randint(1, stages), alternatives=number % 2 == 1, any_gradients=True)
        platform = rng.choice([Platform(bandwidth=1), Platform(bandwidth=2), Platform(to_host=1, from_host=3)])
        least = Leanest(chain).least_bytes(platform)
        for budget in (least - 1, least, least + 1, least + rng.randint(2, 12)):
            if budget <= 0:
                continue
            best = best_time(chain, budget, platform.rate_to_host, platform.rate_from_host)
            assert math.isfinite(best) == (budget >= least)
            found = promised(chain, budget, platform)
            assert found == pytest.approx(best, rel=1e-9), (chain, budget, platform)
            if math.isfinite(best) and budget >= METHODS["persistent"].least_budget(chain, Options()):
                moving += best < solve(chain, budget, "persistent").time
    return moving


def test_the_tables_hold_the_best_of_all_schedules():
    assert compare_with_all(1, 40, 4) > 10


@pytest.mark.slow
def test_the_tables_hold_the_best_of_all_schedules_of_many_chains():
    assert compare_with_all(2, 1000, 4) > 300
    assert compare_with_all(3, 60, 5) > 20


def test_with_hardly_any_link_it_is_persistent():
    rng = Random(4)
    platform = Platform(bandwidth=1e-12)
    for number in range(60):
        chain = random_chain(rng, rng.randint(1, 9), alternatives=number % 2 == 1)
        least = METHODS["persistent"].least_budget(chain, Options())
        for budget in (least, least + rng.randint(1, 6), least + rng.randint(7, 20)):
            if budget > 0:
                assert promised(chain, budget, platform) == solve(chain, budget, "persistent").time
                assert solve(chain, budget, "pofo", platform=platform).time == solve(chain, budget, "persistent").time
