"""Plans of random joint graphs: they run, they fit, and more room never costs time."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import Phase, event, given, settings
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
@settings(max_examples=80)
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
@settings(max_examples=40)
@pytest.mark.parametrize("rising", [True, False])
def test_more_room_never_takes_longer(rising, problem):
    joint, around, rooms = problem
    planner = Planner(joint, around)
    found = {room: planner.best(room) for room in (rooms if rising else reversed(rooms))}
    times = [plan.prediction.time_s if (plan := found[room]) else float("inf") for room in rooms]
    assert all(less >= more for less, more in pairwise(times))


def test_late_gradients_leave_their_memory_to_the_step():
    joint = layers(12)
    plain = Planner(joint, Surroundings()).everything.prediction
    room = plain.peak_bytes // 3
    late = {i: 2 for i, _ in joint.gradients if i in joint.parameters}
    kept, free = (Planner(joint, Surroundings(late=each)).best(room) for each in ({}, late))
    assert free.prediction.time_s < kept.prediction.time_s
    check(joint, free.program, Surroundings(late=late))
    assert free.prediction.backward_bytes[-1] <= room


@given(problems())
@settings(max_examples=40, phases=[Phase.generate])
def test_the_least_that_one_planner_names_another_can_plan(problem):
    """Somebody told what would be enough asks for just that, later."""
    joint, around, _ = problem
    least = Planner(joint, around).least.prediction.peak_bytes
    assert Planner(joint, around).best(least) is not None


@given(joints(7), surroundings())
@settings(max_examples=40)
def test_how_far_from_the_best_single_recomputation(joint, around):
    """Not a promise: pytest --hypothesis-show-statistics says how often small graphs are planned as well as by trying
    every set of values to keep, the others recomputed once, when first needed."""
    planner = Planner(joint, around)
    plain = planner.everything.prediction
    fronts = {(p.peak_bytes, p.time_s) for p in every_single_recomputation(joint, around)}
    assert (plain.peak_bytes, plain.time_s) in fronts
    for room in range(min(peak for peak, _ in fronts), plain.peak_bytes):
        best = min(time for peak, time in fronts if peak <= room)
        plan = planner.best(room)
        if plan is None:
            event("no plan, though there is one")
        else:
            event("as fast" if plan.prediction.time_s <= best else "slower")


def every_single_recomputation(joint, around):
    for size in range(len(joint.forward) + 1):
        for kept in combinations(joint.forward, size):
            have, order = set(kept), []
            for op in joint.backward:
                again = missing(joint, joint.ops[op].reads, have)
                order += [*again, op]
                have.update(again)
            yield predict(joint, make_program(joint, order), around)


# --- by hand -------------------------------------------------------------------------------------------------


def layers(count: int):
    """Layers that widen sixteenfold and come back, as a transformer's do."""
    wide = Step("plain", (1,), (16, 1), 1, 1, 0, True, False, False, False, True, False)
    narrow = Step("plain", (1,), (1, 1), 1, 1, 0, True, False, False, False, True, False)
    return joint_of([wide, wide, narrow] * count)


def test_layers_in_a_third_of_the_memory_take_at_most_one_more_forward():
    joint = layers(12)
    planner = Planner(joint, Surroundings())
    plain = planner.everything.prediction
    plan = planner.best(plain.peak_bytes // 3)
    assert plan is not None
    check(joint, plan.program)
    forward_s = sum(joint.ops[op].time for op in joint.forward)
    assert plain.time_s < plan.prediction.time_s <= plain.time_s + forward_s
    assert planner.least.prediction.peak_bytes < plain.peak_bytes // 4


def test_a_graph_without_a_backward_has_one_plan():
    frozen = Step("plain", (1,), (2, 2), 1, 1, 0, False, False, False, False, True, False)
    joint = joint_of([frozen] * 3, inputs=(False, False, False))
    assert not joint.backward
    planner = Planner(joint, Surroundings())
    peak = planner.everything.prediction.peak_bytes
    assert planner.least is planner.everything
    assert planner.best(peak) is planner.everything
    assert planner.best(peak - 1) is None
