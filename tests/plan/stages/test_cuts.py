"""Stages: every operator in exactly one, and what crosses a border is what later stages read."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elbowroom.plan.stages.cuts import _crossing_bytes, _spans, cut, places
from elbowroom.plan.stages.flow import flowing
from stepgraphs import Step, graph_of, graphs

CUTS = st.fixed_dictionaries(
    {"divide": st.booleans(), "single": st.booleans(), "most": st.sampled_from([1, 2, 3, 120])}
)


def stage_numbers(sections) -> dict[int, int]:
    return {op: k for k, section in enumerate(sections) for op in (*section.forward, *section.backward)}


@given(graphs(30), CUTS)
@settings(max_examples=100)
def test_stages_divide_the_forward_in_its_order_and_the_backward(graph, how):
    sections = cut(graph, **how)
    assert tuple(op for section in sections for op in section.forward) == graph.forward
    assert sorted(op for section in sections for op in section.backward) == sorted(graph.backward)
    assert len(sections) <= how["most"]
    assert all(section.forward for section in sections)


@given(graphs(30), CUTS)
@settings(max_examples=100)
def test_what_crosses_is_what_later_stages_read(graph, how):
    sections = cut(graph, **how)
    stage = stage_numbers(sections)
    for k in range(len(sections) + 1):
        read = {read for op in stage if stage[op] >= k for read in graph.ops[op].reads}
        crossing = [op for op in graph.forward if stage[op] < k and op in read]
        if k < len(sections):
            assert list(sections[k].enters) == crossing
        if k > 0:
            assert list(sections[k - 1].leaves) == crossing


@given(graphs(30), CUTS)
@settings(max_examples=100)
def test_a_backward_needs_what_it_reads_and_what_lingers_for_earlier_ones(graph, how):
    check_needs(graph, cut(graph, **how))


def test_what_towers_need_of_later_ones_lingers():
    """The gradient of a shared weight waits for all of its uses."""
    pytest.importorskip("torch")
    from captured import captured

    graph, _ = captured("siamese", fused=True)
    sections = cut(graph)
    check_needs(graph, sections)
    assert any(section.made_later for section in sections)


def check_needs(graph, sections):
    stage = stage_numbers(sections)
    late = set()
    for k, section in enumerate(sections):
        read = {read for op in section.backward for read in graph.ops[op].reads} & set(graph.forward)
        assert set(section.made_later) == {op for op in read if stage[op] > k}
        assert set(section.needs) == (read - set(section.made_later)) | set(section.lingers)
        late |= set(section.made_later)
        assert len(set(section.needs)) == len(section.needs)
    assert sorted(op for section in sections for op in section.lingers) == sorted(late)
    assert all(stage[op] == k for k, section in enumerate(sections) for op in section.lingers)


@given(graphs(30), CUTS)
@settings(max_examples=100)
def test_only_tensors_cross(graph, how):
    """A tuple stays with what is taken out of it: it cannot be handed to autograd to keep."""
    for section in cut(graph, **how):
        assert all(graph.ops[op].storable for op in section.leaves)


@given(graphs(30), CUTS)
@settings(max_examples=100)
def test_gradients_exist_when_stages_go_back_last_to_first(graph, how):
    there = {*graph.inputs, *graph.arriving, *graph.forward}
    for section in reversed(cut(graph, **how)):
        for op in section.backward:
            assert there.issuperset(graph.ops[op].reads)
            there.add(op)


@given(graphs(30))
@settings(max_examples=100)
def test_crossing_bytes_count_every_storage_once(graph):
    place = places(graph)
    spans = _spans(graph, place)
    for i, counted in enumerate(_crossing_bytes(graph, spans)):
        crossing = [op for op, (made, until) in spans.items() if made <= i < until]
        if all(graph.ops[op].storable for op in crossing):
            assert counted == graph.bytes_of({s for op in crossing for s in graph.storages(op)})


@given(graphs(30))
@settings(max_examples=100)
def test_cut_as_a_chain_one_storage_that_flows_crosses(graph):
    """What flows is looked for here by walking the graph; a storage crosses if later stages read it."""
    flow = flowing_by_paths(graph)
    made = {storage for op in flow for storage, _ in graph.ops[op].makes}
    sections = cut(graph, single=True)
    for k in range(1, len(sections)):
        later = {op for section in sections[k:] for op in (*section.forward, *section.backward)}
        reads = {read for op in later if op in flow or op in graph.backward for read in graph.ops[op].rerun_reads}
        earlier = reads & flow - later
        assert len({storage for op in earlier for storage in graph.storages(op)} & made) <= 1


@given(graphs(30))
@settings(max_examples=100)
def test_what_flows_comes_from_the_batch_has_a_gradient_and_leads_to_a_result(graph):
    assert set(flowing(graph)) == flowing_by_paths(graph)


def flowing_by_paths(graph) -> set[int]:
    paths = networkx.DiGraph((read, op) for op in graph.forward for read in graph.ops[op].rerun_reads)
    paths.add_nodes_from((*graph.inputs, *graph.forward))
    differentiated = {i for i, _ in graph.gradients}

    def flows(op: int) -> bool:
        before, after = networkx.ancestors(paths, op), {op} | networkx.descendants(paths, op)
        batch = before & set(graph.inputs) - graph.parameters
        return bool(batch and before & differentiated and after & set(graph.results))

    return {op for op in graph.forward if flows(op)}


def layer(size: int, inside: int) -> list[Step]:
    """Widens, and comes back to what goes from layer to layer."""
    wide = Step("plain", (1,), (inside, 1), 1, 1, 0, True, False, False, False, True, False)
    narrow = Step("plain", (1,), (size, 1), 1, 1, 0, True, False, False, False, True, False)
    return [wide, wide, narrow]


@pytest.mark.parametrize("divide", [False, True])
def test_layers_are_cut_where_they_meet(divide):
    graph = graph_of(layer(2, 20) * 6)
    sections = cut(graph, divide=divide)
    for before, after in pairwise(sections):
        assert before.leaves == after.enters
        if not divide:
            assert graph.bytes_of({s for op in before.leaves for s in graph.storages(op)}) == 2
    assert len(sections) >= 6


def test_as_a_chain_residual_blocks_stay_whole():
    """Three operators and a sum with what came before them. In the first that is the batch, which is there anyway."""
    inside = Step("plain", (1,), (20, 1), 1, 1, 0, True, False, False, False, True, False)
    graph = graph_of([inside, inside, inside, replace(inside, back=(1, 4), parameter=False)] * 5)
    blocks = cut(graph, single=True)
    assert [len(section.forward) for section in blocks] == [1] * 4 + [4] * 4


def test_a_backward_operator_stays_with_its_forward_though_it_reads_none_of_it():
    """Autograd numbers them; without numbers it goes where its gradient is."""
    blind = Step("plain", (1,), (2, 1), 1, 1, 0, True, False, False, False, False, False)
    numbered, bare = (graph_of([blind] * 5, numbering=flag) for flag in (1, 0))
    place = places(numbered)
    assert sorted({place[op] for op in numbered.backward}) == [0, 1, 2, 3, 4]
    place = places(bare)
    assert {place[op] for op in bare.backward} == {4}
