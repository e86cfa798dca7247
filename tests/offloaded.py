"""Chains and links for tests of offloading, in whole ticks and whole numbers of bytes per tick."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

from elbowroom.problem import Chain, Platform, Stage
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
