"""Plans of steps on a machine with a link to the host: they run right, fit, and are never slower for it."""

from __future__ import annotations

import json

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from elbowroom.plan.files import FORMAT, region_from_json, region_to_json
from elbowroom.plan.planner import Planner
from elbowroom.plan.regions import region_plan
from elbowroom.plan.values.moves import carriers, needs, tight
from elbowroom.problem import Platform
from elbowroom.step.operations import Offload, Prefetch, Release
from elbowroom.step.referee import Surroundings, predict
from elbowroom.step.timeline import time_line
from machine import check
from stepgraphs import Step, graph_of, graphs, surroundings

RATES = st.sampled_from((0.2, 1.0, 3.0, 20.0))


@st.composite
def platforms(draw) -> Platform:
    both, host = draw(st.one_of(st.none(), st.just(0.0), RATES)), draw(st.one_of(st.none(), st.integers(0, 20)))
    return Platform(None, draw(RATES), draw(RATES), both, draw(st.sampled_from((0.0, 0.3))), host)


@st.composite
def problems(draw, most: int = 12):
    """A graph, what is around it, and two rooms in rising order: from a little less than what is left when everything
    moves that may, to all that it takes without."""
    graph, around = draw(graphs(most)), draw(surroundings())
    everything = Planner(graph, around).everything
    low, high = moved_peak(graph, around, everything.program), everything.prediction.peak_bytes
    return graph, around, sorted(draw(st.lists(st.integers(low - 2, max(low, high)), min_size=2, max_size=2)))


def moved_peak(graph, around, program) -> int:
    """The peak of a program when all of its values move that may."""
    moving = tight(graph, program, needs(graph, program, carriers(graph).values()))
    return predict(graph, moving, around, Platform(bandwidth=1.0)).peak_bytes


@given(problems(), platforms())
@settings(max_examples=40)
def test_a_plan_with_moves_runs_right_fits_and_is_as_fast_as_it_says(problem, platform):
    graph, around, rooms = problem
    still, planner = Planner(graph, around), Planner(graph, around, platform=platform)
    times = []
    for room in rooms:
        without, plan = still.best(room), planner.best(room)
        assert without is None or plan.time_s <= without.time_s
        if plan is None:
            continue
        times.append(plan.time_s)
        event("moves" if plan.program.moves else "moves nothing")
        assert check(graph, plan.program, around, platform) == plan.prediction
        assert plan.prediction.peak_bytes <= room
        assert platform.host_bytes is None or plan.prediction.host_bytes <= platform.host_bytes
        assert plan.time_s == pytest.approx(time_line(graph, plan.program, around, platform).time)
        assert plan.time_s >= planner.least_s(room) * (1 - 1e-9)
        moved = {each.value for each in plan.program.moves}
        assert moved <= set(carriers(graph).values())
        for kind in (Offload, Release, Prefetch):
            assert sum(isinstance(each, kind) for each in plan.program.moves) == len(moved)
    assert times == sorted(times, reverse=True)
    assert all(point.time_s >= planner.everything.time_s for point in planner.frontier)


@given(problems())
@settings(max_examples=25)
def test_a_link_without_end_takes_no_time_where_all_that_may_move_can(problem):
    """Within the bytes that are left when everything moves that may."""
    graph, around, _ = problem
    planner = Planner(graph, around, platform=Platform(bandwidth=1e15))
    room = moved_peak(graph, around, planner.everything.program)
    assert planner.best(room).time_s == pytest.approx(planner.everything.time_s, rel=1e-3, abs=1e-6)


@given(problems())
@settings(max_examples=12)
@pytest.mark.parametrize("platform", [Platform(bandwidth=1e-6), Platform(bandwidth=1.0, host_bytes=0), Platform()])
def test_where_moving_is_hopeless_plans_are_those_without_a_link(platform, problem):
    graph, around, rooms = problem
    still, planner = Planner(graph, around), Planner(graph, around, platform=platform)
    for room in rooms:
        without, plan = still.best(room), planner.best(room)
        if without is not None:
            assert plan.program == without.program
            assert plan.why == without.why


# --- by hand -------------------------------------------------------------------------------------------------


def layers(count: int):
    """Layers that are dear to compute for what they make: a link is the better way."""
    return graph_of([Step("plain", (1,), (8, 1), 4, 8, 0, True, False, False, False, True, False)] * count)


