"""`autoswap`: values with the highest score go to the host until the peak fits (after AutoSwap, 001 § 3.4.1).

A value ā_k is absent between its last forward reader and the backward that needs it next, if nothing waits. Four
scores say how much its absence is worth, each as a share of the highest of its kind:

- the duration of the absence, less the time of both copies;
- its area, the duration times the value's bytes (a negative duration is divided by them: a small value loses less);
- the duration weighted with the bytes by which memory exceeds the budget meanwhile;
- the same with the memory that is left when the values chosen before are gone: it changes with every choice.

Values are taken by a weighted sum of the scores. AutoSwap searches the weights by chance (Bayesian optimization).
Here they are those of a grid, so the same problem always has the same answer, and the referee says which are best.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import final

import numpy as np
from numpy.typing import NDArray

from elbowroom.problem import Chain, Platform, Problem
from elbowroom.solve.method import Found, Method, Options
from elbowroom.solve.offload.limits import SavedChain
from elbowroom.solve.offload.sets import Trials, least_budget, saved_chains

Weights = tuple[float, float, float, float]
Floats = NDArray[np.float64]

_PARTS = 4  # weights are multiples of a quarter: the four corners, the even mean and what lies between


@final
class AutoSwap(Method):
    name = "autoswap"
    kinds = ("chain",)
    summary = "offloads by a weighted sum of four scores of a value's absence; weights from a grid, the best kept"
    exact = False
    needs_link = True

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Chain)
        return least_budget(problem, options.platform)

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Chain)
        trials = Trials(problem, budget, options.platform)
        chains, grid = saved_chains(problem, options.platform), list(weightings())
        for number, saved in enumerate(chains):
            scores = Scores.of(saved, budget, options.platform)
            for count, weights in enumerate(grid, start=1):
                values = scores.chosen(weights)
                if values is not None:
                    trials.attempt(saved, values, weights=list(weights))
                options.progress((number + count / len(grid)) / len(chains))
        trials.attempt_eager()
        return trials.found()


def weightings() -> Iterator[Weights]:
    """All weights that are multiples of a part and sum to 1."""
    for parts in product(range(_PARTS + 1), repeat=3):
        if sum(parts) <= _PARTS:
            a, b, c = (part / _PARTS for part in parts)
            yield a, b, c, (_PARTS - sum(parts)) / _PARTS


@dataclass(frozen=True)
class Scores:
    """The values that may move, and the step without any move: what memory it takes in each operation, and when."""

    values: list[int]
    sizes: Floats
    absent: NDArray[np.bool_]  # for each value, the operations between its readers
    over: Floats  # for each operation, the bytes above the budget; below it they are negative
    durations: Floats  # of the operations
    copying: Floats  # for each value, the time of both copies

    @classmethod
    def of(cls, saved: SavedChain, budget: int, platform: Platform) -> Scores:
        n, sizes = len(saved.chain), saved.value_bytes
        room = platform.host_bytes
        values = [k for k in range(n - 1) if sizes[k] and (room is None or sizes[k] <= room)]
        before = np.cumsum(sizes[:n])  # what is stored when stage 1..n runs, its input included
        level = np.concatenate([before + saved.forward_bytes, (before + saved.backward_bytes)[::-1]])
        forward = [way.forward_time for way in saved.savings]
        backward = [way.backward_time for way in reversed(saved.savings)]
        operations = np.arange(2 * n)
        absent = np.array([(k < operations) & (operations < 2 * n - k - 1) for k in values], dtype=bool)
        out, back = platform.rate_to_host, platform.rate_from_host
        assert out is not None
        assert back is not None
        moved = np.array([sizes[k] for k in values], dtype=float)
        return cls(
            values,
            moved,
            absent.reshape(len(values), 2 * n),
            (level - budget).astype(float),
            np.array(forward + backward, dtype=float),
            moved / out + moved / back + 2 * platform.seconds_per_copy,
        )

    def chosen(self, weights: Weights) -> list[int] | None:
        """Values by falling score until no operation exceeds the budget; None if it needs all of them and more."""
        duration = self.absent @ self.durations - self.copying
        area = np.where(duration >= 0, duration * self.sizes, duration / self.sizes)
        fixed = sum(
            weight * _share(score)
            for weight, score in zip(weights, (duration, area, self._weighted(self.over)), strict=False)
        )
        over, left = self.over.copy(), np.ones(len(self.values), dtype=bool)
        taken = []
        while (over > 0).any():
            if not left.any():
                return None
            score = fixed + weights[3] * _share(self._weighted(over))
            best = int(np.argmax(np.where(left, score, -np.inf)))
            left[best] = False
            taken.append(self.values[best])
            over[self.absent[best]] -= self.sizes[best]
        return taken

    def _weighted(self, over: Floats) -> Floats:
        """For each value, the duration of its absence weighted with the bytes above the budget."""
        weighted: Floats = self.absent @ (self.durations * np.maximum(over, 0))
        return weighted


def _share(score: Floats) -> Floats:
    """Of the highest score of its kind, by size; a kind in which nothing scores adds nothing."""
    highest = np.abs(score).max(initial=0)
    return score / highest if highest > 0 else np.zeros_like(score)
