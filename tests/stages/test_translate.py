"""From stages and schedules to programs: they compute the same, keep no more, and take no longer."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elbowroom.program import make_program, predict
from elbowroom.schedule import Forward, simulate
from elbowroom.solve import METHODS, Options, solve
from elbowroom.stages.costs import _costs, _gradients_crossing, stage
from elbowroom.stages.cuts import cut
from elbowroom.stages.savings import ways_to_save
from elbowroom.stages.translate import order_of
from joints import Step, check, joint_of, joints

SOLVERS = ("persistent", "floating", "revolve", "sequential", "store-all")


def program_for(stages, schedule):
    return make_program(stages.joint, order_of(stages, schedule))


@st.composite
def staged(draw, most: int = 20):
    joint = draw(joints(most))
    assume(joint.backward)
    return stage(joint, cut(joint, divide=draw(st.booleans()), most=draw(st.sampled_from([2, 4, 120]))))


@st.composite
def schedules(draw):
    made = draw(staged())
    chain = made.chain(draw(st.sampled_from(["full", "once"])), draw(st.integers(0, 4)))
    solver = draw(st.sampled_from(SOLVERS))
    floor = METHODS[solver].least_budget(chain, Options())
    result = solve(chain, floor + draw(st.integers(0, 12)), solver)
    assert result.feasible
    return made, chain, result.schedule


@given(schedules())
@settings(max_examples=100)
def test_a_schedule_becomes_a_program_that_computes_the_same_and_keeps_no_more(made):
    """From forward to backward goes only what the schedule keeps at that moment."""
    stages, _, schedule = made
    joint, pieces = stages.joint, stages.pieces
    program = program_for(stages, schedule)
    check(joint, program)
    kept, last = set(), ()
    for operation in schedule:
        if operation.at == len(pieces) + 1:
            break
        assert isinstance(operation, Forward)
        piece = pieces[operation.at - 1]
        if operation.save != "nothing":
            kept.update(piece.enters)
        if operation.save == "all":
            kept.update(stages.ways[operation.at - 1][operation.way].saved, piece.leaves)
        last = piece.leaves
    assert {op for op in program.saved if joint.ops[op].kind == "forward"} <= kept.union(last)


@given(schedules())
@settings(max_examples=80)
def test_a_program_takes_no_longer_than_its_schedule(made):
    """It may take less: what happens to be there is not run again."""
    stages, chain, schedule = made
    joint = stages.joint
    program = program_for(stages, schedule)
    assert predict(joint, program).time_s <= simulate(chain, schedule).time
    once = predict(joint, make_program(joint, joint.backward)).time_s
    assert predict(joint, program).time_s >= once


@given(staged())
@settings(max_examples=60)
def test_saving_everything_replays_nothing(made):
    chain = made.chain("full", 0)
    assert not program_for(made, solve(chain, None, "store-all").schedule).replays


@given(staged(40))
@settings(max_examples=80)
def test_repeated_stages_cost_what_they_would_alone(made):
    joint, pieces = made.joint, made.pieces
    gradients = _gradients_crossing(joint, pieces)
    for k, piece in enumerate(pieces):
        ways = ways_to_save(joint, piece)
        assert [(way.bytes, way.time) for way in made.ways[k]] == [(way.bytes, way.time) for way in ways]
        assert all(way.saved <= set(piece.forward) for way in made.ways[k])
        assert made.costs[k] == _costs(joint, piece, made.ways[k], gradients[k], gradients[k + 1])


def test_repeated_layers_are_worked_out_once():
    step = Step("plain", (1,), (2, 1), 1, 1, 0, True, False, False, False, True, False)
    wide = Step("plain", (1,), (20, 1), 1, 1, 0, True, False, False, False, True, False)
    joint = joint_of([wide, step] * 8)
    made = stage(joint, cut(joint, divide=False))
    assert len(made.pieces) >= 8
    assert len(set(made.looks)) <= 4


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_chain_replays_what_revolve_would(slots):
    """Equal stages that save their input only: the program's replays are the schedule's second forwards."""
    step = Step("plain", (1,), (2, 1), 1, 1, 0, True, False, False, False, True, False)
    joint = joint_of([step] * 8, inputs=(False, False, False))
    made = stage(joint, cut(joint, divide=True))
    chain = made.chain("full", 0)
    floor = METHODS["revolve"].least_budget(chain, Options())
    schedule = solve(chain, floor + 2 * slots, "revolve").schedule
    program = program_for(made, schedule)
    check(joint, program)
    assert program.replays


def test_stages_that_are_wired_differently_are_not_taken_for_one_another():
    """The same operators on the same shapes, but one layer's third operator skips its second."""
    wide = Step("plain", (1,), (20, 1), 1, 1, 0, True, False, False, False, True, False)
    narrow = Step("plain", (1,), (2, 1), 1, 1, 0, True, False, False, False, True, False)
    joint = joint_of([wide, wide, wide, narrow] * 6)
    looks = stage(joint, cut(joint, divide=False, most=6)).looks
    first, second, third = joint.forward[8:11]
    for op in joint.ops:
        if op.index == third:
            op.reads = op.replay_reads = tuple(first if read == second else read for read in op.reads)
    other = stage(joint, cut(joint, divide=False, most=6)).looks
    assert looks[2] == looks[1]
    assert other[2] == 2
