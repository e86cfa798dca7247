"""Stages: every operator in exactly one, and what crosses a border is what later stages read."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elbowroom.stages.cuts import _crossing_bytes, _spans, cut, places
from elbowroom.stages.flow import flowing
from joints import Step, joint_of, joints

CUTS = st.fixed_dictionaries(
    {"divide": st.booleans(), "single": st.booleans(), "most": st.sampled_from([1, 2, 3, 120])}
)


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


@given(joints(30), CUTS)
@settings(max_examples=100)
def test_a_backward_needs_what_it_reads_and_what_lingers_for_earlier_ones(joint, how):
    check_needs(joint, cut(joint, **how))


def test_what_towers_need_of_later_ones_lingers():
    """The gradient of a shared weight waits for all of its uses."""
    pytest.importorskip("torch")
    from captured import captured

    joint, _ = captured("siamese", fused=True)
    pieces = cut(joint)
    check_needs(joint, pieces)
    assert any(piece.late for piece in pieces)


def check_needs(joint, pieces):
    stage = stage_numbers(pieces)
    late = set()
    for k, piece in enumerate(pieces):
        read = {read for op in piece.backward for read in joint.ops[op].reads} & set(joint.forward)
        assert set(piece.late) == {op for op in read if stage[op] > k}
        assert set(piece.needs) == (read - set(piece.late)) | set(piece.lingers)
        late |= set(piece.late)
        assert len(set(piece.needs)) == len(piece.needs)
    assert sorted(op for piece in pieces for op in piece.lingers) == sorted(late)
    assert all(stage[op] == k for k, piece in enumerate(pieces) for op in piece.lingers)


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


@given(joints(30))
@settings(max_examples=100)
def test_cut_as_a_chain_one_storage_that_flows_crosses(joint):
    """What flows is looked for here by walking the graph; a storage crosses if later stages read it."""
    flow = flowing_by_paths(joint)
    made = {storage for op in flow for storage, _ in joint.ops[op].makes}
    pieces = cut(joint, single=True)
    for k in range(1, len(pieces)):
        later = {op for piece in pieces[k:] for op in (*piece.forward, *piece.backward)}
        reads = {read for op in later if op in flow or op in joint.backward for read in joint.ops[op].replay_reads}
        earlier = reads & flow - later
        assert len({storage for op in earlier for storage in joint.storages(op)} & made) <= 1


@given(joints(30))
@settings(max_examples=100)
def test_what_flows_comes_from_the_batch_has_a_gradient_and_leads_to_a_result(joint):
    assert set(flowing(joint)) == flowing_by_paths(joint)


def flowing_by_paths(joint) -> set[int]:
    graph = networkx.DiGraph((read, op) for op in joint.forward for read in joint.ops[op].replay_reads)
    graph.add_nodes_from((*joint.inputs, *joint.forward))
    differentiated = {i for i, _ in joint.gradients}

    def flows(op: int) -> bool:
        before, after = networkx.ancestors(graph, op), {op} | networkx.descendants(graph, op)
        batch = before & set(joint.inputs) - joint.parameters
        return bool(batch and before & differentiated and after & set(joint.results))

    return {op for op in joint.forward if flows(op)}


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


def test_as_a_chain_residual_blocks_stay_whole():
    """Three operators and a sum with what came before them. In the first that is the batch, which is there anyway."""
    inside = Step("plain", (1,), (20, 1), 1, 1, 0, True, False, False, False, True, False)
    joint = joint_of([inside, inside, inside, replace(inside, back=(1, 4), parameter=False)] * 5)
    blocks = cut(joint, single=True)
    assert [len(piece.forward) for piece in blocks] == [1] * 4 + [4] * 4


def test_a_backward_operator_stays_with_its_forward_though_it_reads_none_of_it():
    """Autograd numbers them; without numbers it goes where its gradient is."""
    blind = Step("plain", (1,), (2, 1), 1, 1, 0, True, False, False, False, False, False)
    numbered, bare = (joint_of([blind] * 5, numbering=flag) for flag in (1, 0))
    place = places(numbered)
    assert sorted({place[op] for op in numbered.backward}) == [0, 1, 2, 3, 4]
    place = places(bare)
    assert {place[op] for op in bare.backward} == {4}
