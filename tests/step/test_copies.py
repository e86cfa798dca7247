"""Copies that happen while a program runs on: what the referee lets pass is right whenever they happen.

`asynchronous.py` performs a copy at once, at the last moment, or in between; it shares no code with the package and
does what the executor does. A wait that is missing, or memory that is given away too early, shows there in the bits.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchronous import at_once, at_the_last_moment, run_asynchronously
from elbowroom.errors import InvalidProgram
from elbowroom.problem import Platform
from elbowroom.step.graph import Cost, Operator, StepGraph
from elbowroom.step.operations import Await, Offload, Operation, Prefetch, Release, Run
from elbowroom.step.program import Program, make_program
from elbowroom.step.referee import Surroundings, predict
from elbowroom.step.slab import slab_of
from moving import moved_anyhow, moving
from stepgraphs import Step, graph_of, graphs, orders, surroundings

LINK = Platform(to_host=2.0, from_host=3.0, duplex=1.5, seconds_per_copy=0.25)
KINDS = "dropped", "doubled", "swapped", "moved", "of another value"
EACH = 200  # of five kinds: a thousand mutants


def is_right(graph: StepGraph, program: Program, around: Surroundings, seed: int = 0) -> None:
    """Whenever copies happen, and in exactly the bytes predicted."""
    prediction = predict(graph, program, around, LINK)
    chance = Random(seed)
    for timing in (at_once, at_the_last_moment, lambda: chance.random() < 0.5, lambda: chance.random() < 0.2):
        account = run_asynchronously(graph, program, timing, around)
        assert list(prediction.forward_bytes) == account.forward_bytes
        assert list(prediction.backward_bytes) == account.backward_bytes
        assert prediction.between_bytes == account.between_bytes
    assert slab_of(graph, program).bytes == prediction.host_bytes


@given(st.data(), surroundings())
def test_programs_that_move_values_are_right_whenever_copies_happen(data, around):
    graph = data.draw(graphs(most=10))
    program = data.draw(moving(graph, make_program(graph, data.draw(orders(graph)))))
    is_right(graph, program, around, len(program.moves))


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutant_is_refused_or_right_whenever_copies_happen(kind):
    tried = 0

    @settings(max_examples=3 * EACH)
    @given(st.data())
    def try_mutants(data):
        nonlocal tried
        graph = data.draw(graphs(most=8))
        program = data.draw(moving(graph, make_program(graph, graph.backward), least=1))
        if not program.moves or tried == EACH:
            return
        mutant = data.draw(mutants(program, kind))
        tried += 1
        try:
            predict(graph, mutant, platform=LINK)
        except InvalidProgram:
            return
        is_right(graph, mutant, Surroundings(), tried)

    try_mutants()
    assert tried == EACH


@st.composite
def mutants(draw, program: Program, kind: str) -> Program:
    """The program with one move or its order changed; forward and backward are one list here."""
    both: list[Operation] = [*program.forward, *program.backward]
    turn = len(program.forward)
    moves = [n for n, each in enumerate(both) if not isinstance(each, Run)]
    at = draw(st.sampled_from(moves))
    other = draw(st.integers(0, len(both) - 1))
    if kind == "swapped":
        both[at], both[other] = both[other], both[at]
    elif kind == "of another value":
        values = [each.op for each in both if isinstance(each, Run)]
        both[at] = replace(both[at], value=draw(st.sampled_from(values)))
    else:
        move = both[at]
        if kind != "doubled":
            del both[at]
            turn -= at < turn
        if kind != "dropped":
            both.insert(other, move)
            turn += other < turn
    return replace(program, forward=tuple(both[:turn]), backward=tuple(both[turn:]))


@given(st.data())
def test_any_moves_at_any_place_are_refused_or_right(data):
    graph = data.draw(graphs(most=6))
    program = data.draw(moved_anyhow(graph, make_program(graph, data.draw(orders(graph)))))
    try:
        predict(graph, program, platform=LINK)
    except InvalidProgram:
        return
    is_right(graph, program, Surroundings())


# --- by name -------------------------------------------------------------------------------------------------

LAYER = Step("plain", (1,), (4, 2), 2, 3, 1, True, False, False, False, True, True)
GRAPH = graph_of([LAYER] * 4)
PROGRAM = make_program(GRAPH, GRAPH.backward)
VALUE = next(op for op in PROGRAM.saved if op in GRAPH.forward and op not in GRAPH.results)


def refused(graph: StepGraph, program: Program) -> str:
    with pytest.raises(InvalidProgram) as refusal:
        predict(graph, program, platform=LINK)
    return str(refusal.value)


def test_a_copy_of_a_result_is_waited_for_before_the_caller_has_it():
    """The caller may write over it while it is being copied."""
    program = replace(PROGRAM, forward=(*PROGRAM.forward, Offload(GRAPH.results[0])))
    assert "when the forward ends" in refused(GRAPH, program)
    saved = replace(program, saved=tuple(sorted({*program.saved, GRAPH.results[0]})))
    assert "nobody waits until it is there" in refused(GRAPH, saved)


def test_a_copy_of_a_gradient_is_waited_for_before_the_caller_has_it():
    graph = graph_of([replace(LAYER, parameter=False)] * 2)
    program = make_program(graph, graph.backward)
    gradient = graph.gradients[0][1]
    said = refused(graph, replace(program, backward=(*program.backward, Offload(gradient))))
    assert said.startswith("when the backward ends")


def test_a_copy_that_the_forward_begins_may_end_in_the_backward_if_its_value_is_saved():
    forward = (*PROGRAM.forward, Offload(VALUE))
    backward = (Release(VALUE), Prefetch(VALUE), Await(VALUE), *PROGRAM.backward)
    is_right(GRAPH, replace(PROGRAM, forward=forward, backward=backward), Surroundings())


def test_what_is_sent_to_the_host_comes_back():
    forward = (*PROGRAM.forward, Offload(VALUE))
    last = max(n for n, run in enumerate(PROGRAM.backward) if VALUE in run.frees)
    run = PROGRAM.backward[last]
    keeping = replace(run, frees=tuple(op for op in run.frees if op != VALUE))
    backward = (*PROGRAM.backward[:last], keeping, Release(VALUE), *PROGRAM.backward[last + 1 :])
    assert "never comes back" in refused(GRAPH, replace(PROGRAM, forward=forward, backward=backward))


def test_a_place_on_the_host_is_kept_until_the_step_ends():
    """Two values take turns on the device, and both have a place on the host: one piece is cut once."""
    values = [op for op in PROGRAM.saved if op in GRAPH.forward and op not in GRAPH.results][:2]
    moves = [move(value) for value in values for move in (Offload, Release, Prefetch, Await)]
    program = replace(PROGRAM, backward=(*moves, *PROGRAM.backward))
    prediction = predict(GRAPH, program, platform=LINK)
    assert prediction.host_bytes == slab_of(GRAPH, program).bytes == sum(map(GRAPH.value_bytes, values))
    with pytest.raises(InvalidProgram, match="the host would need 1 bytes more"):
        predict(GRAPH, program, platform=replace(LINK, host_bytes=prediction.host_bytes - 1))


def test_numbers_of_values_on_their_way_name_nothing():
    """What is on its way is held under a negative number, which no program may use."""
    program = replace(PROGRAM, forward=(*PROGRAM.forward, Offload(VALUE), Release(VALUE), Prefetch(VALUE)))
    handed = tuple(op for op in program.saved if op != VALUE)
    assert "is not there when the forward ends" in refused(GRAPH, replace(program, saved=(*handed, ~VALUE)))
    freeing = replace(PROGRAM.backward[0], frees=(*PROGRAM.backward[0].frees, ~VALUE))
    backward = (Release(VALUE), Prefetch(VALUE), freeing, *PROGRAM.backward[1:])
    away = replace(PROGRAM, forward=(*PROGRAM.forward, Offload(VALUE)), backward=backward)
    assert "frees" in refused(GRAPH, away)


def graph_with_a_counter() -> StepGraph:
    """A counter that the step overwrites, a view of it, and a value that replaces it. The backward reads both."""

    def op(index, kind, reads, makes=(), shares=(), **rest):
        return Operator(index, f"op{index}", "t", kind, reads, reads, makes, shares, **rest)

    counter, batch = op(0, "input", (), ((0, 4),)), op(1, "input", (), ((1, 4),))
    arrives = op(2, "gradient", (), ((2, 4),))
    view, replaced = op(3, "forward", (0,), (), (0,)), op(4, "forward", (0,), ((4, 4),))
    result, gradient = op(5, "forward", (1, 3), ((5, 4),)), op(6, "backward", (2, 3, 4), ((6, 4),))
    return StepGraph(
        ops=(counter, batch, arrives, view, replaced, result, gradient),
        inputs=(0, 1),
        arriving=(2,),
        forward=(3, 4, 5),
        backward=(6,),
        results=(5,),
        updates=(4,),
        gradients=((1, 6),),
        parameters=frozenset(),
        overwritten={0: 4},
        storage_bytes={0: 4, 1: 4, 2: 4, 4: 4, 5: 4, 6: 4},
    )


def test_a_view_of_what_comes_from_outside_does_not_move():
    """The step overwrites the counter after the forward, maybe while a view of it is being copied."""
    graph = graph_with_a_counter()
    program = make_program(graph, graph.backward)
    moves = (Release(3), Prefetch(3), Await(3))
    moved = replace(program, forward=(*program.forward, Offload(3)), backward=(*moves, *program.backward))
    assert "memory that comes from outside" in refused(graph, moved)


def test_a_constant_does_not_move():
    """Its storage has no bytes of the step's, and a tensor is there all the same."""
    storages = {**GRAPH.storage_bytes, **dict.fromkeys(GRAPH.storages(VALUE), 0)}
    forward = (*PROGRAM.forward, Offload(VALUE))
    backward = (Release(VALUE), Prefetch(VALUE), Await(VALUE), *PROGRAM.backward)
    constant = replace(GRAPH, storage_bytes=storages)
    constant = constant.with_costs({VALUE: Cost(0.0, 0, tuple((s, 0) for s in GRAPH.storages(VALUE)))})
    assert "no memory of its own" in refused(constant, replace(PROGRAM, forward=forward, backward=backward))


