"""`sequential`: k equal segments, as PyTorch's `checkpoint_sequential` cuts them; the fastest k that fits.

The model's stages are cut into k segments of ⌊L/k⌋, the last one taking what is left and the loss.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import final

from elbowroom.errors import InputError
from elbowroom.problem import Chain, Problem
from elbowroom.solve.method import Found, Method, Options, Status
from elbowroom.solve.segments import Segments, segmented


@final
class Sequential(Method):
    name = "sequential"
    kinds = ("chain",)
    summary = "k equal segments, each recomputed once (checkpoint_sequential); the fastest k if not given"
    exact = False

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Chain)
        return min(peak for peak, _ in _candidates(problem, options.segments).values())

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Chain)
        candidates = _candidates(problem, options.segments)
        time, best = min((time, k) for k, (peak, time) in candidates.items() if peak <= budget)
        ends = equal_segments(len(problem), best)
        return Found(segmented(ends), Status.HEURISTIC, time, {"segments": len(ends)})


def equal_segments(stages: int, k: int) -> list[int]:
    """Where k equal segments of a chain end; the loss, its last stage, joins the last segment."""
    size = max(1, (stages - 1) // k)
    return [*range(size, size * (k - 1) + 1, size), stages]


@lru_cache(maxsize=8)
def _candidates(chain: Chain, k: int | None) -> dict[int, tuple[int, float]]:
    """The peak and the time for each number of segments that is allowed."""
    most = max(1, len(chain) - 1)
    if k is not None and not 1 <= k <= most:
        raise InputError("segments", f"must be between 1 and {most}, the number of stages before the loss")
    prepared = Segments(chain)
    tried = {i: equal_segments(len(chain), i) for i in (_segment_counts(most) if k is None else [k])}
    return {i: (prepared.peak(ends), prepared.time(ends)) for i, ends in tried.items()}


def _segment_counts(most: int) -> list[int]:
    """Every number of segments; on very long chains every one up to 4√L, then ever coarser steps."""
    dense = most if most <= 4096 else 4 * math.isqrt(most)
    counts, k = list(range(1, dense + 1)), dense
    while k < most:
        k = min(most, max(k + 1, k * 21 // 20))
        counts.append(k)
    return counts
