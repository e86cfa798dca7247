"""Programs executed symbolically, instruction by instruction; and `predict` against counting live storages."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elbowroom.program import forward_only, make_program, play
from joints import Step, check, joint_of, joints, orders, surroundings


@st.composite
def programs(draw):
    joint = draw(joints())
    return joint, make_program(joint, draw(orders(joint)))


@given(programs(), surroundings())
def test_any_order_computes_the_plain_gradients_in_the_predicted_bytes(made, around):
    check(*made, around)


@given(joints(), surroundings())
def test_the_plain_order_replays_nothing(joint, around):
    program = make_program(joint, joint.backward)
    check(joint, program, around)
    assert not program.replays
    assert not program.reseeded


@given(joints())
def test_outputs_alone_change_nothing(joint):
    """A look at a model: results are there at the end and nothing else is, and no buffer is read to be updated."""
    there = set(joint.inputs)
    program = forward_only(joint)
    for instruction in program.forward:
        assert instruction.replay
        assert instruction.reuses is None
        assert there.issuperset(joint.ops[instruction.op].replay_reads)
        there.add(instruction.op)
        there.difference_update(instruction.frees)
    assert there == {*joint.inputs, *joint.results}
    assert not program.saved
    assert not program.backward


@given(programs())
@settings(max_examples=80)
def test_playing_a_whole_backward_takes_what_is_predicted_for_it(made):
    """`play` knows neither results nor copies; where they stay beside the backward, the difference is constant."""
    joint, program = made
    returned = [gradient for i, gradient in joint.gradients if i not in joint.parameters]
    read = {read for i in program.backward for read in joint.ops[i.op].reads}
    have = (*program.saved, *(op for op in joint.arriving if op in read))
    assume(program.backward)
    assume(all(joint.ops[gradient].kind == "backward" for _, gradient in joint.gradients))
    assume(not storages(joint, joint.results) & storages(joint, have))
    prediction = check(joint, program)
    beside = joint.bytes_of(storages(joint, joint.results))
    beside += sum(joint.overwritten.get(op, 0) for op in program.saved)
    peak, left = play(joint, [i.op for i in program.backward], have, returned)
    assert peak + beside == max(prediction.backward_bytes)
    assert left == joint.bytes_of(storages(joint, returned))


def storages(joint, ops) -> set[int]:
    return {storage for op in ops for storage in joint.storages(op)}


# --- what went wrong once, or would be easy to get wrong -----------------------------------------------------


def step(form: str = "plain", **rest) -> Step:
    usual = {"back": (1,), "sizes": (3, 3), "time": 1, "backward_time": 1, "workspace": 0, "parameter": False}
    usual |= {"random": False, "passes": False, "together": False, "reads_inputs": True, "reads_outputs": False}
    return Step(form, **(usual | rest))


def test_a_gradient_of_a_parameter_and_of_the_batch_is_returned_too():
    """relu(x + p): one value is the gradient of both, added to p's and handed to whoever wants x's."""
    joint = joint_of([step(passes=True, parameter=True), step()])
    (batch, gradient), (parameter, same) = joint.gradients
    assert gradient == same
    program = make_program(joint, joint.backward)
    check(joint, program)
    assert [i.accumulates for i in program.backward] == [(parameter,)]
    assert not any(gradient in i.frees for i in program.backward)
    assert batch not in joint.parameters


def test_a_gradient_that_arrives_and_is_returned_as_it_is_stays():
    """Two outputs; the gradient of the first is that of a parameter, and nobody reads it before it is returned."""
    steps = [step(passes=True, parameter=True), step(back=(2,), parameter=True)]
    joint = joint_of(steps, inputs=(False, False, False), results=[(1, True)])
    (_, first), (_, second) = joint.gradients
    assert first in joint.arriving
    assert joint.backward == (second,)
    assert check(joint, make_program(joint, joint.backward)).backward_bytes == (15,)  # five tensors of three bytes


def test_random_numbers_for_the_backward_only_are_drawn_in_the_forward():
    joint = joint_of([step("aside", random=True), step(random=True)])
    noise, _ = joint.forward
    again = make_program(joint, [noise, *joint.backward])
    check(joint, again)
    assert [i.op for i in again.forward] == list(joint.forward)
    assert again.reseeded == (noise,)
    assert noise not in again.saved


def test_a_backward_of_elementwise_steps_runs_in_one_storage():
    joint = joint_of([step(reads_inputs=False)] * 5)
    program = make_program(joint, joint.backward)
    check(joint, program)
    first, *rest = program.backward
    assert first.reuses is None  # what arrived is autograd's
    assert all(i.reuses is not None for i in rest)


@pytest.mark.parametrize("form", ["view", "split"])
def test_a_value_is_not_written_over_while_a_view_of_it_is_read_later(form):
    """The second step reads the first's value for the last time; the view of it is read by the third."""
    joint = joint_of([step(), step(form), step(back=(2,)), step(back=(2, 1))])
    check(joint, make_program(joint, joint.backward))


def test_nothing_read_means_nothing_run():
    joint = joint_of([step(parameter=True)] * 3)
    program = make_program(joint, [*joint.forward, *joint.backward, *joint.forward])
    assert program.replays == dict.fromkeys(joint.forward[:2], 1)
