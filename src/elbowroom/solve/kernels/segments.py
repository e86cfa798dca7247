"""The peak of a schedule made of segments, without running it."""

from __future__ import annotations

from elbowroom.solve.kernels.compiling import compiled
from elbowroom.solve.kernels.rows import Ints


@compiled
def segmented_peak(ends: Ints, output: Ints, gradient: Ints, saved: Ints, over_f: Ints, over_b: Ints) -> int:
    """What the referee measures when segments end at these stages, ascending, the last being the chain's end."""
    n = len(output) - 1
    peak = 0
    held = output[0]  # inputs of the segments so far
    start = 1
    for i in range(len(ends) - 1):  # the forward pass, without saving
        for stage in range(start, ends[i] + 1):
            own_input = output[stage - 1] if stage > start else 0
            peak = max(peak, held + own_input + output[stage] + over_f[stage] + gradient[n])
        held += output[ends[i]]
        start = ends[i] + 1
    for i in range(len(ends) - 1, -1, -1):  # each segment: save all, then backward
        start = ends[i - 1] + 1 if i > 0 else 1
        inside = 0
        for stage in range(start, ends[i] + 1):
            inside += saved[stage]
            peak = max(peak, held + inside + over_f[stage] + gradient[ends[i]])
        for stage in range(ends[i], start - 1, -1):
            peak = max(peak, held + inside + gradient[stage] + gradient[stage - 1] + over_b[stage])
            inside -= saved[stage]
        held -= output[start - 1]
    return peak
