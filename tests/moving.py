"""Programs whose values go to the host and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import strategies as st

from elbowroom.step.graph import StepGraph
from elbowroom.step.operations import Await, Offload, Operation, Prefetch, Release, Run
from elbowroom.step.program import Program, reads_of


def may_move(graph: StepGraph, program: Program) -> list[int]:
    """Saved values that the forward makes in memory of its own, and nobody outside holds."""
    outside = {*graph.results, *graph.updates}
    lent = {storage for op in graph.inputs for storage in graph.storages(op)}
    made = {run.op for run in program.forward_runs if lent.isdisjoint(graph.storages(run.op))}
    candidates = [op for op in program.saved if op in made and op not in outside]
    return [op for op in candidates if graph.ops[op].storable and graph.value_bytes(op)]


@st.composite
def moving(draw, graph: StepGraph, program: Program, least: int = 0) -> Program:
    """The same program with some of its saved values on the host between forward and backward; `least`, if it can."""
    candidates = may_move(graph, program)
    least = min(least, len(candidates))
    choices = st.lists(st.sampled_from(candidates), unique=True, min_size=least, max_size=3) if candidates else None
    chosen = [] if choices is None else draw(choices)
    for value in chosen:
        program = moved(graph, program, value, lambda low, high: draw(st.integers(low, high)))
    return program


def moved(graph: StepGraph, program: Program, value: int, choose: Callable[[int, int], int]) -> Program:
    """The program with one more value that moves, at places that `choose(lowest, highest)` tells.

    It is released in the forward, or handed to the backward while its copy may still be under way.
    """
    forward: list[Operation] = list(program.forward)
    backward: list[Operation] = list(program.backward)
    made = next(n for n, each in enumerate(forward) if isinstance(each, Run) and each.op == value)
    last_read = max((n for n, each in enumerate(forward) if _reads(graph, each, value)), default=made)
    begin = choose(made + 1, len(forward))
    release = choose(max(begin, last_read + 1), len(forward))
    first = next(n for n, each in enumerate(backward) if _reads(graph, each, value))
    arrived = choose(0, first)
    asked = choose(0, arrived)
    backward.insert(arrived, Await(value))
    backward.insert(asked, Prefetch(value, keeps=bool(choose(0, 1))))
    is_late = _alone(graph, value) and bool(choose(0, 1))
    if is_late:
        backward.insert(choose(0, asked), Release(value))
    else:
        forward.insert(release, Release(value))
    forward.insert(begin, Offload(value))
    saved = tuple(op for op in program.saved if op != value or is_late)
    return replace(program, forward=tuple(forward), backward=tuple(backward), saved=saved)


def _alone(graph: StepGraph, value: int) -> bool:
    """Whether nobody outside can reach the memory of a value between forward and backward."""
    outside = {storage for op in (*graph.results, *graph.updates) for storage in graph.storages(op)}
    return outside.isdisjoint(graph.storages(value))


def _reads(graph: StepGraph, operation: Operation, value: int) -> bool:
    return isinstance(operation, Run) and value in reads_of(graph, operation)


@st.composite
def moved_anyhow(draw, graph: StepGraph, program: Program) -> Program:
    """The same program with moves of any values at any place, in an order that may make sense."""
    for _ in range(draw(st.integers(1, 2))):
        both: list[Operation] = [*program.forward, *program.backward]
        value = draw(st.sampled_from([each.op for each in both if isinstance(each, Run)]))
        made = next(n for n, each in enumerate(both) if isinstance(each, Run) and each.op == value)
        ends = draw(st.sampled_from((len(program.forward), len(both))))
        moves = draw(_in_a_row(value))
        places = draw(st.lists(st.integers(made + 1, max(ends, made + 1)), min_size=len(moves), max_size=len(moves)))
        turn = len(program.forward)
        for later, (move, place) in enumerate(zip(moves, sorted(places), strict=True)):
            both.insert(place + later, move)
            turn += place + later < turn or (place + later == turn and draw(st.booleans()))
        if draw(st.booleans()):
            both = [_keeping(each, value) for each in both]
        saved = tuple(op for op in program.saved if op != value or draw(st.booleans()))
        program = replace(program, forward=tuple(both[:turn]), backward=tuple(both[turn:]), saved=saved)
    return program


@st.composite
def _in_a_row(draw, value: int) -> list[Operation]:
    """Away and back, once or twice, or the beginning of that."""
    moves: list[Operation] = []
    for _ in range(draw(st.integers(1, 2))):
        moves += Release(value), Prefetch(value, keeps=draw(st.booleans())), Await(value), Offload(value)
    moves = [Offload(value), *moves[: draw(st.sampled_from((0, 1, 3, 3, 3, 7)))]]
    return moves if draw(st.booleans()) else [*moves, Release(value)]


def _keeping(operation: Operation, value: int) -> Operation:
    if not isinstance(operation, Run):
        return operation
    return replace(operation, frees=tuple(op for op in operation.frees if op != value))
