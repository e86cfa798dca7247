"""Plans of random joint graphs: they run, they fit, and more room never costs time."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elbowroom.planning import Planner
from elbowroom.program import Surroundings, make_program, predict
from joints import Step, check, joint_of, joints, missing, surroundings


@st.composite
def problems(draw, most: int = 16):
    """A joint graph, what is around it, and rooms from too little to more than enough, in rising order."""
    joint, around = draw(joints(most)), draw(surroundings())
    everything = predict(joint, make_program(joint, joint.backward), around).peak_bytes
    rooms = draw(st.lists(st.integers(everything // 4, everything + 1), min_size=2, max_size=5, unique=True))
    return joint, around, sorted(rooms)


@given(problems())
@settings(max_examples=100)
def test_a_plan_runs_right_within_its_room(problem):
    joint, around, rooms = problem
    planner = Planner(joint, around)
    plain = predict(joint, make_program(joint, joint.backward), around)
    for room in rooms:
        plan = planner.best(room)
        if plan is None:
            assert room < planner.least.prediction.peak_bytes
            continue
        assert check(joint, plan.program, around) == plan.prediction
        assert plan.prediction.peak_bytes <= room
        assert plan.prediction.time_s >= plain.time_s
        assert planner.least.prediction.peak_bytes <= plan.prediction.peak_bytes
        if room >= plain.peak_bytes:
            assert not plan.program.replays
    assert check(joint, planner.least.program, around) == planner.least.prediction


@given(problems())
@settings(max_examples=60)
@pytest.mark.parametrize("rising", [True, False])
def test_more_room_never_takes_longer(rising, problem):
    joint, around, rooms = problem
    planner = Planner(joint, around)
    found = {room: planner.best(room) for room in (rooms if rising else reversed(rooms))}
    times = [plan.prediction.time_s if (plan := found[room]) else float("inf") for room in rooms]
    assert all(less >= more for less, more in pairwise(times))


@given(problems())
@settings(max_examples=60)
def test_the_least_that_one_planner_names_another_can_plan(problem):
    """Somebody told what would be enough asks for just that, later."""
    joint, around, _ = problem
    least = Planner(joint, around).least.prediction.peak_bytes
    assert Planner(joint, around).best(least) is not None
