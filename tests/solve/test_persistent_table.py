"""The persistent table against Theorem 6 written down plainly, on chains longer than a tile and with every memory."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest

from elbowroom.problem import Chain
from elbowroom.schedule import simulate
from elbowroom.solve import METHODS, Options, solve
from elbowroom.solve.kernels.persistent import TILE
from elbowroom.solve.persistent import Sweep
from problems import byte_chain, random_chain

INF = float("inf")


def theorem_six(chain: Chain, last_times=None):
    """C(s, t, m) in bytes, recursively: no slots, no tiles, no pruning."""
    a, d = chain.output_bytes, chain.gradient_bytes

    @cache
    def least_time(s: int, t: int, m: int) -> float:
        if m < 0:
            return INF
        best = INF
        for way in chain.stages[s - 1].ways:
            forward = d[t] + way.saved_bytes + way.forward_overhead_bytes
            backward = way.saved_bytes + d[s] + d[s - 1] + way.backward_overhead_bytes
            if m >= max(forward, backward):
                rest = least_time(s + 1, t, m - way.saved_bytes) if t > s else 0
                own = way.forward_time + way.backward_time
                best = min(best, own + rest if t > s or last_times is None else last_times[s - 1])
        passed = 0.0
        for split in range(s, t):
            own_input = a[split - 1] if split > s else 0
            if m < d[t] + own_input + a[split] + chain.stages[split - 1].forward_overhead_bytes:
                break
            passed += chain.stages[split - 1].forward_time
            right = least_time(split + 1, t, m - a[split])
            if right < INF:
                best = min(best, passed + right + least_time(s, split, m))
        return best

    return lambda budget: least_time(1, len(chain), budget - chain.input_bytes)


@pytest.mark.parametrize("stages", [TILE - 1, TILE, TILE + 1, 2 * TILE + 1, 60])
def test_the_table_is_theorem_six(stages):
    rng = Random(stages)
    chain = random_chain(rng, stages, alternatives=True)
    expected = theorem_six(chain)
    floor = METHODS["persistent"].least_budget(chain, Options())
    everything = METHODS["store-all"].least_budget(chain, Options())
    for budget in (floor - 1, floor, floor + 3, floor + 11, (floor + everything) // 4):
        result = solve(chain, budget, "persistent", slots=max(1, budget))
        assert (result.time if result.feasible else INF) == expected(budget)


@pytest.mark.parametrize("stages", [5, TILE + 3])
def test_stages_run_right_before_their_backward_may_take_less(stages):
    rng = Random(stages)
    chain = random_chain(rng, stages, alternatives=True)
    last_times = [min(w.forward_time + w.backward_time for w in s.ways) * rng.random() for s in chain.stages]
    expected = theorem_six(chain, last_times)
    everything = METHODS["store-all"].least_budget(chain, Options())
    sweep = Sweep(chain, everything, slots=everything, last_times=last_times)
    floor = sweep.least_bytes
    for budget in (floor, floor + (everything - floor) // 5, floor + (everything - floor) // 2):
        assert sweep._table.time(budget) == pytest.approx(expected(budget), rel=1e-12)
        assert simulate(chain, sweep.schedule(budget)).peak_bytes <= budget


def test_floating_is_between_persistent_and_nothing_on_longer_chains():
    for seed in range(6):
        chain = random_chain(Random(seed), 30)
        floor = METHODS["persistent"].least_budget(chain, Options())
        for budget in (floor, floor + 4, floor + 15):
            floating, persistent = (solve(chain, budget, name) for name in ("floating", "persistent"))
            without = sum(stage.forward_time + stage.backward_time for stage in chain.stages)
            assert without <= floating.time <= persistent.time


def test_times_that_are_not_whole_choose_the_same_schedule_whatever_their_unit():
    """Scaling all times by a power of two is exact, so it must change nothing else."""
    chain = byte_chain(Random(2), 40)
    budget = METHODS["persistent"].least_budget(chain, Options()) * 2
    scaled = Chain.from_json(chain.to_json())
    for stage in scaled.stages:
        object.__setattr__(stage, "forward_time", stage.forward_time * 1024)
        object.__setattr__(stage, "backward_time", stage.backward_time * 1024)
    for name in ("persistent", "floating", "revolve"):
        ours, theirs = (solve(c, budget, name, slots=200) for c in (chain, scaled))
        assert ours.schedule == theirs.schedule
        assert theirs.time == ours.time * 1024
