"""What a plan says of moves is what the time line says of them, in operations instead of seconds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elbowroom.plan.moved import schedule_traffic, traffic_of
from elbowroom.plan.plan import Plan
from elbowroom.plan.planner import Planner
from elbowroom.plan.regions import region_plan
from elbowroom.problem import Platform
from elbowroom.solve import solve
from elbowroom.step.operations import Await, Offload, Prefetch, Release
from elbowroom.step.program import make_program
from elbowroom.step.referee import Surroundings, predict
from elbowroom.step.timeline import time_line
from moving import moving
from offloaded import random_case
from stepgraphs import graphs, orders

RATES = st.sampled_from((0.2, 1.0, 3.0, 20.0))


@st.composite
def programs(draw):
    """A graph, a program that moves some of its values, and a link."""
    graph = draw(graphs(most=10))
    program = draw(moving(graph, make_program(graph, draw(orders(graph)))))
    both = draw(st.one_of(st.none(), st.just(0.0), RATES))
    return graph, program, Platform(None, draw(RATES), draw(RATES), both, draw(st.sampled_from((0.0, 0.3))))


@given(programs())
def test_transfers_are_under_way_between_the_operations_that_ask_and_wait(problem):
    graph, program, platform = problem
    traffic = traffic_of(graph, program, Surroundings(), platform)
    operations = [*program.forward, None, *program.backward]
    for each in traffic.transfers:
        ask, wait = (Offload, Release) if each.direction == "to host" else (Prefetch, Await)
        places = {
            type(op): n for n, op in enumerate(operations) if isinstance(op, ask | wait) and op.value == each.value
        }
        assert places[ask] <= each.begins <= each.ends <= max(places[wait], each.begins)
        assert each.bytes == graph.value_bytes(each.value)
    for direction in ("to host", "from host"):
        lane = [each for each in traffic.transfers if each.direction == direction]
        assert all(a.ends <= b.ends for a, b in pairwise(lane))
        assert traffic.bytes_moved(direction) == sum(each.bytes for each in lane)
    moved = {move.value for move in program.moves}
    assert {each.value for each in traffic.values} == moved
    assert traffic.host_bytes == sum(each.bytes for each in traffic.values) >= predict_host(graph, program, platform)


def predict_host(graph, program, platform) -> int:
    return predict(graph, program, platform=platform).host_bytes


@given(programs())
def test_waiting_is_what_the_step_takes_longer_than_its_operators(problem):
    graph, program, platform = problem
    traffic = traffic_of(graph, program, Surroundings(), platform)
    line, prediction = time_line(graph, program, platform=platform), predict(graph, program, platform=platform)
    assert line.computing[-1].end == pytest.approx(prediction.time_s + traffic.waits_s)
    assert traffic.copying_s == pytest.approx(sum(span.end - span.start for span in line.transfers))
    assert bool(traffic.waits_at) == (traffic.waits_s > 0)
    assert traffic.copying_s >= traffic.waits_s * (1 - 1e-9)  # nothing else is waited for


@given(programs(), st.integers(1, 3))
def test_the_time_line_of_a_plan_has_all_its_transfers(problem, count):
    graph, program, platform = problem
    planner = Planner(graph, Surroundings())
    prediction = predict(graph, program, platform=platform)
    planned = replace(planner.everything, program=program, prediction=prediction, platform=platform)
    region = region_plan(planner, planned, "")
    plan = Plan(100, {"parameters": 10}, (region,) * count, {"device": "cpu"}, "", platform=platform)
    line, levels = plan.timeline, count * (len(region.forward_levels) + len(region.backward_levels))
    assert len(line.computing) == levels == line.time
    traffic = region.traffic
    transfers = () if traffic is None else traffic.transfers
    assert len(line.transfers) == count * len(transfers)
    assert all(0 <= span.start < span.end <= levels for span in line.transfers)
    assert sum(span.waits for span in line.computing) == count * (0 if traffic is None else len(traffic.waits_at))
    assert plan.moved_bytes("to host") == count * sum(each.bytes for each in transfers if each.direction == "to host")
    assert plan.host_bytes == sum(span.moved_bytes for span in line.transfers if span.resource == "to host")
    assert sum(module.moved_bytes for module in region.modules) * count == plan.host_bytes
    if count == 1:
        assert [(span.start, span.end) for span in line.transfers] == [
            (each.begins, each.ends + 1) for each in sorted(transfers, key=lambda each: each.begins)
        ]


def test_schedules_over_stages_say_the_same():
    moving = 0
    for seed in range(40):
        rng = Random(seed)
        chain, platform, _ = random_case(rng, 6)
        most = solve(chain, None, "store-all").peak_bytes
        result = solve(chain, rng.randint(most // 2, most), "offload-best", platform=platform)
        if result.simulation is None:
            continue
        traffic = schedule_traffic(chain, result.simulation, 7)
        assert (traffic is not None) == bool(result.simulation.transfers)
        if traffic is not None:
            moving += 1
            check_traffic(traffic, result.simulation)
    assert moving > 9


def check_traffic(traffic, simulation) -> None:
    assert traffic.host_bytes == 7
    assert traffic.waits_s == pytest.approx(simulation.stall_time)
    assert all(simulation.spans[at].waits for at in traffic.waits_at)
    assert {each.value for each in traffic.values} == {each.value for each in traffic.transfers}
    transfers = sorted(simulation.transfers, key=lambda span: span.start)
    for each, span in zip(traffic.transfers, transfers, strict=True):
        assert (each.direction, each.bytes) == (span.resource, span.moved_bytes)
        begins, ends = simulation.spans[each.begins], simulation.spans[each.ends]
        assert begins.start <= span.start + 1e-6 <= begins.end + 2e-6
        assert ends.start - 1e-6 <= span.end <= ends.end + 1e-6
