"""`least-peak`: the checkpoints with the lowest peak in PyTorch's memory behaviour, in linear time (003 Alg. 6).

The objective is 003's Eq. 12 over the activations' sizes, reported as `model_peak_bytes`; `peak_bytes` is what the
referee measures for the schedule those checkpoints give, with saved sets, gradients and overheads as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import final

import numpy as np

from elbowroom.problem import Chain, Problem
from elbowroom.solve.kernels.checkpoints import dynamic_linear
from elbowroom.solve.kernels.rows import Ints
from elbowroom.solve.method import Found, Method, Options, Status
from elbowroom.solve.segments import Segments, segmented


@final
class LeastPeak(Method):
    name = "least-peak"
    kinds = ("chain",)
    summary = "checkpoints with the lowest peak, each segment recomputed once; O(stages)"
    exact = False
    needs_budget = False

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Chain)
        return Segments(problem).peak(dynamic_checkpoints(problem, dynamic_linear)[0])

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Chain)
        return found(problem, *dynamic_checkpoints(problem, dynamic_linear))


@lru_cache(maxsize=4)
def dynamic_checkpoints(chain: Chain, kernel: Callable[[Ints, Ints], int]) -> tuple[list[int], int]:
    """The chosen checkpoints, the last stage included and the input not, and their peak by Eq. 12."""
    sizes = np.array(chain.output_bytes, dtype=np.int64)
    following = np.zeros(len(sizes), dtype=np.int64)
    peak = int(kernel(sizes, following))
    checkpoints, position = [], 0
    while position < len(chain):
        position = int(following[position])
        checkpoints.append(position)
    return checkpoints, peak


def found(chain: Chain, checkpoints: list[int], model_peak: int) -> Found:
    notes = {"checkpoints": checkpoints, "model_peak_bytes": model_peak}
    return Found(segmented(checkpoints), Status.LEAST_PEAK, Segments(chain).time(checkpoints), notes)
