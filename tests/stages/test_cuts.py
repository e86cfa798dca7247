"""Stages: every operator in exactly one, and what crosses a border is what later stages read."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elbowroom.stages.cuts import _crossing_bytes, _spans, cut, places
from joints import Step, joint_of, joints

CUTS = st.fixed_dictionaries({"divide": st.booleans(), "most": st.sampled_from([1, 2, 3, 120])})


def stage_numbers(pieces) -> dict[int, int]:
    return {op: k for k, piece in enumerate(pieces) for op in (*piece.forward, *piece.backward)}


@given(joints(30), CUTS)
@settings(max_examples=100)
def test_stages_divide_the_forward_in_its_order_and_the_backward(joint, how):
    pieces = cut(joint, **how)
    assert tuple(op for piece in pieces for op in piece.forward) == joint.forward
    assert sorted(op for piece in pieces for op in piece.backward) == sorted(joint.backward)
    assert len(pieces) <= how["most"]
    assert all(piece.forward for piece in pieces)


@given(joints(30), CUTS)
@settings(max_examples=100)
def test_what_crosses_is_what_later_stages_read(joint, how):
    pieces = cut(joint, **how)
    stage = stage_numbers(pieces)
    for k in range(len(pieces) + 1):
        read = {read for op in stage if stage[op] >= k for read in joint.ops[op].reads}
        crossing = [op for op in joint.forward if stage[op] < k and op in read]
        if k < len(pieces):
            assert list(pieces[k].enters) == crossing
        if k > 0:
            assert list(pieces[k - 1].leaves) == crossing
    for piece in pieces:
        read = {read for op in piece.backward for read in joint.ops[op].reads}
        assert set(piece.needs) == read & set(joint.forward)
        assert len(set(piece.needs)) == len(piece.needs)


@given(joints(30), CUTS)
@settings(max_examples=100)
def test_only_tensors_cross(joint, how):
    """A tuple stays with what is taken out of it: it cannot be handed to autograd to keep."""
    for piece in cut(joint, **how):
        assert all(joint.ops[op].storable for op in piece.leaves)


@given(joints(30), CUTS)
@settings(max_examples=100)
def test_gradients_exist_when_stages_go_back_last_to_first(joint, how):
    there = {*joint.inputs, *joint.arriving, *joint.forward}
    for piece in reversed(cut(joint, **how)):
        for op in piece.backward:
            assert there.issuperset(joint.ops[op].reads)
            there.add(op)


@given(joints(30))
@settings(max_examples=100)
def test_crossing_bytes_count_every_storage_once(joint):
    place = places(joint)
    spans = _spans(joint, place)
    for i, counted in enumerate(_crossing_bytes(joint, spans)):
        crossing = [op for op, (made, until) in spans.items() if made <= i < until]
        if all(joint.ops[op].storable for op in crossing):
            assert counted == joint.bytes_of({s for op in crossing for s in joint.storages(op)})


def layer(size: int, inside: int) -> list[Step]:
    """Widens, and comes back to what goes from layer to layer."""
    wide = Step("plain", (1,), (inside, 1), 1, 1, 0, True, False, False, False, True, False)
    narrow = Step("plain", (1,), (size, 1), 1, 1, 0, True, False, False, False, True, False)
    return [wide, wide, narrow]


@pytest.mark.parametrize("divide", [False, True])
def test_layers_are_cut_where_they_meet(divide):
    joint = joint_of(layer(2, 20) * 6)
    pieces = cut(joint, divide=divide)
    for before, after in pairwise(pieces):
        assert before.leaves == after.enters
        if not divide:
            assert joint.bytes_of({s for op in before.leaves for s in joint.storages(op)}) == 2
    assert len(pieces) >= 6


def test_a_backward_operator_stays_with_its_forward_though_it_reads_none_of_it():
    """Autograd numbers them; without numbers it goes where its gradient is."""
    blind = Step("plain", (1,), (2, 1), 1, 1, 0, True, False, False, False, False, False)
    numbered, bare = (joint_of([blind] * 5, numbering=flag) for flag in (1, 0))
    place = places(numbered)
    assert sorted({place[op] for op in numbered.backward}) == [0, 1, 2, 3, 4]
    place = places(bare)
    assert {place[op] for op in bare.backward} == {4}
