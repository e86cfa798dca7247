"""`checkpoint-sum`: the least sum of all checkpoints and the largest segment (003 Alg. 3, Eq. 6).

This is the older model of checkpointing, in which every checkpoint stays to the end; `model_peak_bytes` is its
objective. Segment sums number O(n²), so it is for chains of up to a few thousand stages.
"""

from __future__ import annotations

from functools import lru_cache
from typing import final

import numpy as np

from elbowroom.errors import InputError
from elbowroom.problem import Chain, Problem
from elbowroom.solve.kernels.checkpoints import checkpoint_sum
from elbowroom.solve.kernels.rows import Ints
from elbowroom.solve.least_peak import found
from elbowroom.solve.method import Found, Method, Options
from elbowroom.solve.segments import Segments

MOST_STAGES = 4000


@final
class CheckpointSum(Method):
    name = "checkpoint-sum"
    kinds = ("chain",)
    summary = "least sum of checkpoints and largest segment, each recomputed once; O(stages³)"
    exact = False
    needs_budget = False

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Chain)
        return Segments(problem).peak(_checkpoints(problem)[0])

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Chain)
        return found(problem, *_checkpoints(problem))


@lru_cache(maxsize=4)
def _checkpoints(chain: Chain) -> tuple[list[int], int]:
    if len(chain) > MOST_STAGES:
        raise InputError("stages", f"{len(chain)} are too many for this cubic method; use 'least-peak'")
    sizes = np.array(chain.output_bytes, dtype=np.int64)
    previous = np.zeros(len(sizes), dtype=np.int64)
    value = int(checkpoint_sum(sizes, _segment_sums(sizes), previous))
    checkpoints, position = [], len(chain)
    while position > 0:
        checkpoints.append(position)
        position = int(previous[position])
    return checkpoints[::-1], value


def _segment_sums(sizes: Ints) -> Ints:
    """Every sum a segment can have, ascending: runs of the sizes between the input and the last."""
    sums = np.concatenate([[0], np.cumsum(sizes[1:-1])])
    runs = sums[None, :] - sums[:, None]
    return np.unique(runs[runs >= 0])
