"""In which ways stages may save if values are to be offloaded: a few choices for a whole chain worth comparing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from elbowroom.problem import Chain, Platform, Saving
from elbowroom.solve.offload.limits import SavedChain


def leanest(chain: Chain, platform: Platform) -> SavedChain:
    """The chain saved so that offloading needs the least budget; of equals the fastest.

    Where the host has room for everything, no other ways need less. Otherwise this is the best of a few.
    """
    choices = [SavedChain(chain, _narrowest(chain)), *priced(chain)]
    return min(choices, key=lambda saved: (saved.least_bytes(platform), saved.time))


def fastest(chain: Chain) -> SavedChain:
    """The chain saved in the ways that take the least time; of equals in those that save least."""
    return SavedChain(chain, _cheapest(chain, 0.0))


def priced(chain: Chain) -> Iterator[SavedChain]:
    """The stages' own ways; and for every price of a saved byte, the ways that make time and price least."""
    prices = {price for stage in chain.stages for price in _changes(stage.ways)}
    changes = [0.0, *sorted(prices)]  # between two of these, no stage changes its way
    between = [0.0, *((low + high) / 2 for low, high in pairwise(changes)), 2 * changes[-1]]
    own = (0,) * len(chain)
    choices = dict.fromkeys((own, *(_cheapest(chain, price) for price in between)))
    return (SavedChain(chain, ways) for ways in choices)


def _time(way: Saving) -> float:
    return way.forward_time + way.backward_time


def _changes(ways: Sequence[Saving]) -> Iterator[float]:
    """The prices of a byte at which another way becomes the best of a stage, from the fastest way on."""
    best = min(ways, key=lambda way: (_time(way), way.saved_bytes))
    while smaller := [way for way in ways if way.saved_bytes < best.saved_bytes]:
        rises = [(_time(way) - _time(best)) / (best.saved_bytes - way.saved_bytes) for way in smaller]
        yield min(rises)
        best = min(zip(rises, smaller, strict=True), key=lambda each: (each[0], each[1].saved_bytes))[1]


def _cheapest(chain: Chain, price: float) -> tuple[int, ...]:
    """Each stage's way of the least time and price; of equals the one that saves least."""
    return tuple(
        min(
            range(len(stage.ways)),
            key=lambda way: (_time(ways[way]) + price * ways[way].saved_bytes, ways[way].saved_bytes),
        )
        for stage in chain.stages
        for ways in [stage.ways]
    )


def _narrowest(chain: Chain) -> tuple[int, ...]:
    """The fastest ways in which the largest need of any stage, with the value it reads, is as small as it can be."""
    needs = _needs(chain)
    least = [0.0]  # the largest need up to a stage, by the way in which that saves
    for into in needs:
        least = [min(max(so_far, need) for so_far, need in zip(least, row, strict=True)) for row in into]
    limit = min(least)
    paths: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for stage, into in zip(chain.stages, needs, strict=True):
        paths = [
            min(
                (time + _time(stage.ways[way]), (*ways, way)) if need <= limit else (math.inf, ())
                for (time, ways), need in zip(paths, row, strict=True)
            )
            for way, row in enumerate(into)
        ]
    return min(paths)[1]


def _needs(chain: Chain) -> list[list[list[int]]]:
    """Bytes that each stage's operations need with what they read, by its way and by that of the stage before."""
    needs = []
    read = [chain.input_bytes]
    for at, stage in enumerate(chain.stages, start=1):
        own = [max(operation_bytes(chain, at, way)) for way in range(len(stage.ways))]
        needs.append([[size + mine for size in read] for mine in own])
        read = [way.saved_bytes for way in stage.ways]
    return needs


def operation_bytes(chain: Chain, at: int, way: int) -> tuple[int, int]:
    """What a stage's forward and its backward need beside the values before the stage (𝓜_F and 𝓜_B, `limits.py`)."""
    saving, gradient = chain.stages[at - 1].ways[way], chain.gradient_bytes
    return (
        saving.saved_bytes + saving.forward_overhead_bytes + gradient[-1],
        saving.saved_bytes + saving.backward_overhead_bytes + gradient[at] + gradient[at - 1],
    )
