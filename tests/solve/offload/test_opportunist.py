"""`opportunist`: which stages save, which are passed, and that the referee runs it."""

from __future__ import annotations

from random import Random

import pytest

from elbowroom.problem import Chain, Platform, Stage
from elbowroom.schedule import Backward, Forward, simulate
from elbowroom.solve import METHODS, Options, solve
from elbowroom.solve.offload.opportunist import opportune
from elbowroom.solve.offload.placing import place
from problems import random_chain


def equal_stages(count):
    return Chain(2, 1, tuple(Stage(f"s{i}", 1, 1, 2, 10, 1) for i in range(count)))


def test_the_link_is_kept_busy():
    """At 6 bytes in a second, the 12 bytes of stage 1 leave during two forwards, which are recomputed later."""
    chain, options = equal_stages(8), Options(platform=Platform(bandwidth=6))
    found = opportune(chain, 40, options)
    assert found is not None
    forwards = found.computing[: found.computing.index(Forward(8, "all"))]
    saving = [operation.at for operation in forwards if operation.save == "all"]
    assert saving == [1, 4, 6, 7]  # from stage 6 on, all that is left fits
    assert [operation.at for operation in forwards if operation.save != "all"] == [2, 3, 5]
    assert [(move.at, move.what) for move in found.moves] == [(4, "all"), (4, "input"), (1, "all"), (1, "input")]
    recomputed = found.computing[found.computing.index(Backward(4)) + 1 :]
    assert recomputed[-1] == Backward(1)
    placed = place(chain, found.computing, found.moves, 40, options.platform)
    assert placed is not None


def test_a_chain_that_fits_moves_nothing():
    whole = opportune(equal_stages(8), 200, Options(platform=Platform(bandwidth=1)))
    assert whole is not None
    assert whole.moves == ()
    assert len(whole.computing) == 16


@pytest.mark.parametrize("alternatives", [False, True])
def test_the_referee_lets_it_run(alternatives):
    rng = Random(1)
    own = 0
    for _ in range(80):
        chain = random_chain(rng, rng.randint(2, 9), alternatives=alternatives)
        platform = Platform(bandwidth=rng.choice([1, 3]), host_bytes=rng.choice([None, 15]))
        budget = METHODS["opportunist"].least_budget(chain, Options(platform=platform)) + rng.randint(0, 12)
        result = solve(chain, budget, "opportunist", platform=platform)
        again = simulate(chain, result.schedule, budget=budget, platform=platform)
        assert again.time == result.time
        assert again.peak_bytes <= budget
        assert platform.host_bytes is None or again.host_peak_bytes <= platform.host_bytes
        own += again.host_peak_bytes > 0
    assert own > 20
