"""`offload-dynprog` is the fastest in its own model, in both forms of the idle time around the loss."""

from __future__ import annotations

import math
import time as clock
from random import Random

import pytest

from elbowroom.problem import Chain, Platform, Stage
from elbowroom.schedule import Offload, simulate
from elbowroom.schedule.fluid import comm_time
from elbowroom.solve import METHODS, Options, solve
from elbowroom.solve.offload import prefixes
from elbowroom.solve.offload.limits import SavedChain, bound_time
from elbowroom.solve.offload.prefixes import decide
from elbowroom.solve.offload.ways import leanest
from exhaustive_offload import least_comm_time
from offloaded import random_case, two_partition
from problems import byte_chain

NAMES = ("offload-dynprog", "offload-dynprog-simple")


def no_progress(part):
    assert 0 <= part <= 1


def tight_budget(rng, chain, platform, unit):
    """Between nearly too little and nearly enough for everything."""
    low = leanest(chain, platform).least_bytes(platform) // unit - 1
    high = SavedChain.own(chain).peak_bytes // unit
    return max(0, rng.randint(min(low, high), high)) * unit


def check_optimal(seed, count, *, across_loss=True):
    """Against every set of values and all ways of tiny chains; returns how many fit and how many of them wait."""
    rng = Random(seed)
    fitting = waiting = 0
    for index in range(count):
        alternatives = index % 3 == 0
        chain, platform, rates = random_case(rng, 4 if alternatives else 5, alternatives=alternatives)
        budget = tight_budget(rng, chain, platform, math.lcm(*rates))
        least = least_comm_time(chain, budget, rates, platform.host_bytes, across_loss=across_loss)
        slots = rng.choice([None, 1, 4])  # with few of them, more prefixes are compared
        decisions, exact = decide(chain, budget, platform, slots, across_loss, no_progress)
        assert exact or prefixes.FREE < 100
        if not exact:
            assert decisions is None or decisions.time >= least - 1e-9
            continue
        if decisions is None:
            assert least == math.inf
            continue
        assert decisions.time == pytest.approx(least, rel=1e-12)
        evaluated = comm_time(chain, decisions.values, budget, platform, decisions.ways)
        if across_loss:
            assert evaluated == pytest.approx(least, rel=1e-12)
        else:
            assert evaluated <= least + 1e-9
        fitting += 1
        waiting += least > sum(min(w.forward_time + w.backward_time for w in stage.ways) for stage in chain.stages)
    return fitting, waiting


def test_no_set_of_values_is_faster():
    fitting, waiting = check_optimal(1, 200)
    assert fitting > 100
    assert waiting > 50


def test_what_beats_a_first_pass_is_still_the_fastest(monkeypatch):
    """With room for so few prefixes that the first pass merges them, the second must beat what that has found."""
    monkeypatch.setattr(prefixes, "FREE", 24)
    fitting, waiting = check_optimal(11, 200)
    assert fitting > 100
    assert waiting > 50


def test_no_set_of_values_is_faster_if_no_copy_passes_the_loss():
    fitting, waiting = check_optimal(2, 100, across_loss=False)
    assert fitting > 50
    assert waiting > 25


@pytest.mark.slow
def test_no_set_of_values_is_faster_on_thousands():
    check_optimal(3, 4000)
    check_optimal(4, 1500, across_loss=False)


def test_both_ends_of_the_step_may_pass_the_loss():
    """Each form is right about its own model, so the exact one is never slower, and sometimes faster."""
    rng = Random(5)
    faster = 0
    for _ in range(120):
        chain, platform, rates = random_case(rng, 9)
        budget = tight_budget(rng, chain, platform, math.lcm(*rates))
        both = [decide(chain, budget, platform, None, across, no_progress)[0] for across in (True, False)]
        assert (both[0] is None) == (both[1] is None)
        if both[0] is not None and both[1] is not None:
            assert both[0].time <= both[1].time + 1e-9
            faster += both[0].time < both[1].time - 1e-9
    assert faster > 10


