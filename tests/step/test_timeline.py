"""When operations happen: operators in a row, copies beside them on a link of two directions."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elbowroom.problem import Platform
from elbowroom.step.graph import Cost
from elbowroom.step.operations import Await, Offload, Prefetch, Release
from elbowroom.step.program import make_program
from elbowroom.step.referee import predict
from elbowroom.step.timeline import time_line
from moving import may_move, moving
from stepgraphs import Step, graph_of, graphs, orders, surroundings

LAYER = Step("plain", (1,), (4, 2), 2, 3, 1, True, False, False, False, True, True)
GRAPH = graph_of([LAYER] * 4)
PROGRAM = make_program(GRAPH, GRAPH.backward)
FIRST, SECOND, *_ = may_move(GRAPH, PROGRAM)
SIZE = GRAPH.value_bytes(FIRST)


@given(st.data(), surroundings())
def test_without_copies_operators_follow_one_another(data, around):
    graph = data.draw(graphs())
    program = make_program(graph, data.draw(orders(graph)))
    line, prediction = time_line(graph, program, around), predict(graph, program, around)
    assert line.time == pytest.approx(prediction.time_s)
    assert line.peak_bytes == prediction.peak_bytes
    levels = [*prediction.forward_bytes, prediction.between_bytes, *prediction.backward_bytes]
    assert [span.bytes for span in line.computing] == levels
    assert all(a.end == b.start for a, b in pairwise(line.computing))


@given(st.data())
def test_copies_only_ever_add_waiting_and_use_each_direction_one_at_a_time(data):
    graph = data.draw(graphs(most=10))
    program = data.draw(moving(graph, make_program(graph, data.draw(orders(graph)))))
    rates = st.sampled_from((0.5, 1.0, 2.0, 8.0))
    both = data.draw(st.one_of(st.none(), rates))
    platform = Platform(None, data.draw(rates), data.draw(rates), both, data.draw(st.sampled_from((0.0, 0.5))))
    line = time_line(graph, program, platform=platform)
    compute = predict(graph, program, platform=platform).time_s
    assert line.computing[-1].end >= compute - 1e-9
    moved = [each for each in program.moves if isinstance(each, Offload | Prefetch)]
    assert len(line.spans) - len(line.computing) == len(moved)
    for resource, rate in (("to host", platform.to_host), ("from host", platform.from_host)):
        spans = sorted(span for span in line.spans if span.resource == resource)
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(spans))
        for span in spans:
            alone = platform.seconds_per_copy + span.moved_bytes / rate
            slowest = platform.seconds_per_copy + span.moved_bytes / min(rate, both or rate)
            assert alone - 1e-9 <= span.end - span.start <= slowest + 1e-9


def program_that_moves(value, *, at_once):
    saved = tuple(op for op in PROGRAM.saved if op != value)
    made = next(n for n, run in enumerate(PROGRAM.forward) if run.op == value) + 1
    last = max(n for n, run in enumerate(PROGRAM.forward) if value in GRAPH.ops[run.op].reads) + 1
    forward = [*PROGRAM.forward[:made], Offload(value), *PROGRAM.forward[made:]]
    forward.insert(last + 1 if at_once else len(forward), Release(value))
    first = next(n for n, run in enumerate(PROGRAM.backward) if value in GRAPH.ops[run.op].reads)
    backward = list(PROGRAM.backward)
    backward.insert(first, Await(value))
    backward.insert(first if at_once else 0, Prefetch(value))
    return replace(PROGRAM, forward=tuple(forward), backward=tuple(backward), saved=saved)


def test_a_copy_that_has_time_costs_none_and_one_that_has_not_is_waited_for():
    plain = time_line(GRAPH, PROGRAM).time
    fast = Platform(to_host=1e9, from_host=1e9)
    assert time_line(GRAPH, program_that_moves(FIRST, at_once=True), platform=fast).time == pytest.approx(plain)
    slow = Platform(to_host=SIZE / 100, from_host=SIZE / 50)
    line = time_line(GRAPH, program_that_moves(FIRST, at_once=True), platform=slow)
    assert line.time == pytest.approx(plain - GRAPH.ops[PROGRAM.forward[1].op].time + 150, abs=20)
    out, back = (next(s for s in line.spans if s.resource == each) for each in ("to host", "from host"))
    assert (out.end - out.start, back.end - back.start) == (pytest.approx(100), pytest.approx(50))


def test_both_directions_share_the_link_while_both_are_busy():
    """One value is on its way out while another, of the same size, comes back: at two bytes a second, or at one."""
    forward = (*PROGRAM.forward, Offload(FIRST), Release(FIRST), Offload(SECOND))
    backward = (Prefetch(FIRST), Await(FIRST), Release(SECOND), Prefetch(SECOND), Await(SECOND), *PROGRAM.backward)
    saved = tuple(op for op in PROGRAM.saved if op != FIRST)
    program = replace(PROGRAM, forward=forward, backward=backward, saved=saved)
    assert second_copy_out(program, Platform(to_host=2.0, from_host=2.0)) == pytest.approx(SIZE / 2)
    assert second_copy_out(program, Platform(to_host=2.0, from_host=2.0, duplex=1.0)) == pytest.approx(SIZE)


def second_copy_out(program, platform) -> float:
    """How long it takes."""
    _, span = (span for span in time_line(GRAPH, program, platform=platform).spans if span.resource == "to host")
    return span.end - span.start


@pytest.mark.parametrize("seconds_per_copy", [0.0, 1e-7, 0.1])
def test_copies_end_however_long_the_step_has_taken(seconds_per_copy):
    """A rest of a copy that is too short to move the clock ends it."""
    slow = {op: Cost(1e9 / 3, 0) for op in GRAPH.forward}
    graph = GRAPH.with_costs(slow)
    program = program_that_moves(FIRST, at_once=True)
    for rate in (0.3, 7.0, 1e7 / 3):
        platform = Platform(to_host=rate, from_host=rate / 3, seconds_per_copy=seconds_per_copy)
        line = time_line(graph, program, platform=platform)
        assert {span.resource for span in line.spans} == {"compute", "to host", "from host"}
