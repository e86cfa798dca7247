"""Programs chosen value by value, beginning with one that fits: they run, and are faster on real networks."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elbowroom.plan.planner import Planner
from elbowroom.plan.values.choices import Predicted
from elbowroom.plan.values.search import Refiner
from elbowroom.step.program import make_program
from elbowroom.step.referee import Surroundings, predict
from machine import check
from stepgraphs import Step, every_single_recomputation, graph_of, graphs, missing, orders, surroundings


@given(st.data(), graphs(), surroundings())
@settings(max_examples=100)
def test_programs_run_right_and_none_that_fits_is_faster_than_the_least(data, graph, around):
    assume(graph.backward)
    start = make_program(graph, data.draw(orders(graph)))
    prediction = predict(graph, start, around)
    refiner = Refiner(graph, around)
    room = prediction.peak_bytes
    for program, predicted in refiner.programs(Predicted(start, prediction), room):
        assert check(graph, program, around) == predicted
        if predicted.peak_bytes <= room:
            assert predicted.time_s >= refiner.least_s(room) * (1 - 1e-9)


def test_from_nothing_kept_to_nearly_the_best():
    """Values are ever larger and ever cheaper: the last ones should go, and be computed again once."""
    count = 8
    graph = graph_of(
        [Step("plain", (1,), (i, i), count - i, 1, 0, *[False] * 4, True, False) for i in range(1, count)]
    )
    order = [op for last in graph.backward for op in (*missing(graph, graph.ops[last].reads, set()), last)]
    start = make_program(graph, order)
    plain = predict(graph, make_program(graph, graph.backward))
    room = plain.peak_bytes * 3 // 4
    assert predict(graph, start).peak_bytes <= room
    assert predict(graph, start).time_s > 2 * plain.time_s
    refiner = Refiner(graph, Surroundings())
    found = [
        p.time_s for _, p in refiner.programs(Predicted(start, predict(graph, start)), room) if p.peak_bytes <= room
    ]
    others = (predict(graph, make_program(graph, order)) for order in every_single_recomputation(graph))
    best = min(p.time_s for p in others if p.peak_bytes <= room)
    assert refiner.least_s(room) <= best
    assert plain.time_s < best <= min(found) < 1.03 * best


NETWORKS = [("unet", False, 0.5), ("siamese", True, 0.35), ("bert", False, 0.35), ("mamba", True, 0.35)]


@pytest.mark.parametrize(("name", "fused", "share"), NETWORKS)
def test_networks_are_planned_faster_value_by_value(name, fused, share):
    pytest.importorskip("torch")
    from captured import captured

    graph, around = captured(name, fused=fused)
    planner = Planner(graph, around)
    room = int(share * planner.everything.prediction.peak_bytes)
    plan = planner.best(room)
    without = Planner(graph, around).best(room, refine=False)
    assert plan.prediction.peak_bytes <= room
    assert plan.method.endswith("then value by value")
    assert plan.prediction.time_s < 0.985 * without.prediction.time_s
