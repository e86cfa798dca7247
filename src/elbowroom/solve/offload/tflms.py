"""`tflms`: a number of tensors goes to the host, and each comes back some layers ahead (after TFLMS, 001 § 3.4.1).

TFLMS rewrites a graph before it runs: the first so many values are copied out when they are made, and each copy back
begins a fixed number of layers before it is read. It knows neither times nor the memory there is, so nothing in its
schedule waits for room: a backward waits for the value that it reads, and that is all. What a schedule takes is
therefore one number, its peak without any budget, and a budget allows those whose peak is no larger. The fastest of
them is taken. The least budget is the least of these peaks; it is above that of methods that wait.

All numbers of tensors and of layers are tried on chains of up to `_TRIED` stages, and as many of each, evenly spread,
on longer ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import final

from elbowroom.errors import InvalidSchedule
from elbowroom.problem import Chain, Platform, Problem
from elbowroom.schedule import Offload, Operation, Prefetch, simulate
from elbowroom.solve.method import Found, Method, Options, Status
from elbowroom.solve.offload.limits import SavedChain, bound_time
from elbowroom.solve.offload.placing import Move, ordered_moves, save_all
from elbowroom.solve.offload.sets import saved_chains

_TRIED = 24  # of either number: the pairs of a long chain then take a few seconds


@final
class Tflms(Method):
    name = "tflms"
    kinds = ("chain",)
    summary = "offloads the first values, each back some layers ahead; never waits for room; best of both numbers"
    exact = False
    needs_link = True

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Chain)
        return min(each.peak_bytes for each in candidates(problem, options.platform))

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Chain)
        fitting = [each for each in candidates(problem, options.platform) if each.peak_bytes <= budget]
        best = min(fitting, key=lambda each: (each.time, each.tensors, each.peak_bytes))
        bound = bound_time(problem, budget, options.platform)
        notes = {"bound_time": bound, "tensors": best.tensors, "layers_ahead": best.layers_ahead}
        status = Status.OPTIMAL if best.time <= bound * (1 + 1e-12) else Status.HEURISTIC
        return Found(written(best.saved, best.tensors, best.layers_ahead), status, best.time, notes)


@dataclass(frozen=True)
class Candidate:
    """Two numbers, ways of saving, and what the referee measured without a budget."""

    saved: SavedChain
    tensors: int
    layers_ahead: int
    time: float
    peak_bytes: int


@lru_cache(maxsize=8)
def candidates(chain: Chain, platform: Platform) -> tuple[Candidate, ...]:
    """All that is tried; what finds no room on the host is left out."""
    found = []
    for saved in saved_chains(chain, platform):
        for tensors in _spread(_movable(saved)):
            for ahead in _spread(len(chain) - 1) if tensors else (0,):
                try:
                    simulation = simulate(chain, written(saved, tensors, ahead), platform=platform)
                except InvalidSchedule:
                    continue
                found.append(Candidate(saved, tensors, ahead, float(simulation.time), simulation.peak_bytes))
    return tuple(found)


def written(saved: SavedChain, tensors: int, layers_ahead: int) -> tuple[Operation, ...]:
    """The schedule: a copy back is asked for so many backwards before the one that reads it, or before the first."""
    n = len(saved.chain)
    values = [k for k in range(n - 1) if saved.value_bytes[k]][:tensors]
    moves = sorted(ordered_moves(saved.chain, values), key=lambda move: move.before)
    out: dict[int, list[Move]] = {}
    back: dict[int, list[Move]] = {}
    for move in moves:
        out.setdefault(move.after, []).append(move)
        back.setdefault(max(n, move.before - layers_ahead), []).append(move)
    operations: list[Operation] = [Offload(move.at, move.what) for move in out.get(-1, [])]
    for index, operation in enumerate(save_all(saved.chain, saved.ways)):
        operations += [Prefetch(move.at, move.what) for move in back.get(index, [])]
        operations.append(operation)
        operations += [Offload(move.at, move.what) for move in out.get(index, [])]
    return tuple(operations)


def _movable(saved: SavedChain) -> int:
    return sum(size > 0 for size in saved.value_bytes[: len(saved.chain) - 1])


def _spread(most: int) -> Iterator[int]:
    """0 to `most`, or at most so many of these numbers as are tried, evenly spread and with both ends."""
    if most < _TRIED:
        yield from range(most + 1)
    else:
        yield from sorted({most * i // (_TRIED - 1) for i in range(_TRIED)})
