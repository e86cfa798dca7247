"""`autocapper`: what it moves is what the thesis says, and the rest follows from the referee."""

from __future__ import annotations

from random import Random

from elbowroom.problem import Chain, Platform, Stage
from elbowroom.schedule import Offload, simulate
from elbowroom.solve import METHODS, Options, solve
from elbowroom.solve.offload.autocapper import capped
from elbowroom.solve.offload.limits import SavedChain
from elbowroom.solve.offload.placing import Move, place, save_all
from problems import random_chain


def test_the_lowest_values_move_until_it_fits():
    """Six equal stages that save 10 bytes each: one byte less than the peak moves the input, four move ā_1, too."""
    chain = Chain(3, 1, tuple(Stage(f"s{i}", 1, 1, 1, 10, 1) for i in range(6)))
    computing = save_all(chain)
    peak = SavedChain.own(chain).peak_bytes
    assert capped(chain, computing, peak) == []
    assert capped(chain, computing, peak - 1) == [Move(1, "input", -1, 11)]
    assert capped(chain, computing, peak - 4) == [Move(1, "input", -1, 11), Move(1, "all", 0, 10)]
    assert capped(chain, computing, SavedChain.own(chain).least_bytes(Platform(bandwidth=1)) - 1) is None


def test_capped_schedules_fit():
    """Whatever persistent schedule is made to fit: the referee runs it within the budget."""
    rng = Random(1)
    fitting = 0
    for number in range(150):
        chain = random_chain(rng, rng.randint(2, 8), alternatives=number % 2 == 1)
        plain = solve(chain, METHODS["persistent"].least_budget(chain, Options()) + rng.randint(0, 8), "persistent")
        budget = plain.peak_bytes - rng.randint(0, 4)
        moves = capped(chain, plain.schedule, budget)
        if moves is not None:
            placed = place(chain, plain.schedule, moves, budget, Platform(bandwidth=2))
            assert placed is not None
            assert placed.peak_bytes <= budget
            fitting += len(moves) > 0
    assert fitting > 30


def test_never_slower_than_recomputing_alone_and_often_faster():
    rng = Random(2)
    faster = 0
    for number in range(60):
        chain = random_chain(rng, rng.randint(3, 8), alternatives=number % 2 == 1)
        budget = METHODS["persistent"].least_budget(chain, Options()) + rng.randint(0, 4)
        platform = Platform(bandwidth=4)
        result, plain = solve(chain, budget, "autocapper", platform=platform), solve(chain, budget, "persistent")
        assert simulate(chain, result.schedule, budget=budget, platform=platform).time == result.time
        assert result.time <= plain.time
        faster += result.time < plain.time
        assert result.time == plain.time or any(isinstance(operation, Offload) for operation in result.schedule)
    assert faster > 20
