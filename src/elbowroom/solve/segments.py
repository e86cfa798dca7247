"""Schedules made of segments: keep the input of each, recompute the segment when its backward comes.

`sequential`, `sqrt` and the least-peak methods all choose where segments end; what is run is the same. The last
segment is saved as it is first run, because its backward follows at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from elbowroom.problem import Chain
from elbowroom.schedule import Backward, Forward, Operation
from elbowroom.schedule.simulation import total
from elbowroom.solve.kernels.segments import segmented_peak


def segmented(ends: Sequence[int]) -> tuple[Operation, ...]:
    """The schedule whose segments end at these stages, ascending, the last one being the chain's end."""
    return tuple(_operations(ends))


def _operations(ends: Sequence[int]) -> Iterator[Operation]:
    starts = [1, *(end + 1 for end in ends[:-1])]
    spans = list(zip(starts, ends, strict=True))
    for start, end in spans[:-1]:
        yield Forward(start, "input")
        for stage in range(start + 1, end + 1):
            yield Forward(stage, "nothing")
    for start, end in reversed(spans):
        for stage in range(start, end + 1):
            yield Forward(stage, "all")
        for stage in range(end, start - 1, -1):
            yield Backward(stage)


class Segments:
    """A chain prepared for measuring many segmentations."""

    def __init__(self, chain: Chain) -> None:
        stages = chain.stages
        self._output = np.array(chain.output_bytes, dtype=np.int64)
        self._gradient = np.array(chain.gradient_bytes, dtype=np.int64)
        self._saved = np.array([0, *(s.saved_bytes for s in stages)], dtype=np.int64)
        self._over_f = np.array([0, *(s.forward_overhead_bytes for s in stages)], dtype=np.int64)
        self._over_b = np.array([0, *(s.backward_overhead_bytes for s in stages)], dtype=np.int64)
        self._once = total(t for s in stages for t in (s.forward_time, s.backward_time))
        self._elapsed = [0, *accumulate(s.forward_time for s in stages)]

    def time(self, ends: Sequence[int]) -> float:
        """Everything once, and the forwards of all but the last segment twice."""
        return self._once + self._elapsed[ends[-2] if len(ends) > 1 else 0]

    def peak(self, ends: Sequence[int]) -> int:
        """What the referee would measure, without running it."""
        return int(
            segmented_peak(
                np.array(ends, dtype=np.int64),
                self._output,
                self._gradient,
                self._saved,
                self._over_f,
                self._over_b,
            )
        )
