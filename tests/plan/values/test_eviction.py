"""Programs made smaller value by value: they run right, fit, and are tried in the order of what they promise."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elbowroom.plan.values import eviction
from elbowroom.plan.values.choices import Choices, Predicted
from elbowroom.plan.values.eviction import Eviction
from elbowroom.step.program import make_program
from elbowroom.step.referee import predict
from machine import check
from stepgraphs import graphs, surroundings


def everything(graph, around):
    program = make_program(graph, graph.backward, copies_parts=False)
    return Predicted(program, predict(graph, program, around))


@given(graphs(16), surroundings(), st.floats(0.3, 1.0))
@settings(max_examples=100)
def test_what_comes_out_fits_and_runs_right(graph, around, share):
    start = everything(graph, around)
    room = int(share * start.prediction.peak_bytes)
    found = Eviction(Choices(graph, around)).until(lambda _, p: p.peak_bytes <= room, start, room)
    if found is not None:
        assert check(graph, found.program, around) == found.prediction
        assert found.prediction.peak_bytes <= room
    if share == 1.0:
        assert found is not None


@given(graphs(16), surroundings(), st.floats(0.3, 0.9))
@settings(max_examples=60)
def test_nothing_comes_out_that_is_no_faster_than_what_there_is(graph, around, share):
    start = everything(graph, around)
    room = int(share * start.prediction.peak_bytes)
    search = Eviction(Choices(graph, around))

    def fits(_, prediction):
        return prediction.peak_bytes <= room

    found = search.until(fits, start, room)
    if found is not None:
        assert search.until(fits, start, room, found) is None


@given(graphs(16), surroundings())
@settings(max_examples=40)
def test_no_more_programs_are_made_than_effort_allows(graph, around):
    made = []
    search = Eviction(Choices(graph, around))

    def fits(program, prediction):
        made.append(program)
        return False

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(eviction, "_EFFORT", 0)
        patched.setattr(eviction, "_FEWEST", 5)
        patched.setattr(eviction, "_SMALL", 0.0)
        assert search.until(fits, everything(graph, around), 1) is None
    assert len(made) <= 6
