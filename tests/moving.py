"""Programs whose values go to the host and back."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from elbowroom.step.graph import StepGraph
from elbowroom.step.operations import Await, Offload, Operation, Prefetch, Release, Run
from elbowroom.step.program import Program, reads_of


def may_move(graph: StepGraph, program: Program) -> list[int]:
    """Saved values that the forward makes and nobody outside holds."""
    outside = {*graph.results, *graph.updates}
    made = {run.op for run in program.forward_runs}
    return [op for op in program.saved if op in made and op not in outside and graph.ops[op].storable]


@st.composite
def moving(draw, graph: StepGraph, program: Program) -> Program:
    """The same program with some of its saved values on the host between forward and backward."""
    candidates = may_move(graph, program)
    chosen = draw(st.lists(st.sampled_from(candidates), unique=True, max_size=3)) if candidates else []
    for value in chosen:
        program = draw(_moved(graph, program, value))
    return program


@st.composite
def _moved(draw, graph: StepGraph, program: Program, value: int) -> Program:
    forward: list[Operation] = list(program.forward)
    backward: list[Operation] = list(program.backward)
    made = next(n for n, each in enumerate(forward) if isinstance(each, Run) and each.op == value)
    last_read = max((n for n, each in enumerate(forward) if _reads(graph, each, value)), default=made)
    begin = draw(st.integers(made + 1, len(forward)))
    release = draw(st.integers(max(begin, last_read + 1), len(forward)))
    forward.insert(release, Release(value))
    forward.insert(begin, Offload(value))
    first = next(n for n, each in enumerate(backward) if _reads(graph, each, value))
    arrived = draw(st.integers(0, first))
    asked = draw(st.integers(0, arrived))
    backward.insert(arrived, Await(value))
    backward.insert(asked, Prefetch(value, keeps=draw(st.booleans())))
    saved = tuple(op for op in program.saved if op != value)
    return replace(program, forward=tuple(forward), backward=tuple(backward), saved=saved)


def _reads(graph: StepGraph, operation: Operation, value: int) -> bool:
    return isinstance(operation, Run) and value in reads_of(graph, operation)