def test_what_dies_when_the_forward_ends_has_been_copied():
    """Who overwrites the counter lets go of what replaces it, maybe while that is being copied."""
    graph = graph_with_a_counter()
    program = make_program(graph, graph.backward)
    saved = tuple(op for op in program.saved if op != 4)
    back = (Prefetch(4), Await(4), *program.backward)
    unfinished = replace(program, forward=(*program.forward, Offload(4)), backward=back, saved=saved)
    assert "when the forward ends" in refused(graph, unfinished)


def test_a_copy_that_is_left_out_does_not_move_as_a_view():
    """It lies in the memory of the whole, which is larger than its place on the host."""
    graph = graph_of([LAYER] * 2)
    whole = next(run for run in make_program(graph, graph.backward).backward_runs if not run.accumulates)
    part = len(graph.ops)
    name = Operator(part, "part", "t", "backward", (whole.op,), (whole.op,), ((999, 1),), ())
    assert graph.value_bytes(whole.op) > 1
    sizes = {**graph.storage_bytes, 999: 1}
    graph = replace(
        graph,
        ops=(*graph.ops, name),
        backward=(*graph.backward, part),
        storage_bytes=sizes,
        part_copies=frozenset((part,)),
    )
    program = make_program(graph, graph.backward)
    at = next(n for n, run in enumerate(program.backward) if whole.op in graph.ops[run.op].reads)
    moves = (Run(part, viewed_in=whole.op), Offload(part), Release(part), Prefetch(part), Await(part))
    backward = (*program.backward[:at], *moves, *program.backward[at:])
    assert "the memory of a larger value" in refused(graph, replace(program, backward=backward))
