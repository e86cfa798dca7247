"""Programs executed symbolically, instruction by instruction; and `predict` against counting live storages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elbowroom.program import Program, make_program, predict
from joints import joints, orders, run, surroundings


@st.composite
def programs(draw):
    joint = draw(joints())
    return joint, make_program(joint, draw(orders(joint)))


def check(joint, program: Program, around) -> None:
    account, prediction = run(joint, program, around), predict(joint, program, around)
    assert list(prediction.forward_bytes) == account.forward_bytes
    assert list(prediction.backward_bytes) == account.backward_bytes
    assert prediction.between_bytes == account.between_bytes
    assert prediction.saved_bytes == account.saved_bytes


@given(programs(), surroundings())
def test_any_order_computes_the_plain_gradients_in_the_predicted_bytes(made, around):
    joint, program = made
    check(joint, program, around)


@given(joints(), surroundings())
def test_plain_order(joint, around):
    program = make_program(joint, joint.backward)
    check(joint, program, around)
    assert not program.replays
