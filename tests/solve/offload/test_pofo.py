"""`pofo`: its tables against an exhaustive search of its class, and against `persistent` where the link is slow."""

from __future__ import annotations

import inspect
import math
import os
import signal
import sys
import time as clock
from random import Random

import pytest

from elbowroom.errors import InputError
from elbowroom.problem import Chain, Platform, Stage
from elbowroom.schedule import simulate
from elbowroom.solve import METHODS, Options, solve
from elbowroom.solve.offload.leanest import Leanest
from elbowroom.solve.offload.placing import place
from elbowroom.solve.offload.pofo_reading import readings
from elbowroom.solve.offload.pofo_table import Table
from exhaustive_pofo import best_time
from problems import byte_chain, random_chain

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
    for number in range(40):
        chain = random_chain(rng, rng.randint(1, 9), alternatives=number % 2 == 1)
        least = METHODS["persistent"].least_budget(chain, Options())
        for budget in (least, least + rng.randint(1, 6), least + rng.randint(7, 20)):
            if budget > 0:
                assert promised(chain, budget, platform) == solve(chain, budget, "persistent").time
                assert solve(chain, budget, "pofo", platform=platform).time == solve(chain, budget, "persistent").time


def test_the_referee_lets_it_run_on_any_link():
    """Two directions, a latency, a host short of room: within both budgets, never slower than `persistent`."""
    rng = Random(5)
    moved = 0
    for _ in range(60):
        chain = random_chain(rng, rng.randint(2, 8), alternatives=True)
        platform = rng.choice(
            [
                Platform(bandwidth=rng.choice([0.5, 2, 5])),
                Platform(to_host=2, from_host=1, duplex=1),
                Platform(bandwidth=2, seconds_per_copy=0.5, host_bytes=rng.randint(0, 20)),
            ]
        )
        least = METHODS["pofo"].least_budget(chain, Options(platform=platform))
        budget = least + rng.randint(0, 15)
        result = solve(chain, budget, "pofo", platform=platform)
        again = simulate(chain, result.schedule, budget=budget, platform=platform)
        assert again.time == result.time >= result.notes["bound_time"]
        assert again.peak_bytes <= budget
        assert platform.host_bytes is None or again.host_peak_bytes <= platform.host_bytes
        moved += again.host_peak_bytes > 0
        if budget >= METHODS["persistent"].least_budget(chain, Options()):
            assert result.time <= solve(chain, budget, "persistent").time
    assert moved > 20


def test_the_least_budget_is_met_and_moves_only_if_it_must():
    rng = Random(6)
    platform = Platform(bandwidth=1)
    for number in range(60):
        chain = random_chain(rng, rng.randint(1, 7), alternatives=number % 2 == 1)
        lean = Leanest(chain)
        least, recomputing = lean.least_bytes(platform), METHODS["persistent"].least_budget(chain, Options())
        assert least <= recomputing == lean.least_bytes(Platform(bandwidth=1, host_bytes=0))
        result = solve(chain, least, "pofo", platform=platform)
        assert result.peak_bytes == least
        assert not solve(chain, least - 1, "pofo", platform=platform).feasible if least else True
        leanest = lean.schedule(platform)
        placed = place(chain, leanest.computing, leanest.moves, least, platform)
        assert placed is not None
        assert placed.peak_bytes == least


def test_more_levels_than_bytes_and_few_levels_both_fit():
    chain = byte_chain(Random(8), 10)
    platform = Platform(bandwidth=3e9)
    least = METHODS["pofo"].least_budget(chain, Options(platform=platform))
    for slots in (1, 2, 7, 30):
        for budget in (least, least * 5 // 4):
            assert solve(chain, budget, "pofo", slots=slots, platform=platform).peak_bytes <= budget
    small = random_chain(Random(9), 5)
    least = METHODS["pofo"].least_budget(small, Options(platform=platform))
    assert solve(small, least, "pofo", slots=10**9, platform=platform).feasible


def test_what_no_table_can_hold_is_refused():
    stages = tuple(Stage(f"s{i}", 1, 1, 3, 7, 3) for i in range(5000))
    with pytest.raises(InputError, match=r"^stages: 5000 are too many"):
        solve(Chain(1, 1, stages), 1000, "pofo", platform=Platform(bandwidth=1))
    chain = byte_chain(Random(10), 20)
    with pytest.raises(InputError, match=r"^slots: 1000 for 20 stages need a table of"):
        solve(chain, 10**9, "pofo", slots=1000, platform=Platform(bandwidth=1e9))


def test_recomputation_may_nest_deeper_than_python_calls_may():
    """Where nothing can move and little fits, every stage is recomputed in the stretch before the one after it."""
    chain = Chain(1, 1, tuple(Stage(f"s{i}", 1, 1, 10, 60, 1) for i in range(90)))
    platform = Platform(bandwidth=1, host_bytes=0)
    least = METHODS["pofo"].least_budget(chain, Options(platform=platform))
    table = Table(Leanest(chain), least, Options(10, platform=platform))
    once = next(readings(table, breadth=1))[0]  # whatever is to be compiled has been compiled
    assert len(once.moving.computing) > 90 * 90 / 2
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 60)
    try:
        again = next(readings(table, breadth=1))[0]
    finally:
        sys.setrecursionlimit(limit)
    assert again == once


def test_an_interrupt_ends_it_at_once():
    chain, when = byte_chain(Random(11), 60), []

    def interrupt(part):
        if not when:
            when.append(clock.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    budget = METHODS["persistent"].least_budget(chain, Options()) * 2
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            solve(chain, budget, "pofo", slots=60, platform=Platform(bandwidth=1e9), progress=interrupt)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert clock.monotonic() - when[0] < 2
