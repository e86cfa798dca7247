"""Unequal chains that meet at the loss: against every nested schedule, every schedule, joins, and single chains."""

from __future__ import annotations

from random import Random

import pytest

from elbowroom.errors import InputError
from elbowroom.problem import Chain, Stage, Step, Tower, Towers, problem_from_json
from elbowroom.schedule import simulate
from elbowroom.solve import METHODS, Options, Status, solve
from exhaustive import least_time_towers, nested_schedules
from problems import random_join, random_towers, towers_like


def least(problem):
    return METHODS["towers"].least_budget(problem, Options())


def small(rng: Random, most_steps: int = 5):
    while True:
        problem = random_towers(rng, rng.choice([1, 2, 2, 3]), 3)
        if sum(map(len, problem.towers)) <= most_steps:
            return problem


def test_it_is_the_fastest_nested_schedule():
    rng = Random(11)
    for _ in range(60):
        problem = small(rng)
        runs = [simulate(problem, schedule) for schedule in nested_schedules(problem)]
        floor = min(run.peak_bytes for run in runs)
        assert least(problem) == floor
        for budget in range(floor, floor + 12, 3):
            result = solve(problem, budget, "towers")
            assert result.status is Status.OPTIMAL
            assert result.time == min(run.time for run in runs if run.peak_bytes <= budget)


def test_hardly_any_schedule_of_another_form_is_faster():
    rng, slower, cells = Random(12), 0, 0
    for _ in range(60):
        problem = small(rng)
        floor = least(problem)
        assert least_time_towers(problem, floor - 1) == float("inf")
        for budget in range(floor, floor + 12, 3):
            ours, best = solve(problem, budget, "towers").time, least_time_towers(problem, budget)
            assert ours >= best
            slower, cells = slower + (ours > best), cells + 1
    assert slower <= 0.01 * cells


def test_equal_steps_are_a_join():
    rng = Random(13)
    for _ in range(80):
        join = random_join(rng, rng.randint(1, 3), 5)
        towers = towers_like(join)
        for slots in range(1, 12):
            theirs, ours = solve(join, slots, "join"), solve(towers, slots, "towers")
            assert (theirs.feasible, theirs.least_budget) == (ours.feasible, ours.least_budget)
            if theirs.feasible:
                assert (theirs.time, theirs.peak_bytes <= slots) == (ours.time, ours.peak_bytes <= slots)


def test_one_tower_is_a_chain():
    """The loss as a last stage that has no output and saves nothing."""
    rng = Random(14)
    for _ in range(40):
        (tower,) = random_towers(rng, 1, 6, saves=True).towers
        problem = Towers((Tower(tower.input_bytes, tower.input_gradient_bytes, tower.steps, 1),), 2, 3)
        stages = [
            Stage(s.name, s.forward_time, s.backward_time, s.output_bytes, s.saved_bytes, s.gradient_bytes,
                  s.forward_overhead_bytes, s.backward_overhead_bytes)
            for s in tower.steps
        ]  # fmt: skip
        chain = Chain(tower.input_bytes, tower.input_gradient_bytes, (*stages, Stage("loss", 2, 0, 0, 0, 0, 0, 3)))
        weights = problem.resident_bytes
        floor = least(problem)
        assert floor - weights == METHODS["persistent"].least_budget(chain, Options())
        for budget in (floor, floor + 3, floor + 9, floor + 40):
            assert solve(problem, budget, "towers").time == solve(chain, budget - weights, "persistent").time


def in_bytes(rng: Random, lengths, saves) -> Towers:
    """Sizes that share no divisor."""

    def step(i):
        size = rng.randint(10**6, 10**8)
        saved = size * rng.randint(2, 8) if saves else None
        return Step(f"s{i}", rng.random(), 2 * rng.random(), size, size + 1, saved, rng.randint(0, 10**6))

    return Towers(tuple(Tower(10**6, 10**6, tuple(map(step, range(n)))) for n in lengths), 0.1)


@pytest.mark.parametrize("saves", [True, False])
def test_two_towers_of_fifty(saves):
    problem = in_bytes(Random(15), (50, 50), saves)
    floor, everything = least(problem), solve(problem, None, "store-all")
    times = []
    for budget in (floor, floor + 1, *(floor + int(s * (everything.peak_bytes - floor)) for s in (0.1, 0.4, 1))):
        result = solve(problem, budget, "towers")
        assert result.peak_bytes <= budget
        times.append(result.time)
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(everything.time)
    assert not solve(problem, floor - 1, "towers").feasible


def test_coarse_slots_keep_the_budget():
    problem = in_bytes(Random(16), (6, 9), True)
    floor = least(problem)
    for slots in (1, 5, 40):
        for budget in (floor, floor * 5 // 4, floor * 2):
            assert solve(problem, budget, "towers", slots=slots).peak_bytes <= budget


def test_shared_weights_count_once():
    step = Step("s", 1, 1, 4, 4, weight_bytes=100)
    siamese, apart = (Towers((Tower(4, 4, (step,) * 3),) * 2, 1, shared_weights=shared) for shared in (1, 0))
    assert apart.resident_bytes == 2 * siamese.resident_bytes == 600
    assert least(apart) == least(siamese) + 300


@pytest.mark.parametrize(
    ("saved", "complaint"),
    [(3, "3 is less than output_bytes (4)"), (-1, "must not be negative"), ("all", "must be a whole number")],
)
def test_a_bad_saved_set_is_named(saved, complaint):
    document = Towers((Tower(4, 4, (Step("s", 1, 1, 4, 4, 9),)),), 1).to_json()
    document["towers"][0]["steps"][0]["saved_bytes"] = saved
    with pytest.raises(InputError) as refusal:
        problem_from_json(document)
    assert str(refusal.value).startswith("towers[0].steps[0].saved_bytes: ")
    assert complaint in str(refusal.value)


def test_weights_of_different_size_cannot_be_shared():
    towers = [Tower(1, 1, (Step("s", 1, 1, 1, 1, weight_bytes=size),)) for size in (1, 2)]
    with pytest.raises(InputError, match=r"^towers\[1\].steps\[0\].weight_bytes: 2 cannot be shared"):
        Towers(tuple(towers), 1, shared_weights=1)


def test_too_many_towers_are_refused_in_words():
    with pytest.raises(InputError, match=r"^towers: are too long or too many"):
        solve(in_bytes(Random(17), (60,) * 6, False), 10**12, "towers")
