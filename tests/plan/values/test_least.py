"""The least possible with a link: no program is faster, wherever its copies begin and end."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from elbowroom.plan.values.choices import Choices
from elbowroom.plan.values.least import Least
from elbowroom.problem import Platform
from elbowroom.step.program import make_program
from elbowroom.step.referee import Surroundings, predict
from elbowroom.step.timeline import time_line
from exhaustive_moves import chain, every_program, the_fastest, with_moves
from moving import may_move, moving
from stepgraphs import graphs, orders, surroundings

RATES = st.sampled_from((0.3, 1.0, 2.5, 40.0))


@st.composite
def platforms(draw) -> Platform:
    duplex = draw(st.one_of(st.none(), st.just(0.0), RATES))
    return Platform(None, draw(RATES), draw(RATES), duplex, draw(st.sampled_from((0.0, 0.7))))


@given(st.data(), graphs(10), surroundings(), platforms())
@settings(max_examples=120)
def test_no_program_that_moves_is_faster_than_the_least(data, graph, around, platform):
    program = data.draw(moving(graph, make_program(graph, data.draw(orders(graph)))))
    line = time_line(graph, program, around, platform)
    host = predict(graph, program, around, platform).host_bytes
    least_s = Least(graph, around, replace(platform, host_bytes=host)).seconds(line.peak_bytes)
    event("moves" if program.moves else "moves nothing")
    event("waits" if line.time > predict(graph, program, around, platform).time_s + 1e-9 else "waits for nothing")
    assert least_s <= line.time * (1 + 1e-9)


@given(graphs(), surroundings(), platforms(), st.floats(0.0, 1.0))
@settings(max_examples=25)
def test_the_least_falls_with_the_room_and_the_host_and_lies_below_that_without_a_link(graph, around, link, share):
    peak = predict(graph, make_program(graph, graph.backward), around).peak_bytes
    rooms = range(0, peak + 1, max(1, peak // 5))
    without, found = Choices(graph, around), Least(graph, around, link)
    little = Least(graph, around, replace(link, host_bytes=int(share * peak)))
    times = [found.seconds(room) for room in rooms]
    assert all(less >= more * (1 - 1e-9) for less, more in pairwise(times))
    for room, time in zip(rooms, times, strict=True):
        assert time * (1 - 1e-9) <= little.seconds(room) <= without.least_s(room) * (1 + 1e-9)


@given(graphs(), surroundings())
@settings(max_examples=25)
def test_without_memory_on_the_host_or_with_no_link_worth_the_name_it_is_the_bound_without(graph, around):
    peak = predict(graph, make_program(graph, graph.backward), around).peak_bytes
    without = Choices(graph, around)
    for platform in (Platform(bandwidth=1.0, host_bytes=0), Platform(bandwidth=1e-9)):
        found = Least(graph, around, platform)
        for room in range(0, peak + 1, max(1, peak // 4)):
            expected = without.least_s(room)
            if expected < float("inf"):
                assert found.seconds(room) == pytest.approx(expected, rel=1e-3)


# --- every program of small graphs ---------------------------------------------------------------------------


LINKS = (
    Platform(bandwidth=4.0),
    Platform(to_host=2.0, from_host=8.0),
    Platform(to_host=6.0, from_host=6.0, duplex=4.0, seconds_per_copy=0.25),
    Platform(to_host=3.0, from_host=3.0, host_bytes=8),
)


@pytest.mark.parametrize("layers", [((4, 2), (8, 1), (4, 3), (2, 1)), ((6, 9), (6, 9), (4, 9), (3, 1))])
@pytest.mark.parametrize("link", LINKS, ids=["turns", "two rates", "latency", "little host memory"])
def test_no_program_of_a_small_graph_is_faster_than_the_least(layers, link):
    """What is reserved for a loss outside makes the moment between forward and backward the highest."""
    graph, around = chain(*layers), Surroundings(outside_bytes=100)
    fastest = the_fastest(every_program(graph), graph, around, link)
    least = Least(graph, around, link)
    assert len(fastest) > 3
    gaps = [time / least.seconds(peak) for peak, time in fastest.items()]
    assert min(gaps) == pytest.approx(1)  # with room for everything
    assert max(gaps) < 1.2


@pytest.mark.parametrize("link", LINKS[:3], ids=["turns", "two rates", "latency"])
@pytest.mark.parametrize("slower", [1, 8, 64])
def test_where_nothing_may_run_again_the_least_is_reached(link, slower):
    """What the first layer makes goes after a second, and four seconds of work wait until it is back."""
    graph, around = chain((8, 1), (8, 1), (2, 1)), Surroundings(outside_bytes=100)
    graph = replace(graph, kept=frozenset(graph.forward))
    rates = (rate and rate / slower for rate in (link.bandwidth, link.to_host, link.from_host, link.duplex))
    link = Platform(*rates, link.seconds_per_copy)
    program = make_program(graph, graph.backward)
    most = predict(graph, program, around).peak_bytes
    found = (
        each
        for count in (0, 1)
        for moved in combinations(may_move(graph, program), count)
        for each in with_moves(graph, program, moved)
    )
    fastest = the_fastest(found, graph, around, link)
    least_s = Least(graph, around, link).seconds(most - 8)
    out, back = (link.seconds_per_copy + 8 / rate for rate in (link.rate_to_host, link.rate_from_host))
    assert least_s == pytest.approx(max(3, 1 + out) + max(6, back + 4))
    assert fastest[most - 8] == pytest.approx(least_s)