def test_two_seconds_are_enough_if_the_numbers_can_be_halved():
    """001 Theorem 9, against every subset."""
    rng = Random(6)
    halved = []
    for _ in range(60):
        numbers = [rng.randint(1, 12) for _ in range(rng.randint(2, 7))]
        if sum(numbers) % 2:
            numbers[0] += 1
        chain, platform, budget = two_partition(numbers)
        sums = {0}
        for number in numbers:
            sums |= {total + number for total in sums}
        decisions, _ = decide(chain, budget, platform, None, True, no_progress)
        assert decisions is not None
        halved.append(sum(numbers) // 2 in sums)
        assert (decisions.time == pytest.approx(2, rel=1e-12)) == halved[-1]
    assert 10 < sum(halved) < 50


@pytest.mark.parametrize("stages", [18, 45])
def test_what_is_promised_is_true_however_many_slots_there_are(stages):
    """Where prefixes are merged, too, the time is that of the decisions; none of a few slots beats what is exact."""
    rng = Random(stages)
    chain = byte_chain(rng, stages)
    saved = SavedChain.own(chain)
    platform = Platform(
        to_host=sum(saved.value_bytes) / saved.time, from_host=1.3 * sum(saved.value_bytes) / saved.time
    )
    least = saved.least_bytes(platform)
    for part in (0, 2, 5):
        budget = least + (saved.peak_bytes - least) * part // 10
        times = []
        for slots in (1, 20, None):
            decisions, _ = decide(chain, budget, platform, slots, True, no_progress)
            assert decisions is not None
            evaluated = comm_time(chain, decisions.values, budget, platform, decisions.ways)
            assert decisions.time == pytest.approx(evaluated, rel=1e-9)
            assert decisions.time >= bound_time(chain, budget, platform) * (1 - 1e-9)
            times.append(decisions.time)
        assert times[-1] <= min(times) * (1 + 1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_every_budget_and_host_budget_is_kept(name):
    rng = Random(7)
    for index in range(40):
        chain, platform, _ = random_case(rng, 7, alternatives=True)
        if index % 2:
            rate = rng.choice([0.5, 2.0])
            platform = Platform(bandwidth=rate, seconds_per_copy=0.5, host_bytes=platform.host_bytes)
        floor = METHODS[name].least_budget(chain, Options(platform=platform))
        for budget in (floor, floor + 1, floor + 4):
            result = solve(chain, budget, name, platform=platform)
            again = simulate(chain, result.schedule, budget=budget, platform=platform)
            assert again.peak_bytes <= budget
            assert platform.host_bytes is None or again.host_peak_bytes <= platform.host_bytes
            assert result.time >= result.notes["bound_time"] - 1e-9
            if name == "offload-dynprog" and not platform.seconds_per_copy and "model_time" in result.notes:
                assert result.time >= result.notes["model_time"] - 1e-9


def test_what_has_filled_the_host_is_not_as_good():
    """Of values of 3, 1 and 4 bytes no more than 3 may stay and no more than 5 may go. Moving the first instead of
    the second keeps less and is over sooner, and leaves no room on the host for the third."""
    saved = (1, 4, 0, 0)
    stages = tuple(Stage("", 1, 1, 0, size, 0, 0, 20 if at == 3 else 0) for at, size in enumerate(saved))
    decisions, exact = decide(Chain(3, 0, stages), 23, Platform(bandwidth=10, host_bytes=5), 1, True, no_progress)
    assert exact
    assert decisions is not None
    assert decisions.values == (1, 2)


def test_nothing_moves_where_nothing_has_to():
    rng = Random(8)
    for _ in range(20):
        chain, _, _ = random_case(rng, 6)
        for name in NAMES:
            result = solve(chain, SavedChain.own(chain).peak_bytes, name, platform=Platform(bandwidth=1))
            assert not any(isinstance(operation, Offload) for operation in result.schedule)
            assert result.time == SavedChain.own(chain).time


def test_the_model_of_parts_is_never_slower():
    """Theorem 8 bounds what whole values can do: greedy promises at most what the dynamic program does."""
    rng = Random(9)
    for _ in range(60):
        chain, platform, rates = random_case(rng, 8)
        budget = max(
            tight_budget(rng, chain, platform, math.lcm(*rates)), leanest(chain, platform).least_bytes(platform)
        )
        whole, parts = (solve(chain, budget, name, platform=platform) for name in (NAMES[0], "offload-greedy"))
        if "model_time" in parts.notes:
            assert parts.notes["model_time"] <= whole.notes["model_time"] + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_hundred_stages_take_seconds(name):
    chain = byte_chain(Random(10), 100)
    saved = SavedChain.own(chain)
    for rate in (0.5, 1.0):
        platform = Platform(bandwidth=rate * sum(saved.value_bytes) / saved.time)
        least = saved.least_bytes(platform)
        for part in (1, 4):
            started = clock.perf_counter()
            result = solve(chain, least + (saved.peak_bytes - least) * part // 10, name, platform=platform)
            assert clock.perf_counter() - started < 30
            assert result.notes["model_time"] <= 1.05 * result.notes["bound_time"]
