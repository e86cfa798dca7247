"""The integer program of offloading against two searches: over time, and over the referee's schedules."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time as clock
from itertools import product
from random import Random

import pytest

from elbowroom.errors import InputError, InvalidSchedule
from elbowroom.problem import Chain, Platform, Saving, Stage
from elbowroom.schedule import Backward, Forward, Offload, Prefetch, simulate
from elbowroom.solve import METHODS, Options, Status, solve
from elbowroom.solve.offload import offload_milp as method
from elbowroom.solve.offload.offload_program import Program
from exhaustive_offload_int import least_time
from problems import byte_chain, random_chain

NAME = "offload-milp"


def tiny_chain(rng: Random, stages: int, *, alternatives: bool = False) -> Chain:
    """Small whole sizes and times, so that little room makes much of a difference."""

    def way(output: int) -> Saving:
        times = rng.randint(0, 3), rng.randint(0, 4)
        return Saving(*times, output + rng.randint(0, 2), rng.randint(0, 1), rng.randint(0, 2))

    made = []
    for i in range(stages):
        output = rng.randint(0, 2)
        own = way(output)
        others = tuple(way(output) for _ in range(rng.randint(0, 1) if alternatives else 0))
        times = own.forward_time, own.backward_time
        overheads = own.forward_overhead_bytes, own.backward_overhead_bytes
        made.append(Stage(f"s{i}", *times, output, own.saved_bytes, rng.randint(0, 2), *overheads, others))
    return Chain(rng.randint(0, 3), rng.randint(0, 2), tuple(made))


def links(rng: Random, kind: str) -> Platform:
    """Links on which copies of whole sizes take whole times."""
    if kind == "one":
        return Platform(bandwidth=rng.choice([0.5, 1, 1]), seconds_per_copy=rng.choice([0, 0, 1]))
    if kind == "short host":
        return Platform(bandwidth=1, host_bytes=rng.randint(1, 7))
    duplex = rng.choice([None, None, 0])
    return Platform(to_host=1, from_host=rng.choice([0.5, 1]), duplex=duplex, seconds_per_copy=rng.choice([0, 1]))


def cases(seed, count, kind, sizes, *, alternatives=False):
    """Chains with a budget that makes something move, wherever that is possible."""
    rng = Random(seed)
    while count:
        chain, platform = tiny_chain(rng, rng.choice(sizes), alternatives=alternatives), links(rng, kind)
        least = METHODS[NAME].least_budget(chain, Options(platform=platform))
        everything = METHODS["store-all"].least_budget(chain, Options())
        if least < everything:
            count -= 1
            yield chain, rng.randint(least, everything - 1), platform


def known_time(chain, budget, platform):
    return min(found.time for found in method._known(chain, budget, platform))


def compare(drawn):
    """Every case is as fast as the search over time says; returns how many the known schedules are too slow for."""
    gained = 0
    for chain, budget, platform in drawn:
        result = solve(chain, budget, NAME, platform=platform)
        assert result.time == pytest.approx(least_time(chain, budget, platform), rel=1e-6)
        assert result.status is Status.OPTIMAL
        assert result.notes["gap"] == 0
        assert result.notes["bound_time"] == pytest.approx(result.time, rel=1e-5)
        gained += known_time(chain, budget, platform) > result.time * (1 + 1e-6)
    return gained


@pytest.mark.parametrize(("kind", "gained"), [("one", 1), ("short host", 0), ("two", 1)])
def test_it_equals_a_search_over_time(kind, gained):
    assert compare(cases(1, 25, kind, [2, 3, 4])) >= gained


@pytest.mark.parametrize("kind", ["one", "short host", "two"])
def test_it_chooses_ways_and_equals_a_search_over_time(kind):
    assert compare(cases(2, 20, kind, [3], alternatives=True)) >= 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one", "short host", "two"])
@pytest.mark.parametrize("alternatives", [False, True])
def test_it_equals_a_search_over_time_on_hundreds(kind, alternatives):
    gained = compare(cases(3, 250, kind, [2, 3] if alternatives else [3, 4], alternatives=alternatives))
    assert gained >= (1 if kind == "short host" else 10)


def fastest_schedule(chain, budget, platform, values, *, deferred, senseless):
    """The least time that the referee gives any schedule that saves all and may move those values: every place for
    every copy in every order, and with `deferred` every later operation that a copy back may name.

    With `senseless`, values also go and come back between two operations that follow each other.
    """
    n = len(chain)
    computing = [Forward(at, "all") for at in range(1, n + 1)] + [Backward(at) for at in range(n, 0, -1)]

    def grow(written, done, gone, came):
        if done == 2 * n:
            if gone == came:
                yield written
            return
        yield from grow([*written, computing[done]], done + 1, gone, came)
        for k in values:
            name = (k, "all") if k else (1, "input")
            if k not in gone and k <= done <= 2 * n - 1 - k:
                yield from grow([*written, Offload(*name)], done, gone | {k}, came)
            elif k in gone - came and (senseless or k < done <= 2 * n - 1 - k):
                yield from grow([*written, Prefetch(*name)], done, gone, came | {k})

    def with_starts(written):
        choices = [[op] for op in written]
        for index, op in enumerate(written if deferred else []):
            if isinstance(op, Prefetch):
                choices[index] += [Prefetch(op.at, op.what, start=i) for i in range(index + 1, len(written))]
        return product(*choices)

    def time_of(schedule):
        try:
            return simulate(chain, schedule, budget=budget, platform=platform).time
        except InvalidSchedule:
            return float("inf")

    grown = grow([], 0, frozenset(), frozenset())
    return min(time_of(schedule) for written in grown for schedule in with_starts(written))


def compare_with_schedules(drawn, values, *, deferred, senseless):
    for chain, budget, platform in drawn:
        result = solve(chain, budget, NAME, platform=platform)
        least = fastest_schedule(chain, budget, platform, values, deferred=deferred, senseless=senseless)
        assert result.time == pytest.approx(least, rel=1e-9)
        assert result.status is Status.OPTIMAL


@pytest.mark.parametrize("kind", ["one", "short host", "two"])
def test_no_schedule_of_the_referee_is_faster(kind):
    compare_with_schedules(cases(4, 6, kind, [3]), [0, 1], deferred=False, senseless=kind == "one")
    compare_with_schedules(cases(5, 6, kind, [2]), [0, 1], deferred=True, senseless=kind == "one")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one", "short host", "two"])
def test_no_schedule_of_the_referee_is_faster_whatever_copies_name(kind):
    compare_with_schedules(cases(6, 12, kind, [3]), [0, 1], deferred=True, senseless=False)
    compare_with_schedules(cases(7, 6, kind, [3]), [0, 1, 2], deferred=False, senseless=kind == "one")


@pytest.mark.parametrize("kind", ["one", "short host", "two"])
def test_the_referee_follows_every_solution_or_the_earliest(kind):
    """The laziest of the fastest solutions need not be followed; the earliest must."""
    for chain, budget, platform in cases(8, 15, kind, [3, 4, 5]):
        program = Program(chain, budget, platform, known_time(chain, budget, platform))
        fastest = program.fastest(20.0)
        earliest = program.earliest(fastest.time * (1 + 1e-6), 20.0)
        found = method._refereed(chain, earliest, budget, platform)
        assert found.time == pytest.approx(fastest.time, rel=1e-5)
        assert fastest.bound == pytest.approx(fastest.time, rel=1e-5)


def test_directions_that_slow_each_other_down_get_a_schedule_and_a_bound():
    rng = Random(9)
    slower = 0
    for _ in range(15):
        chain = random_chain(rng, rng.randint(3, 5), any_gradients=True)
        platform = Platform(to_host=2.0, from_host=2.0, duplex=0.5)
        alone = Platform(to_host=2.0, from_host=2.0)
        budget = METHODS[NAME].least_budget(chain, Options(platform=platform))
        result, free = (solve(chain, budget, NAME, platform=each) for each in (platform, alone))
        assert result.time >= free.time * (1 - 1e-9)
        assert result.notes["bound_time"] <= result.time
        slower += result.time > free.time
    assert slower


def test_what_a_few_bytes_decide_is_seen():
    """Budgets one byte around those at which another set of values must go; sizes are of real networks."""
    rng = Random(10)
    for _ in range(10):
        chain = byte_chain(rng, 4)
        saved = method._savings(chain)[0]
        platform = Platform(bandwidth=sum(saved.value_bytes) / saved.time)
        need = saved.bytes_without([k for k in range(3) if rng.random() < 0.5])
        results = [
            solve(chain, need + more, NAME, platform=platform)
            for more in (-1, 0, 1)
            if need + more >= saved.least_bytes(platform)
        ]
        times = [result.time for result in results]
        assert times == sorted(times, reverse=True)
        assert all(result.notes["bound_time"] <= result.time for result in results)


def test_time_that_is_short_leaves_a_schedule_and_an_honest_gap(monkeypatch):
    chain = byte_chain(Random(8), 8)
    saved = method._savings(chain)[0]
    platform = Platform(bandwidth=sum(saved.value_bytes) / saved.time)
    budget = (saved.least_bytes(platform) + saved.peak_bytes) // 2
    best = solve(chain, budget, NAME, platform=platform)
    monkeypatch.setattr(method, "SECONDS", 0.01)
    hasty = solve(chain, budget, NAME, platform=platform)
    assert best.status is Status.OPTIMAL
    assert hasty.status is Status.HEURISTIC
    assert hasty.time >= best.time > hasty.notes["bound_time"]
    assert hasty.notes["gap"] == pytest.approx(hasty.time / hasty.notes["bound_time"] - 1, abs=1e-6)


def test_long_chains_are_refused():
    chain = byte_chain(Random(1), method.MOST_STAGES + 1)
    with pytest.raises(InputError, match=r"^stages: \d+ are too many for an integer program"):
        solve(chain, 10**12, NAME, platform=Platform(bandwidth=1.0))


def test_nothing_takes_time():
    stages = tuple(Stage(f"s{i}", 0, 0, 1, 2, 1) for i in range(4))
    result = solve(Chain(1, 1, stages), 8, NAME, platform=Platform(bandwidth=1.0))
    assert result.time > 0
    assert result.status is Status.OPTIMAL
    everything = solve(Chain(1, 1, stages), 100, NAME, platform=Platform(bandwidth=1.0))
    assert (everything.time, everything.notes["gap"], everything.status) == (0, 0, Status.OPTIMAL)


def test_an_interrupt_ends_a_long_solve_at_once(tmp_path):
    """HiGHS would work on this chain until its time is over."""
    chain = byte_chain(Random(14), 14)
    saved = method._savings(chain)[0]
    bandwidth = sum(saved.value_bytes) / saved.time
    budget = (saved.least_bytes(Platform(bandwidth=bandwidth)) * 7 + saved.peak_bytes * 3) // 10
    path = tmp_path / "chain.json"
    path.write_text(json.dumps({**chain.to_json(), "bandwidth": bandwidth, "budget": budget}))
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from elbowroom.solve import linear\n"
    code += "real = linear._milp\n"
    code += "linear._milp = lambda *a, **k: (print('begun', file=sys.stderr, flush=True), real(*a, **k))[1]\n"
    code += "from elbowroom.cli.app import main\n"
    code += f"main(['solve', {str(path)!r}, '--solver', {NAME!r}, '--json'])\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    ) as running:
        assert running.stderr.readline() == "begun\n"
        clock.sleep(0.3)
        interrupted = clock.monotonic()
        running.send_signal(signal.SIGINT)
        out, complaint = running.communicate(timeout=15)
    assert (running.returncode, out, complaint) == (130, "", "")
    assert clock.monotonic() - interrupted < 5