def test_a_plan_that_moves_says_so_and_what_it_gains():
    graph = layers(12)
    still = Planner(graph, Surroundings())
    planner = Planner(graph, Surroundings(), platform=Platform(to_host=4.0, from_host=4.0))
    room = still.everything.prediction.peak_bytes // 2
    plan, without = planner.best(room), still.best(room)
    assert plan.method == without.method + ", with moves"
    assert plan.time_s == pytest.approx(planner.everything.time_s)  # the link keeps up
    gain = without.time_s / plan.time_s - 1
    assert gain > 0.1
    assert plan.why.endswith(f"at most 0.0% above the least possible, without moves {gain:+.1%}")
    assert planner.best(room).program == plan.program


def test_with_a_link_a_step_fits_where_it_did_not():
    graph = layers(12)
    still = Planner(graph, Surroundings())
    least = still.least.prediction.peak_bytes
    plan = None
    for room in range(least - 1, 0, -1):
        found = Planner(graph, Surroundings(), platform=Platform(bandwidth=4.0)).best(room)
        if found is None:
            break
        plan = found
    assert plan is not None
    assert plan.why.endswith("without moves it does not fit")
    check(graph, plan.program, platform=Platform(bandwidth=4.0))


def test_the_least_program_moves_what_it_saves_where_that_takes_less():
    graph = layers(12)
    platform = Platform(bandwidth=4.0)
    planner = Planner(graph, Surroundings(), platform=platform)
    least = planner.least
    assert least.program.moves
    assert least.prediction.peak_bytes < Planner(graph, Surroundings()).least.prediction.peak_bytes
    check(graph, least.program, platform=platform)
    found = planner.best(least.prediction.peak_bytes)
    assert found is not None
    assert found.prediction.peak_bytes <= least.prediction.peak_bytes
    full = Planner(graph, Surroundings(), platform=Platform(bandwidth=4.0, host_bytes=0))
    assert not full.least.program.moves


def test_moves_that_are_preferred_are_planned_where_computing_again_is_faster():
    graph = layers(8)
    slow = Platform(bandwidth=1e-3)
    room = Planner(graph, Surroundings()).everything.prediction.peak_bytes * 3 // 4
    assert not Planner(graph, Surroundings(), platform=slow).best(room).program.moves
    preferred = Planner(graph, Surroundings(), platform=slow, prefers_moves=True).best(room)
    assert preferred.program.moves
    assert preferred.prediction.peak_bytes <= room


@pytest.mark.parametrize("gaps", [1.0, 1.1, 1.5])
@pytest.mark.parametrize("moves", [True, False])
def test_a_recording_is_planned_by_what_it_takes(gaps, moves):
    """With gaps in its memory it takes more than the peak."""
    graph = layers(8)
    planner = Planner(graph, Surroundings(), platform=Platform(bandwidth=4.0))
    room = planner.everything.prediction.peak_bytes * 7 // 8

    def size_of(program):
        return int(gaps * predict(graph, program, platform=planner.platform).peak_bytes)

    found = planner.best_sized(room, size_of, moves=moves)
    assert size_of(found.program) <= room
    still = planner.best_sized(room, size_of, moves=False)
    assert not still.program.moves
    assert found.time_s < still.time_s if moves and gaps == 1 else found.time_s <= still.time_s


def test_a_graph_without_a_backward_moves_nothing():
    frozen = Step("plain", (1,), (2, 2), 1, 1, 0, False, False, False, False, True, False)
    graph = graph_of([frozen] * 3, inputs=(False, False, False))
    planner = Planner(graph, Surroundings(), platform=Platform(bandwidth=4.0))
    peak = planner.everything.prediction.peak_bytes
    assert planner.best(peak) is planner.everything
    assert planner.best(peak - 1) is None


def test_a_plan_that_moves_is_kept_in_a_file_as_it_is():
    """With the time that it takes with its waiting."""
    graph = layers(12)
    planner = Planner(graph, Surroundings(), platform=Platform(bandwidth=0.25))
    plan = planner.best(Planner(graph, Surroundings()).least.prediction.peak_bytes - 1)
    assert plan.waits_s > 0
    region = region_plan(planner, plan, "x")
    assert region.time_s == plan.time_s > plan.prediction.time_s
    again = region_from_json(json.loads(json.dumps(region_to_json(region))), FORMAT, "region")
    assert again.program == plan.program
