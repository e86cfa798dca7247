"""A chain as arrays, in bytes and in slots: what every chain kernel reads.

Stages count from 1; position 0 of per-activation arrays is the chain's input. The ways of stage s to save are
numbered first_way[s] to first_way[s + 1] − 1 across the whole chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from elbowroom.problem import Chain
from elbowroom.solve.kernels.compiling import compiled
from elbowroom.solve.kernels.rows import Floats, Ints, slots_of


class Costs(NamedTuple):
    unit: int  # bytes in a slot
    output: Ints  # aℓ, ℓ = 0..n
    output_slots: Ints
    gradient: Ints  # δℓ, ℓ = 0..n
    overhead: Ints  # of a forward that does not save all
    forward_time: Floats
    elapsed: Floats  # time of forwards 1..ℓ
    first_way: Ints
    saved: Ints  # per way
    over_f: Ints
    over_b: Ints
    way_time: Floats  # forward and backward together
    last_time: Floats  # per way: the same when the backward follows at once and nobody wants the output


def costs_of(chain: Chain, unit: int, last_times: Sequence[float] | None = None) -> Costs:
    """The chain's numbers; sizes round up to whole slots, so what fits in slots fits in bytes.

    `last_times` has for each stage what it takes to run it and at once its backward, if that is less than both.
    """
    stages = chain.stages
    ways = [stage.ways for stage in stages]
    flat = [way for stage_ways in ways for way in stage_ways]
    output = np.array(chain.output_bytes, dtype=np.int64)
    forward_time = np.array([0, *(stage.forward_time for stage in stages)], dtype=np.float64)
    way_time = np.array([way.forward_time + way.backward_time for way in flat], dtype=np.float64)
    return Costs(
        unit=unit,
        output=output,
        output_slots=-(-output // unit),
        gradient=np.array(chain.gradient_bytes, dtype=np.int64),
        overhead=np.array([0, *(stage.forward_overhead_bytes for stage in stages)], dtype=np.int64),
        forward_time=forward_time,
        elapsed=np.cumsum(forward_time),
        first_way=np.cumsum([0, 0, *map(len, ways)], dtype=np.int64),
        saved=np.array([way.saved_bytes for way in flat], dtype=np.int64),
        over_f=np.array([way.forward_overhead_bytes for way in flat], dtype=np.int64),
        over_b=np.array([way.backward_overhead_bytes for way in flat], dtype=np.int64),
        way_time=way_time,
        last_time=way_time if last_times is None else np.repeat(np.float64(last_times), [len(w) for w in ways]),
    )


def ways_of(costs: Costs, s: int) -> range:
    """The numbers of stage s's ways to save."""
    return range(int(costs.first_way[s]), int(costs.first_way[s + 1]))


@compiled
def need_all(costs: Costs, way: int, s: int, t: int) -> int:
    """Bytes, besides stage s's input, to run forward s saving all under gradient t, and later backward s."""
    forward = costs.gradient[t] + costs.saved[way] + costs.over_f[way]
    backward = costs.saved[way] + costs.gradient[s] + costs.gradient[s - 1] + costs.over_b[way]
    return max(forward, backward)


@compiled
def need_step(costs: Costs, s: int, t: int) -> int:
    """Bytes, besides stage s's input, to run forward s without saving all, under gradient t."""
    return costs.gradient[t] + costs.output[s] + costs.overhead[s]


@compiled
def slots_up(costs: Costs, size: int) -> int:
    return slots_of(size, costs.unit)
