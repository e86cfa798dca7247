"""Programs found that move values: all run right and fit, and on small graphs one is nearly as fast as any."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elbowroom.plan.planner import Planner
from elbowroom.plan.values.choices import Predicted
from elbowroom.plan.values.least import Least
from elbowroom.plan.values.move_search import MoveSearch
from elbowroom.problem import Platform
from elbowroom.step.program import make_program
from elbowroom.step.referee import Surroundings, predict
from elbowroom.step.timeline import time_line
from exhaustive_moves import chain, every_program, the_fastest
from machine import check
from stepgraphs import Step, graph_of, graphs, orders, surroundings

RATES = st.sampled_from((0.3, 2.0, 50.0))


def predicted(graph, program, around) -> Predicted:
    return Predicted(program, predict(graph, program, around))


@given(st.data(), graphs(12), surroundings(), RATES, RATES, st.sampled_from((None, 0.0, 1.0)), st.floats(0.5, 1.0))
@settings(max_examples=50)
def test_all_that_is_found_runs_right_fits_and_is_no_faster_than_the_least(
    data, graph, around, out, back, both, share
):
    starts = [make_program(graph, each) for each in (graph.backward, data.draw(orders(graph)))]
    room = int(share * predict(graph, starts[0], around).peak_bytes)
    host = data.draw(st.one_of(st.none(), st.integers(0, 15)))
    platform = Platform(None, out, back, both, data.draw(st.sampled_from((0.0, 0.5))), host)
    least_s = Least(graph, around, platform).seconds(room)
    search = MoveSearch(graph, around, platform)
    for program, prediction, time_s in search.programs([predicted(graph, each, around) for each in starts], room):
        assert check(graph, program, around, platform) == prediction
        assert prediction.peak_bytes <= room
        assert host is None or prediction.host_bytes <= host
        assert time_s == pytest.approx(time_line(graph, program, around, platform).time)
        assert time_s >= least_s * (1 - 1e-9)


SMALL = [
    ((4, 2), (8, 1), (4, 3), (2, 1)),
    ((6, 9), (6, 9), (4, 9), (3, 1)),
    ((8, 1), (8, 1), (8, 1), (8, 1)),
    ((2, 5), (9, 1), (2, 5), (9, 1)),
]


@pytest.mark.parametrize("layers", SMALL)
@pytest.mark.parametrize(
    "link", [Platform(bandwidth=4.0), Platform(to_host=2.0, from_host=6.0, seconds_per_copy=0.5)]
)
def test_small_graphs_are_planned_nearly_as_fast_as_by_trying_everything(layers, link):
    graph = chain(*layers)
    fastest = the_fastest(every_program(graph), graph, Surroundings(), link)
    planner = Planner(graph, Surroundings(), platform=link)
    for room in fastest:
        best_s = min(time for peak, time in fastest.items() if peak <= room)
        plan = planner.best(room)
        assert plan is not None
        assert plan.time_s <= 1.1 * best_s


def test_a_link_that_keeps_up_makes_recomputation_needless():
    layer = Step("plain", (1,), (8, 1), 4, 8, 0, True, False, False, False, True, False)
    graph = graph_of([layer, replace(layer, sizes=(4, 1)), layer] * 4)
    plain = predicted(graph, make_program(graph, graph.backward), Surroundings())
    platform = Platform(to_host=4.0, from_host=4.0)
    room = plain.prediction.peak_bytes // 2
    found = list(MoveSearch(graph, Surroundings(), platform).programs([plain], room))
    assert min(each.time_s for each in found) == pytest.approx(plain.prediction.time_s)
    # One that is fast enough ends the search.
    few = list(MoveSearch(graph, Surroundings(), platform).programs([plain], room, plain.prediction.time_s))
    assert len(few) < len(found)
