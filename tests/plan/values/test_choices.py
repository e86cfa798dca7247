"""Choices value by value: what follows from them runs, and nothing is faster than their bound."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elbowroom.plan.values.choices import Choices
from elbowroom.step.program import make_program
from elbowroom.step.referee import Surroundings, predict
from machine import check
from stepgraphs import FORMS, Step, graph_of, graphs, orders, surroundings

PHASES = st.integers(1, 4)
# Of a view of an input and something new in one tuple, the view needs no storage, and still has to be made.
UNMIXED = tuple(form for form in FORMS if form != "mixed")


@st.composite
def choices(draw, forms=FORMS):
    """Of a random graph, and a random one of them, which may make no sense; the first is always nothing."""
    found = Choices(draw(graphs(forms=forms)), draw(surroundings()), draw(PHASES))
    count = len(found.sizes) - 1
    chosen = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    return found, np.array([0, *chosen], dtype=float)


@given(st.data(), graphs(), surroundings())
@settings(max_examples=200)
def test_no_program_is_faster_than_the_least(data, graph, around):
    prediction = predict(graph, make_program(graph, data.draw(orders(graph))), around)
    least_s = Choices(graph, around).least_s(prediction.peak_bytes)
    assert least_s <= prediction.time_s * (1 + 1e-9)


@given(graphs(), surroundings())
def test_with_room_for_everything_the_least_is_plain_execution(graph, around):
    """Less only where something is computed for the backward alone: in halves, the forward seems to do for both."""
    plain = predict(graph, make_program(graph, graph.backward, copies_parts=False), around)
    found = Choices(graph, around)
    least_s = found.least_s(plain.peak_bytes)
    assert least_s <= plain.time_s * (1 + 1e-9)
    if not found.ahead:
        assert least_s == pytest.approx(plain.time_s)


@given(graphs(), surroundings())
@settings(max_examples=50)
def test_the_least_falls_with_the_room(graph, around):
    peak = predict(graph, make_program(graph, graph.backward), around).peak_bytes
    found = Choices(graph, around)
    times = [found.least_s(room) for room in range(0, peak + 1, max(1, peak // 7))]
    assert all(less >= more - 1e-9 for less, more in pairwise(times))


@given(choices())
@settings(max_examples=200)
def test_any_choice_is_a_program_that_runs_right(chosen):
    found, values = chosen
    check(found.graph, found.program(values, copies_parts=True), found.around)


@given(choices(UNMIXED))
@settings(max_examples=200)
def test_what_is_read_off_a_program_makes_the_same_program(chosen):
    found, values = chosen
    program = found.program(values, copies_parts=True)
    lives = found.lives(program, predict(found.graph, program, found.around))
    assert found.program(lives.chosen, copies_parts=True) == program


@given(choices())
@settings(max_examples=100)
def test_rows_tell_what_a_program_takes(chosen):
    found, values = chosen
    program = found.program(values, copies_parts=True)
    prediction = predict(found.graph, program, found.around)
    lives = found.lives(program, prediction)
    highest = found.highest(lives)
    assert lives.bytes[highest[0]] == lives.bytes.max()
    assert prediction.peak_bytes == max(0, lives.bytes.max())
    for (row, besides), moment in zip(found.rows(lives, highest), highest, strict=True):
        assert row @ lives.chosen + besides == pytest.approx(lives.bytes[moment])


# --- by hand -------------------------------------------------------------------------------------------------


def step(form: str, size: int, time: int) -> Step:
    return Step(form, (1,), (size, size), time, 1, 0, False, False, False, False, True, False)


def test_the_cheapest_is_computed_again():
    graph = graph_of([step("plain", 8, time) for time in (5, 1, 3)])
    found = Choices(graph, Surroundings())
    plain = predict(graph, make_program(graph, graph.backward), Surroundings())
    bounds = [found.least_s(plain.between_bytes - size) - plain.time_s for size in (0, 4, 8)]
    assert bounds == pytest.approx([0, 0.5, 1])


def test_what_only_the_backward_needs_may_wait_for_it():
    """Computed in the backward alone, it takes no more time."""
    graph = graph_of([step("plain", 1, 1), step("aside", 8, 5), step("plain", 1, 1)])
    plain = predict(graph, make_program(graph, graph.backward), Surroundings())
    assert Choices(graph, Surroundings()).least_s(plain.between_bytes - 8) == pytest.approx(plain.time_s)
