"""The evaluator of fluid schedules: against a search tick by tick, the thesis' theorems, and sums done by hand."""

from __future__ import annotations

import math
from itertools import product
from random import Random

import pytest

from elbowroom.errors import InputError
from elbowroom.problem import Chain, Platform, Stage
from elbowroom.schedule.fluid import comm_time, fluid_time, frac_time
from elbowroom.solve.offload.limits import SavedChain, bound_time
from exhaustive_offload import comm_time_of
from offloaded import random_case, two_partition
from problems import byte_chain


def cases(seed, count, longest, **options):
    """Chains with random ways, links, and a budget between nearly too little and nearly enough for everything."""
    rng = Random(seed)
    for _ in range(count):
        chain, platform, rates = random_case(rng, longest, alternatives=True, **options)
        saved = SavedChain(chain, tuple(rng.randrange(len(stage.ways)) for stage in chain.stages))
        unit = math.lcm(*rates)
        low, high = saved.least_bytes(platform) // unit - 1, saved.peak_bytes // unit
        yield rng, saved, platform, rates, max(0, rng.randint(min(low, high), high)) * unit


def check_sets(seed, count):
    finite = waiting = 0
    for _, saved, platform, rates, budget in cases(seed, count, 4):
        n = len(saved.chain)
        for moved in product((False, True), repeat=n):
            values = [value for value in range(n) if moved[value]]
            ours = comm_time(saved.chain, values, budget, platform, saved.ways)
            theirs = comm_time_of(saved.chain, moved, saved.ways, budget, rates, platform.host_bytes)
            assert ours == pytest.approx(theirs, rel=1e-12)
            finite += ours < math.inf
            waiting += saved.time < ours < math.inf
    return finite, waiting


def test_any_set_takes_as_long_as_tick_by_tick():
    finite, waiting = check_sets(1, 60)
    assert finite > 100
    assert waiting > 60


@pytest.mark.slow
def test_any_set_takes_as_long_as_tick_by_tick_on_thousands():
    check_sets(2, 1500)


def test_no_amount_and_no_parts_are_faster_than_what_is_missing():
    """Theorem 8, against every amount and against parts of values in any proportion."""
    feasible = 0
    for rng, saved, platform, _, budget in cases(3, 150, 6):
        chain, ways = saved.chain, saved.ways
        missing = saved.peak_bytes - budget
        best = frac_time(chain, missing, budget, platform, ways)
        sizes = saved.value_bytes[:-1]
        feasible += best < math.inf
        assert best >= bound_time(chain, budget, platform) - 1e-9
        for amount in range(sum(sizes) + 1):
            time = frac_time(chain, amount, budget, platform, ways)
            assert time >= best - 1e-9
            assert amount >= missing or time == math.inf  # Proposition 2
        for _ in range(20):
            parts = [rng.choice([0, size, size * rng.random()]) for size in sizes]
            assert fluid_time(chain, parts, budget, platform, ways) >= best - 1e-9
    assert feasible > 60


def test_the_referee_s_schedules_are_no_faster():
    """What moves whole and is counted whole takes at least what it takes while memory flows."""
    slower = 0
    for rng, saved, platform, _, budget in cases(4, 200, 7):
        values = [value for value in range(len(saved.chain) - 1) if rng.random() < 0.5]
        found = saved.offloading(values, budget, platform)
        time = comm_time(saved.chain, values, budget, platform, saved.ways)
        assert (found is None) == (time == math.inf)
        if found is not None:
            assert found.time >= time - 1e-9
            slower += found.time > time + 1e-9
    assert slower > 5


def test_sets_that_fit_in_two_seconds_split_the_numbers_into_halves():
    """001 Theorem 9; while any part may move, two seconds always suffice."""
    for numbers in ([3, 1, 2, 2], [1, 1, 4, 2], [5, 4, 3, 2, 2]):
        chain, platform, budget = two_partition(numbers)
        half = sum(numbers) // 2
        assert SavedChain.own(chain).peak_bytes == 3 * half
        assert frac_time(chain, half, budget, platform) == 2
        for moved in product((False, True), repeat=len(numbers)):
            values = [value for value, goes in enumerate(moved) if goes]
            total = sum(numbers[value] for value in values)
            time = comm_time(chain, values, budget, platform)
            assert (time == 2) == (total == half)
            assert (time == math.inf) == (total < half)


THREE = Chain(4, 0, tuple(Stage("", 1, 1, 0, 0, 0) for _ in range(3)))


def test_seconds_before_each_copy():
    """Out until 0.75 + 4/2 = 2.75, and as long back until the last backward begins, one second before the end."""
    assert comm_time(THREE, [0], 100, Platform(bandwidth=2)) == 6
    assert comm_time(THREE, [0], 100, Platform(bandwidth=2, seconds_per_copy=0.75)) == 6.5
    assert comm_time(THREE, [0], 100, Platform(to_host=2, from_host=1, seconds_per_copy=0.75)) == 8.5
    assert comm_time(THREE, [], 100, Platform(bandwidth=2, seconds_per_copy=0.75)) == 6


def test_values_that_move_are_on_the_host_together():
    two = Chain(4, 0, (Stage("", 1, 1, 0, 3, 0), *THREE.stages))
    assert comm_time(two, [0, 1], 100, Platform(bandwidth=9, host_bytes=7)) < math.inf
    assert comm_time(two, [0, 1], 100, Platform(bandwidth=9, host_bytes=6)) == math.inf


def test_what_is_missing_or_wrong_is_named():
    link = Platform(bandwidth=1)
    with pytest.raises(InputError, match=r"^bandwidth: missing"):
        comm_time(THREE, [0], 100, Platform())
    with pytest.raises(InputError, match=r"^offloaded: there is no value 3"):
        comm_time(THREE, [3], 100, link)
    with pytest.raises(InputError, match=r"^ways: has 2 entries for 3 stages"):
        comm_time(THREE, [0], 100, link, [0, 0])
    with pytest.raises(InputError, match=r"^moved: "):
        fluid_time(THREE, [5, 0, 0], 100, link)


def test_numbers_of_real_networks():
    """In bytes and seconds: never below the bound, and never faster with a smaller budget."""
    chain = byte_chain(Random(5), 40)
    saved = SavedChain.own(chain)
    platform = Platform(bandwidth=sum(saved.value_bytes) / saved.time)
    least = saved.least_bytes(platform)
    times = []
    for part in range(11):
        budget = least + (saved.peak_bytes - least) * part // 10
        times.append(frac_time(chain, saved.peak_bytes - budget, budget, platform))
        assert bound_time(chain, budget, platform) * (1 - 1e-12) <= times[-1] < math.inf
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(saved.time)
    assert times[0] > times[-1]
