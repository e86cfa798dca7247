"""Mutants: a program with one thing wrong is refused by the referee, or it is right all the same.

The machine that runs a program with symbols shares no code with the package. It says whether the gradients are those
of the plain step and counts bytes; what the referee lets pass must be right and take exactly what was predicted.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elbowroom.errors import InvalidProgram
from elbowroom.problem import Platform
from elbowroom.step.operations import Await, Offload, Operation, Prefetch, Release, Run
from elbowroom.step.program import Program, make_program
from elbowroom.step.referee import predict
from machine import run
from moving import moving
from stepgraphs import graphs, orders, surroundings

LINK = Platform(to_host=2.0, from_host=3.0, duplex=1.5, seconds_per_copy=0.25)
KINDS = "dropped", "doubled", "swapped", "pointed elsewhere", "handed over wrongly"
EACH = 400  # of five kinds: two thousand mutants


@st.composite
def programs(draw):
    """A graph, a program that runs right, some of whose values may go to the host and back, and what is around it."""
    graph = draw(graphs(most=10))
    program = make_program(graph, draw(orders(graph)))
    if draw(st.booleans()):
        program = draw(moving(graph, program))
    return graph, program, draw(surroundings())


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutant_is_refused_or_right(kind):
    survivors = 0

    @settings(max_examples=EACH)
    @given(programs(), st.data())
    def try_mutants(made, data):
        nonlocal survivors
        graph, program, around = made
        predict(graph, program, around, LINK)  # the program itself is fine
        mutant = data.draw(mutants(program, kind, len(graph.ops)))
        try:
            prediction = predict(graph, mutant, around, LINK)
        except InvalidProgram:
            return
        survivors += 1
        account = run(graph, mutant, around)
        assert list(prediction.forward_bytes) == account.forward_bytes
        assert list(prediction.backward_bytes) == account.backward_bytes
        assert prediction.between_bytes == account.between_bytes

    try_mutants()
    if kind == "swapped":
        assert survivors  # many orders are right


@st.composite
def mutants(draw, program: Program, kind: str, count: int) -> Program:
    """The program with one change. Numbers that are pointed elsewhere may be those of no operator."""
    if kind == "handed over wrongly":
        return draw(handed_wrongly(program, count))
    side = draw(st.sampled_from([name for name in ("forward", "backward") if getattr(program, name)]))
    operations: list[Operation] = list(getattr(program, side))
    at = draw(st.integers(0, len(operations) - 1))
    if kind == "dropped":
        del operations[at]
    elif kind == "doubled":
        operations.insert(draw(st.integers(at, len(operations))), operations[at])
    elif kind == "swapped":
        other = draw(st.integers(0, len(operations) - 1))
        operations[at], operations[other] = operations[other], operations[at]
    else:
        operations[at] = draw(elsewhere(operations[at], count))
    return replace(program, **{side: tuple(operations)})


@st.composite
def elsewhere(draw, operation: Operation, count: int) -> Operation:
    """An operation that names another operator, or does something else with what it names."""
    number = st.integers(-1, count)
    if not isinstance(operation, Run):
        kinds = Offload, Release, Prefetch, Await
        return draw(st.sampled_from(kinds))(draw(st.one_of(st.just(operation.value), number)))
    field = draw(st.sampled_from(("op", "again", "frees", "reuses", "accumulates", "last_draw", "viewed_in")))
    if field == "op":
        return replace(operation, op=draw(number))
    if field in ("again", "last_draw"):
        return replace(operation, **{field: not getattr(operation, field)})
    if field in ("reuses", "viewed_in"):
        return replace(operation, **{field: draw(st.one_of(st.none(), number))})
    values = list(getattr(operation, field))
    if values and draw(st.booleans()):
        values.pop(draw(st.integers(0, len(values) - 1)))
    else:
        values.append(draw(number))
    return replace(operation, **{field: tuple(values)})


@st.composite
def handed_wrongly(draw, program: Program, count: int) -> Program:
    """What goes from forward to backward has one value more or less."""
    field = draw(st.sampled_from(("saved", "reseeded")))
    values = list(getattr(program, field))
    if values and draw(st.booleans()):
        values.pop(draw(st.integers(0, len(values) - 1)))
    else:
        values.append(draw(st.integers(0, count - 1)))
    return replace(program, **{field: tuple(values)})
