"""Programs that move what was chosen: they run right, fit, and wait no more than they must."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from elbowroom.plan.values.choices import Choices
from elbowroom.plan.values.moves import carriers, needs, place, tight
from elbowroom.problem import Platform
from elbowroom.step.operations import Await, Offload, Prefetch, Release
from elbowroom.step.referee import predict
from machine import check
from stepgraphs import graphs, surroundings

RATES = st.sampled_from((0.25, 1.0, 3.0, 1e9))


@st.composite
def platforms(draw) -> Platform:
    duplex = draw(st.one_of(st.none(), st.just(0.0), RATES))
    return Platform(None, draw(RATES), draw(RATES), duplex, draw(st.sampled_from((0.0, 0.5))))


@st.composite
def chosen_moves(draw):
    """A graph, what is around it, values that may move, and a program that keeps these and some others."""
    graph, around = draw(graphs(12)), draw(surroundings())
    choices = Choices(graph, around)
    may = sorted(carriers(graph).values())
    moved = frozenset(op for op in may if draw(st.booleans()))
    count = len(choices.sizes) - 1
    chosen = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    program = choices.program(np.array([0, *chosen], dtype=float), copies_parts=draw(st.booleans()), moved=moved)
    return graph, around, program, moved


@given(chosen_moves(), platforms(), st.floats(0.5, 1.1))
@settings(max_examples=120)
def test_programs_with_moves_run_right_and_fit(chosen, platform, share):
    graph, around, program, moved = chosen
    room = int(share * predict(graph, program, around).peak_bytes)
    placed = place(graph, program, moved, room, around, platform)
    least = check(graph, placed.tight.program, around, platform)
    assert least == placed.tight.prediction
    event("does not fit" if placed.found is None else "moves" if placed.found.program.moves else "moves nothing")
    if placed.found is None:
        assert least.peak_bytes > room
        return
    found = placed.found
    assert check(graph, found.program, around, platform) == found.prediction
    assert found.prediction.peak_bytes <= room
    assert found.prediction.time_s == pytest.approx(predict(graph, program, around).time_s)
    for kind in (Offload, Release, Prefetch, Await):
        values = [each.value for each in found.program.moves if isinstance(each, kind)]
        assert len(set(values)) == len(values)
        assert moved.issuperset(values)


@given(chosen_moves(), st.floats(0.5, 1.1))
@settings(max_examples=50)
def test_with_room_for_all_of_it_nothing_moves_and_a_link_without_end_is_never_waited_for(chosen, share):
    graph, around, program, moved = chosen
    prediction = predict(graph, program, around)
    slow, fast = Platform(bandwidth=1e-9), Platform(bandwidth=1e15)
    assert not place(graph, program, moved, prediction.peak_bytes, around, slow).found.program.moves
    found = place(graph, program, moved, int(share * prediction.peak_bytes), around, fast).found
    if found is not None:
        assert found.time_s == pytest.approx(prediction.time_s, abs=1e-9)


@given(chosen_moves())
@settings(max_examples=50)
def test_the_tight_program_takes_the_fewest_bytes_of_all_with_these_moves(chosen):
    graph, around, program, moved = chosen
    link = Platform(bandwidth=1.0)
    least = tight(graph, program, needs(graph, program, moved))
    peak = check(graph, least, around, link).peak_bytes
    assert place(graph, program, moved, peak - 1, around, link).found is None
    found = place(graph, program, moved, peak, around, link).found
    assert found.prediction.peak_bytes <= peak
