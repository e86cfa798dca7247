"""Programs executed symbolically, operation by operation; and `predict` against counting live storages."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elbowroom.step.program import forward_only, make_program, play_alone
from machine import check
from stepgraphs import Step, graph_of, graphs, orders, surroundings


@st.composite
def programs(draw):
    graph = draw(graphs())
    return graph, make_program(graph, draw(orders(graph)))


@given(programs(), surroundings())
def test_any_order_computes_the_plain_gradients_in_the_predicted_bytes(made, around):
    check(*made, around)


@given(graphs(), surroundings())
def test_the_plain_order_runs_nothing_again(graph, around):
    program = make_program(graph, graph.backward)
    check(graph, program, around)
    assert not program.reruns
    assert not program.reseeded


@given(graphs())
def test_outputs_alone_change_nothing(graph):
    """A look at a model: results are there at the end and nothing else is, and no buffer is read to be updated."""
    there = set(graph.inputs)
    program = forward_only(graph)
    for run in program.forward:
        assert run.again
        assert run.reuses is None
        assert there.issuperset(graph.ops[run.op].rerun_reads)
        there.add(run.op)
        there.difference_update(run.frees)
    assert there == {*graph.inputs, *graph.results}
    assert not program.saved
    assert not program.backward


@given(programs())
@settings(max_examples=80)
def test_playing_a_whole_backward_takes_what_is_predicted_for_it(made):
    """`play_alone` knows neither results nor copies; where they stay beside it, the difference is constant."""
    graph, program = made
    returned = [gradient for i, gradient in graph.gradients if i not in graph.parameters]
    read = {read for run in program.backward for read in graph.ops[run.op].reads}
    have = (*program.saved, *(op for op in graph.arriving if op in read))
    assume(program.backward)
    assume(all(graph.ops[gradient].kind == "backward" for _, gradient in graph.gradients))
    assume(not storages(graph, graph.results) & storages(graph, have))
    prediction = check(graph, program)
    beside = graph.bytes_of(storages(graph, graph.results))
    beside += sum(graph.overwritten.get(op, 0) for op in program.saved)
    peak, left = play_alone(graph, [run.op for run in program.backward], have, returned)
    assert peak + beside == max(prediction.backward_bytes)
    assert left == graph.bytes_of(storages(graph, returned))


def storages(graph, ops) -> set[int]:
    return {storage for op in ops for storage in graph.storages(op)}


# --- what went wrong once, or would be easy to get wrong -----------------------------------------------------


def step(form: str = "plain", **rest) -> Step:
    usual = {"back": (1,), "sizes": (3, 3), "time": 1, "backward_time": 1, "workspace": 0, "parameter": False}
    usual |= {"random": False, "passes": False, "together": False, "reads_inputs": True, "reads_outputs": False}
    return Step(form, **(usual | rest))


def test_a_gradient_of_a_parameter_and_of_the_batch_is_returned_too():
    """relu(x + p): one value is the gradient of both, added to p's and handed to whoever wants x's."""
    graph = graph_of([step(passes=True, parameter=True), step()])
    (batch, gradient), (parameter, same) = graph.gradients
    assert gradient == same
    program = make_program(graph, graph.backward)
    check(graph, program)
    assert [run.accumulates for run in program.backward] == [(parameter,)]
    assert not any(gradient in run.frees for run in program.backward)
    assert batch not in graph.parameters


def test_a_gradient_that_arrives_and_is_returned_as_it_is_stays():
    """Two outputs; the gradient of the first is that of a parameter, and nobody reads it before it is returned."""
    steps = [step(passes=True, parameter=True), step(back=(2,), parameter=True)]
    graph = graph_of(steps, inputs=(False, False, False), results=[(1, True)])
    (_, first), (_, second) = graph.gradients
    assert first in graph.arriving
    assert graph.backward == (second,)
    assert check(graph, make_program(graph, graph.backward)).backward_bytes == (15,)  # five tensors of three bytes


def test_random_numbers_for_the_backward_only_are_drawn_in_the_forward():
    graph = graph_of([step("aside", random=True), step(random=True)])
    noise, _ = graph.forward
    again = make_program(graph, [noise, *graph.backward])
    check(graph, again)
    assert [run.op for run in again.forward] == list(graph.forward)
    assert again.reseeded == (noise,)
    assert noise not in again.saved


def test_a_backward_of_elementwise_steps_runs_in_one_storage():
    graph = graph_of([step(reads_inputs=False)] * 5)
    program = make_program(graph, graph.backward)
    check(graph, program)
    first, *rest = program.backward
    assert first.reuses is None  # what arrived is autograd's
    assert all(run.reuses is not None for run in rest)


@pytest.mark.parametrize("form", ["view", "split"])
def test_a_value_is_not_written_over_while_a_view_of_it_is_read_later(form):
    """The second step reads the first's value for the last time; the view of it is read by the third."""
    graph = graph_of([step(), step(form), step(back=(2,)), step(back=(2, 1))])
    check(graph, make_program(graph, graph.backward))


def test_nothing_read_means_nothing_run():
    graph = graph_of([step(parameter=True)] * 3)
    program = make_program(graph, [*graph.forward, *graph.backward, *graph.forward])
    assert program.reruns == dict.fromkeys(graph.forward[:2], 1)
