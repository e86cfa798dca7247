"""The portfolio against all choices of ways and values, each graded by the referee, on tiny chains."""

from __future__ import annotations

from itertools import combinations, product
from random import Random

import pytest

from elbowroom.problem import Chain, Platform
from elbowroom.schedule import simulate
from elbowroom.solve import METHODS, Options, solve
from elbowroom.solve.offload import order_search, set_search
from elbowroom.solve.offload.limits import SavedChain, bound_time
from elbowroom.solve.offload.offload_best import PARTS
from problems import byte_chain, random_chain

LINKS = (
    Platform(bandwidth=1.0),
    Platform(to_host=2.0, from_host=1.0, duplex=1.0),
    Platform(bandwidth=2.0, host_bytes=9, seconds_per_copy=0.5),
    Platform(to_host=1.0, from_host=3.0, duplex=0.0),
)


def best_of_all(chain: Chain, budget: int, platform: Platform) -> float:
    """The fastest schedule that `place` makes of any ways and any set of values."""
    best = float("inf")
    for ways in product(*(range(len(stage.ways)) for stage in chain.stages)):
        saved = SavedChain(chain, ways)
        for count in range(len(chain)):
            for values in combinations(range(len(chain) - 1), count):
                found = saved.offloading(values, budget, platform)
                best = best if found is None else min(best, found.time)
    return best


def budgets(chain: Chain, platform: Platform) -> list[int]:
    least = METHODS["offload-best"].least_budget(chain, Options(platform=platform))
    everything = METHODS["store-all"].least_budget(chain, Options())
    return sorted(
        {max(least, budget) for budget in (least, (2 * least + everything) // 3, (least + everything) // 2)}
    )


@pytest.mark.parametrize("alternatives", [False, True])
def test_it_is_as_fast_as_the_best_of_all_choices(alternatives):
    rng = Random(1)
    for number in range(16):
        chain = random_chain(rng, rng.randint(2, 5), alternatives=alternatives, any_gradients=True)
        platform = LINKS[number % 4]
        for budget in budgets(chain, platform):
            result = solve(chain, budget, "offload-best", platform=platform)
            assert result.time <= best_of_all(chain, budget, platform) * (1 + 1e-9)
            assert result.time >= bound_time(chain, budget, platform) * (1 - 1e-9)


@pytest.mark.slow
def test_it_is_as_fast_as_the_best_of_all_choices_on_many_chains():
    rng = Random(2)
    for number in range(300):
        chain = random_chain(rng, rng.randint(2, 7), alternatives=number % 5 == 0, any_gradients=True)
        platform = LINKS[number % 4]
        for budget in budgets(chain, platform):
            result = solve(chain, budget, "offload-best", platform=platform)
            assert result.time <= best_of_all(chain, budget, platform) * (1 + 1e-9)


def test_it_is_never_slower_than_any_of_its_methods():
    rng = Random(3)
    for number in range(8):
        chain = byte_chain(rng, rng.randint(2, 9)) if number % 2 else random_chain(rng, 6, alternatives=True)
        rate = sum(stage.saved_bytes for stage in chain.stages) / (1 + sum(s.forward_time for s in chain.stages))
        platform = Platform(bandwidth=rate + 1)
        for budget in budgets(chain, platform):
            best = solve(chain, budget, "offload-best", platform=platform)
            for method in PARTS:
                other = solve(chain, budget, method.name, platform=platform)
                assert not other.feasible or best.time <= other.time
            assert best.notes["won"] in {"search", *(method.name for method in PARTS)}


def test_chains_with_too_many_choices_to_time_all_are_searched(monkeypatch):
    """The search finds what timing all choices finds, or nearly; and improves what the methods found."""
    monkeypatch.setattr(order_search, "_PLAYED", 0)  # the order is another matter
    rng = Random(4)
    improved = 0
    for _ in range(4):
        chain = byte_chain(rng, 11)
        saved = SavedChain.own(chain)
        platform = Platform(bandwidth=sum(saved.value_bytes) / saved.time)
        budget = (3 * saved.least_bytes(platform) + saved.peak_bytes) // 4
        all_timed = solve(chain, budget, "offload-best", platform=platform)
        with monkeypatch.context() as patched:
            patched.setattr(set_search, "_all_choices", lambda chain: float("inf"))
            patched.setattr(set_search, "_WORK", 1e6)
            searched = solve(chain, budget, "offload-best", platform=platform)
            patched.setattr(set_search, "_WORK", 0)
            alone = solve(chain, budget, "offload-best", platform=platform)
        assert all_timed.time <= searched.time * (1 + 1e-9)
        assert searched.time <= min(alone.time, 1.02 * all_timed.time)
        improved += searched.time < alone.time
    assert improved


def test_the_search_changes_ways_and_keeps_to_a_short_host(monkeypatch):
    rng = Random(5)
    monkeypatch.setattr(set_search, "_all_choices", lambda chain: float("inf"))
    monkeypatch.setattr(set_search, "_WORK", 3e5)
    for number in range(12):
        chain = random_chain(rng, rng.randint(3, 5), alternatives=True, any_gradients=True)
        platform = LINKS[number % 4]
        for budget in budgets(chain, platform):
            result = solve(chain, budget, "offload-best", platform=platform)
            again = simulate(chain, result.schedule, budget=budget, platform=platform)
            assert platform.host_bytes is None or again.host_peak_bytes <= platform.host_bytes
            assert result.time <= 1.1 * best_of_all(chain, budget, platform)


def test_a_small_value_waits_for_a_large_one(monkeypatch):
    """Letting values go in another order is never slower than without, and here faster at least once."""
    rng = Random(6)
    faster = 0
    for _ in range(6):
        chain = random_chain(rng, 7)
        platform = Platform(bandwidth=rng.choice([0.5, 1, 2]))
        for budget in budgets(chain, platform):
            either = solve(chain, budget, "offload-best", platform=platform)
            with monkeypatch.context() as patched:
                patched.setattr(order_search, "_PLAYED", 0)
                in_order = solve(chain, budget, "offload-best", platform=platform)
            assert either.time <= in_order.time
            faster += either.time < in_order.time
    assert faster
