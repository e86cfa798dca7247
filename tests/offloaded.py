"""Chains and links for tests of offloading, in whole ticks and whole numbers of bytes per tick."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from random import Random

from elbowroom.errors import InvalidSchedule
from elbowroom.problem import Chain, Platform, Stage
from elbowroom.schedule import Discard, Forward, Offload, Prefetch, Schedule, Simulation, simulate
from problems import random_chain


def scaled(chain: Chain, bytes_by: int, times_by: int) -> Chain:
    """The same chain in smaller units."""

    def grown(one):
        names = {name for name in one.__dataclass_fields__ if name.endswith(("_bytes", "_time"))}
        factors = {name: bytes_by if name.endswith("_bytes") else times_by for name in names}
        changed = {name: getattr(one, name) * factor for name, factor in factors.items()}
        if isinstance(one, Stage):
            changed["alternatives"] = tuple(map(grown, one.alternatives))
        return replace(one, **changed)

    sizes = chain.input_bytes * bytes_by, chain.input_gradient_bytes * bytes_by
    return Chain(*sizes, tuple(map(grown, chain.stages)))


def random_case(rng: Random, longest: int, *, alternatives: bool = False) -> tuple[Chain, Platform, tuple[int, int]]:
    """A chain, a link whose rates divide all its sizes, sometimes with little room on the host; and the two rates."""
    rates = rng.choice([(1, 1), (1, 1), (2, 2), (1, 2), (2, 1), (3, 3)])
    unit = math.lcm(*rates)
    small = random_chain(rng, rng.randint(1, longest), alternatives=alternatives, any_gradients=True)
    chain = scaled(small, unit, rng.choice([1, 1, 2, 3]))
    host = rng.choice([None, None, unit * rng.randint(0, 14)])
    if rates[0] == rates[1] and host is None:
        return chain, Platform(bandwidth=rates[0]), rates
    return chain, Platform(to_host=rates[0], from_host=rates[1], duplex=rng.choice([0, None]), host_bytes=host), rates


def two_partition(numbers: list[int]) -> tuple[Chain, Platform, int]:
    """001 Theorem 9: a chain, a link and a budget with which a step of 2 seconds splits the numbers into halves."""
    half = sum(numbers) // 2

    def stage(seconds: int, saved: int) -> Stage:
        return Stage("", seconds, seconds, 0, saved, 0)

    saved = [*numbers[1:], 0]
    stages = [*(stage(0, size) for size in saved), stage(1, 0), stage(0, half), stage(0, 0)]
    return Chain(numbers[0], 0, tuple(stages)), Platform(bandwidth=half), 2 * half


def scrambled(rng: Random, chain: Chain, schedule: Schedule, platform: Platform) -> Simulation:
    """A schedule with moves, discards and reruns put in at random places, as the referee ran it, in as little memory
    as it runs in. The last stage runs once."""
    for _ in range(30):
        tried, at, what = list(schedule), rng.randint(1, len(chain)), rng.choice(["all", "input"])
        first, second = sorted(rng.randint(0, len(tried)) for _ in range(2))
        if rng.random() < 0.1 and at < len(chain):
            tried.insert(second, Discard(at, what))
            tried.insert(first, Forward(at, rng.choice(["all", "input", "nothing"])))
        else:
            start = rng.choice([None, second + rng.randint(2, 4)])
            tried.insert(second, Prefetch(at, what, rng.random() < 0.3, start))
            tried.insert(first, Offload(at, what))
        with suppress(InvalidSchedule):
            simulate(chain, tried, platform=platform)
            schedule = tried
    found = simulate(chain, schedule, platform=platform)
    with suppress(InvalidSchedule):
        while True:
            found = simulate(chain, schedule, budget=found.peak_bytes - 1, platform=platform)
    return found
