"""AutoSwap's four scores, on a chain small enough to reckon them by hand, and what is made of them."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from elbowroom.problem import Chain, Platform, Stage
from elbowroom.schedule import simulate
from elbowroom.solve import solve
from elbowroom.solve.offload.autoswap import Scores, weightings
from elbowroom.solve.offload.limits import SavedChain
from problems import byte_chain, random_chain


def chain_of_four() -> Chain:
    """Values of 2, 6, 1, 3 and 1 bytes. Times are 1, but for the third stage, which takes 5 both ways."""
    times, saved = (1, 1, 5, 1), (6, 1, 3, 1)
    return Chain(
        2, 0, tuple(Stage(f"s{i}", t, t, 0, s, 0) for i, (t, s) in enumerate(zip(times, saved, strict=True)))
    )


def test_the_scores_of_a_small_chain():
    # Forwards end at 1, 2, 7, 8 and backwards begin at 8, 9, 14, 15; memory is 8, 9, 12, 13 both ways.
    # ā_0 is absent from 1 to 15, ā_1 from 2 to 14 and ā_2 from 7 to 9. A copy of one byte takes half a second.
    scores = Scores.of(SavedChain.own(chain_of_four()), 9, Platform(bandwidth=2))
    assert scores.values == [0, 1, 2]
    assert list(scores.durations) == [1, 1, 5, 1, 1, 5, 1, 1]
    assert list(scores.over) == [-1, 0, 3, 4, 4, 3, 0, -1]
    assert list(scores.copying) == [2, 6, 1]
    duration = scores.absent @ scores.durations - scores.copying
    assert list(duration) == [14 - 2, 12 - 6, 2 - 1]
    over = np.maximum(scores.over, 0)
    assert list(scores.absent @ (scores.durations * over)) == [38, 38, 8]


@pytest.mark.parametrize(
    ("weights", "taken"),
    [
        ((1, 0, 0, 0), [0, 1]),  # 12, 6, 1: the longest absence
        ((0, 1, 0, 0), [1]),  # 24, 36, 1: the largest area, and it is enough
        ((0, 0, 1, 0), [0, 1]),  # 38, 38, 8
        ((0, 0, 0, 1), [0, 1]),  # the same, and then what is left of it
        ((0.5, 0.5, 0, 0), [0, 1]),  # half of 1 + 24/36 against half of 6/12 + 1
        ((0.25, 0.75, 0, 0), [1]),  # 1 and three times 24/36 against 6/12 and three times 1
    ],
)
def test_what_each_score_takes(weights, taken):
    scores = Scores.of(SavedChain.own(chain_of_four()), 9, Platform(bandwidth=2))
    assert scores.chosen(weights) == taken


def test_it_takes_values_until_the_peak_fits_and_no_more():
    rng = Random(1)
    for _ in range(60):
        chain = random_chain(rng, rng.randint(2, 8))
        saved = SavedChain.own(chain)
        platform = Platform(bandwidth=2)
        for budget in range(saved.least_bytes(platform), saved.peak_bytes + 1):
            scores = Scores.of(saved, budget, platform)
            for weights in ((1, 0, 0, 0), (0, 0.5, 0, 0.5)):
                taken = scores.chosen(weights)
                assert taken is not None
                assert saved.bytes_without(taken) <= budget
                assert not taken or saved.bytes_without(taken[:-1]) > budget
        assert Scores.of(saved, saved.least_bytes(platform) - 1, platform).chosen((1, 0, 0, 0)) is None


def test_weights_are_shares():
    grid = list(weightings())
    assert len(grid) == len(set(grid)) == 35
    assert all(sum(weights) == 1 and min(weights) >= 0 for weights in grid)
    assert {(1, 0, 0, 0), (0, 0, 0, 1), (0.25,) * 4} <= set(grid)


def test_the_best_weights_are_taken_and_told():
    chain = byte_chain(Random(2), 12)
    saved = SavedChain.own(chain)
    platform = Platform(bandwidth=sum(saved.value_bytes) / saved.time)
    budget = (saved.least_bytes(platform) + saved.peak_bytes) // 2
    result = solve(chain, budget, "autoswap", platform=platform)
    scores = Scores.of(saved, budget, platform)
    times = []
    for weights in weightings():
        simulation = saved.offloading(scores.chosen(weights), budget, platform)
        times.append(simulation.time)
        if list(weights) == result.notes["weights"]:
            assert simulation.time == result.time
    assert result.time == min(times) < max(times)
    assert list(solve(chain, budget, "autoswap", platform=platform).schedule) == list(result.schedule)


def test_a_short_host_is_kept_to():
    rng = Random(3)
    for _ in range(40):
        chain = random_chain(rng, rng.randint(2, 7), alternatives=True)
        platform = Platform(bandwidth=rng.choice([1, 3]), host_bytes=rng.randint(0, 12))
        least = solve(chain, 0, "autoswap", platform=platform).least_budget or 0
        for budget in (least, least + 2):
            result = solve(chain, budget, "autoswap", platform=platform)
            again = simulate(chain, result.schedule, budget=budget, platform=platform)
            assert again.host_peak_bytes <= platform.host_bytes
