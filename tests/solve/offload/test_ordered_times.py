"""Times of many choices at once, against the referee: never too long, and mostly exact."""

from __future__ import annotations

from random import Random

import numpy as np

from elbowroom.problem import Platform
from elbowroom.solve.offload.limits import SavedChain
from elbowroom.solve.offload.ordered_times import OrderedTimes
from problems import byte_chain, random_chain


def random_platform(rng: Random) -> Platform:
    waits, room = rng.choice([0, 0.5]), rng.choice([None, rng.randint(4, 20)])
    if rng.random() < 0.4:
        return Platform(bandwidth=rng.choice([0.5, 1, 2]), seconds_per_copy=waits, host_bytes=room)
    duplex = rng.choice([None, 0, 1])
    return Platform(to_host=rng.choice([1, 3]), from_host=2, duplex=duplex, seconds_per_copy=waits, host_bytes=room)


def random_rows(rng: Random, chain, rows: int):
    ways = np.array([[rng.randrange(len(stage.ways)) for stage in chain.stages] for _ in range(rows)])
    moved = np.array([[k < len(chain) - 1 and rng.random() < 0.5 for k in range(len(chain))] for _ in range(rows)])
    return ways, moved


def graded(chain, ways, moved, budget, platform) -> list[tuple[float, float]]:
    """What is reckoned and what the referee measures, infinite where nothing fits."""
    pairs = []
    times = OrderedTimes(chain, budget, platform).times(ways, moved)
    for time, way, moves in zip(times, ways, moved, strict=True):
        saved = SavedChain(chain, tuple(way.tolist()))
        found = saved.offloading(np.flatnonzero(moves).tolist(), budget, platform)
        pairs.append((float(time), float("inf") if found is None else float(found.time)))
    return pairs


def test_no_schedule_is_faster_and_what_does_not_fit_is_infinite():
    rng = Random(1)
    equal = total = 0
    for _ in range(120):
        chain = random_chain(rng, rng.randint(1, 7), alternatives=True, any_gradients=True)
        platform = random_platform(rng)
        low, high = SavedChain.own(chain).least_bytes(platform), SavedChain.own(chain).peak_bytes
        budget = rng.randint(min(low, high), high)
        for reckoned, measured in graded(chain, *random_rows(rng, chain, 6), budget, platform):
            assert (reckoned == float("inf")) == (measured == float("inf"))
            if measured < float("inf"):
                assert reckoned <= measured * (1 + 1e-9)
                equal += reckoned >= measured * (1 - 1e-9)
                total += 1
    assert equal >= 0.8 * total


def test_on_chains_like_networks_it_is_mostly_exact_and_never_far_off():
    rng = Random(2)
    equal = total = 0
    for _ in range(8):
        chain = byte_chain(rng, 16)
        saved = SavedChain.own(chain)
        platform = Platform(bandwidth=sum(saved.value_bytes) / saved.time)
        budget = (saved.least_bytes(platform) + saved.peak_bytes) // 2
        for reckoned, measured in graded(chain, *random_rows(rng, chain, 6), budget, platform):
            if measured < float("inf"):
                assert 0.95 * measured <= reckoned <= measured * (1 + 1e-9)
                equal += reckoned >= measured * (1 - 1e-9)
                total += 1
    assert total > 20
    assert equal >= 0.8 * total


def test_rows_do_not_see_each_other():
    rng = Random(3)
    chain = random_chain(rng, 6, alternatives=True)
    budget, platform = SavedChain.own(chain).peak_bytes - 3, Platform(bandwidth=1)
    ways, moved = random_rows(rng, chain, 30)
    ordered = OrderedTimes(chain, budget, platform)
    together = ordered.times(ways, moved)
    alone = [ordered.times(ways[i : i + 1], moved[i : i + 1])[0] for i in range(30)]
    assert list(together) == alone
