"""What the referee of steps refuses, by name, and what it counts; `test_mutants.py` asks about everything else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elbowroom.errors import InvalidProgram
from elbowroom.problem import Platform
from elbowroom.step.graph import Cost
from elbowroom.step.operations import Await, Offload, Prefetch, Release, Run
from elbowroom.step.program import make_program
from elbowroom.step.referee import predict
from machine import check, run
from moving import may_move, moving
from stepgraphs import Step, graph_of, graphs, orders, surroundings

LINK = Platform(to_host=2.0, from_host=3.0, duplex=1.5, seconds_per_copy=0.25)
LAYER = Step("plain", (1,), (4, 2), 2, 3, 1, True, False, False, False, True, True)
GRAPH = graph_of([LAYER] * 4)
PROGRAM = make_program(GRAPH, GRAPH.backward)
(MOVED, *_) = may_move(GRAPH, PROGRAM)


def refused(graph, program, platform=LINK) -> str:
    with pytest.raises(InvalidProgram) as refusal:
        predict(graph, program, platform=platform)
    return str(refusal.value)


def without(operations, at):
    return (*operations[:at], *operations[at + 1 :])


def moved_program(graph=GRAPH, program=PROGRAM, value=MOVED, *, keeps=False):
    """The value goes to the host after the forward and comes back before the backward."""
    saved = tuple(op for op in program.saved if op != value)
    forward = (*program.forward, Offload(value), Release(value))
    return replace(
        program, forward=forward, backward=(Prefetch(value, keeps), Await(value), *program.backward), saved=saved
    )


def test_a_missing_saved_value_is_refused_by_name():
    program = replace(PROGRAM, saved=PROGRAM.saved[1:])
    assert f"reads {GRAPH.ops[PROGRAM.saved[0]].name}" in refused(GRAPH, program) or "not saved" in refused(
        GRAPH, program
    )


def test_the_refusal_names_the_operation_and_its_place():
    said = refused(GRAPH, replace(PROGRAM, forward=without(PROGRAM.forward, 0)))
    assert said.startswith(f"forward operation 0 (run {GRAPH.ops[PROGRAM.forward[1].op].name}): reads ")
    with pytest.raises(InvalidProgram) as refusal:
        predict(GRAPH, replace(PROGRAM, forward=without(PROGRAM.forward, 0)))
    assert (refusal.value.phase, refusal.value.index) == ("forward", 0)


def test_a_gradient_that_is_never_made_is_refused():
    at = next(n for n, each in enumerate(PROGRAM.backward) if each.accumulates)
    program = replace(
        PROGRAM,
        backward=tuple(replace(each, accumulates=()) if n == at else each for n, each in enumerate(PROGRAM.backward)),
    )
    assert "is never made" in refused(GRAPH, program)


@pytest.mark.parametrize("number", [-10_000, -1, len(GRAPH.ops), 10_000])
def test_operators_that_do_not_exist_are_refused(number):
    assert "there is no operator" in refused(GRAPH, replace(PROGRAM, forward=(Run(number), *PROGRAM.forward)))
    assert "there is no operator" in refused(GRAPH, replace(PROGRAM, backward=(Run(number), *PROGRAM.backward)))
    assert "there is no operator" in refused(GRAPH, replace(PROGRAM, forward=(*PROGRAM.forward, Offload(number))))


def test_operators_that_do_not_exist_are_refused_where_a_result_is_made_again():
    """The backward is looked through for results before it is played."""
    again = make_program(GRAPH, [*GRAPH.forward, *GRAPH.backward])
    assert set(GRAPH.results) & again.reruns.keys()
    for number in (-10_000, len(GRAPH.ops)):
        assert "there is no operator" in refused(GRAPH, replace(again, backward=(Run(number), *again.backward)))


# --- values on the host --------------------------------------------------------------------------------------


@given(st.data(), surroundings())
def test_programs_that_move_values_take_what_the_machine_counts(data, around):
    graph = data.draw(graphs(most=10))
    program = data.draw(moving(graph, make_program(graph, data.draw(orders(graph)))))
    prediction = predict(graph, program, around, LINK)
    account = run(graph, program, around)
    assert list(prediction.forward_bytes) == account.forward_bytes
    assert list(prediction.backward_bytes) == account.backward_bytes
    assert prediction.between_bytes == account.between_bytes


def test_a_value_on_the_host_takes_no_memory_between_forward_and_backward():
    before, after = predict(GRAPH, PROGRAM), predict(GRAPH, moved_program(), platform=LINK)
    assert before.between_bytes - after.between_bytes == GRAPH.value_bytes(MOVED)
    assert after.host_bytes == GRAPH.value_bytes(MOVED)


def test_what_is_on_the_host_only_cannot_be_read():
    program = moved_program()
    assert "which is on the host only" in refused(GRAPH, replace(program, backward=program.backward[2:]))


def test_a_copy_is_not_read_before_it_has_arrived():
    program = moved_program()
    backward = (program.backward[0], *program.backward[2:])
    assert "still on its way from the host" in refused(GRAPH, replace(program, backward=backward))


def test_memory_is_not_given_away_while_it_is_copied():
    value = MOVED
    reader = next(n for n, each in enumerate(PROGRAM.backward) if value in each.frees)
    program = replace(PROGRAM, forward=(*PROGRAM.forward, Offload(value)))
    said = refused(GRAPH, program)
    assert "is being copied to the host: release it" in said
    assert f"backward operation {reader} " in said


def test_moving_needs_a_link_and_room_on_the_host():
    assert "there is no link to the host" in refused(GRAPH, moved_program(), None)
    tight = replace(LINK, host_bytes=GRAPH.value_bytes(MOVED) - 1)
    assert "the host would need 1 bytes more" in refused(GRAPH, moved_program(), tight)
    predict(GRAPH, moved_program(), platform=replace(LINK, host_bytes=GRAPH.value_bytes(MOVED)))


def test_a_copy_that_stays_on_the_host_is_released_again_without_another():
    program = moved_program(keeps=True)
    again = (*program.backward[:2], Release(MOVED), Prefetch(MOVED), Await(MOVED), *program.backward[2:])
    prediction = predict(GRAPH, replace(program, backward=again), platform=LINK)
    assert prediction.host_bytes == GRAPH.value_bytes(MOVED)
    forgotten = (Prefetch(MOVED), *again[1:])
    assert "it has no copy on the host" in refused(GRAPH, replace(program, backward=forgotten))


@pytest.mark.parametrize("what", ["inputs", "arriving"])
def test_what_comes_from_outside_does_not_move(what):
    value = getattr(GRAPH, what)[0]
    program = replace(PROGRAM, backward=(Offload(value), *PROGRAM.backward))
    assert "only tensors that the step itself makes can move" in refused(GRAPH, program)


# --- graphs --------------------------------------------------------------------------------------------------


def test_measuring_makes_another_graph():
    op = GRAPH.forward[0]
    ((storage, size),) = GRAPH.ops[op].makes
    measured = GRAPH.with_costs({op: Cost(7.0, 11, ((storage, size + 1),))})
    assert (measured.ops[op].time, measured.ops[op].workspace) == (7.0, 11)
    assert measured.storage_bytes[storage] == size + 1
    assert GRAPH.storage_bytes[storage] == size
    with pytest.raises(AttributeError):
        measured.ops[op].time = 1.0
    check(measured, make_program(measured, measured.backward))
