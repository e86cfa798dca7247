"""Plans of random graphs of steps: they run, they fit, and more room never costs time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st

from elbowroom.plan.planner import Planner
from elbowroom.plan.values.choices import Choices
from elbowroom.step.program import make_program
from elbowroom.step.referee import Surroundings, predict
from machine import check
from stepgraphs import Step, every_single_recomputation, graph_of, graphs, surroundings


@st.composite
def problems(draw, most: int = 16):
    """A graph, what is around it, and rooms from too little to more than enough, in rising order."""
    graph, around = draw(graphs(most)), draw(surroundings())
    everything = predict(graph, make_program(graph, graph.backward), around).peak_bytes
    rooms = draw(st.lists(st.integers(everything // 4, everything + 1), min_size=2, max_size=5, unique=True))
    return graph, around, sorted(rooms)


@given(problems())
@settings(max_examples=80)
def test_a_plan_runs_right_within_its_room(problem):
    graph, around, rooms = problem
    planner = Planner(graph, around)
    plain = predict(graph, make_program(graph, graph.backward), around)
    for room in rooms:
        plan = planner.best(room)
        if plan is None:
            assert room < planner.least.prediction.peak_bytes
            continue
        assert check(graph, plan.program, around) == plan.prediction
        assert plan.prediction.peak_bytes <= room
        assert plan.prediction.time_s >= plain.time_s
        assert planner.least.prediction.peak_bytes <= plan.prediction.peak_bytes
        if room >= plain.peak_bytes:
            assert not plan.program.reruns
    assert check(graph, planner.least.program, around) == planner.least.prediction


@given(problems())
@settings(max_examples=40)
@pytest.mark.parametrize("rising", [True, False])
def test_more_room_never_takes_longer(rising, problem):
    graph, around, rooms = problem
    planner = Planner(graph, around)
    found = {room: planner.best(room) for room in (rooms if rising else reversed(rooms))}
    times = [plan.prediction.time_s if (plan := found[room]) else float("inf") for room in rooms]
    assert all(less >= more for less, more in pairwise(times))


@given(problems(), st.lists(st.integers(0, 4), min_size=7, max_size=7))
@settings(max_examples=60)
def test_where_more_than_the_peak_counts_the_fastest_that_fits_is_found(problem, gaps):
    """A program takes up to double its peak here, and one that is a byte smaller takes quite another part more."""
    graph, around, rooms = problem
    planner = Planner(graph, around)

    def size_of(program):
        peak = predict(graph, program, around).peak_bytes
        return peak + peak * gaps[peak % 7] // 4

    for room in rooms:
        plan, best = planner.best_sized(room, size_of), planner.best(room)
        if plan is not None:
            assert check(graph, plan.program, around) == plan.prediction
            assert size_of(plan.program) <= room
            assert plan.prediction.time_s >= best.prediction.time_s
        if best is not None and size_of(best.program) <= room:
            assert plan.prediction.time_s == best.prediction.time_s
        if planner.best(room // 2) is not None:
            assert plan is not None


@given(problems())
@settings(max_examples=80)
@pytest.mark.parametrize("whole", [False, True])
def test_a_chain_plan_runs_right_and_is_never_faster(whole, problem):
    """The planner has the chain's way to cut among its own, so within any room it finds what that finds."""
    graph, around, rooms = problem
    chain, planner = Planner(graph, around, as_chain=True, whole_stages=whole), Planner(graph, around)
    for room in rooms:
        plan, best = chain.best(room), planner.best(room)
        if plan is None:
            assert room < chain.least.prediction.peak_bytes
            continue
        assert check(graph, plan.program, around) == plan.prediction
        assert plan.prediction.peak_bytes <= room
        if not whole:
            assert best.prediction.time_s <= plan.prediction.time_s


@pytest.mark.parametrize("name", ["unet", "siamese", "clip", "t5", "inception", "mamba"])
def test_networks_are_planned_no_worse_than_as_chains(name):
    pytest.importorskip("torch")
    from captured import captured

    graph, around = captured(name)
    planner, chain = Planner(graph, around), Planner(graph, around, as_chain=True)
    plain = planner.everything.prediction
    room = int(0.4 * plain.peak_bytes)
    plan, as_chain = planner.best(room), chain.best(room)
    assert "stages where one value crosses, full account" in chain.least.method
    if as_chain is None:
        assert room < chain.least.prediction.peak_bytes
    else:
        assert plain.time_s < plan.prediction.time_s <= as_chain.prediction.time_s
    assert planner.least.prediction.peak_bytes <= chain.least.prediction.peak_bytes


@pytest.mark.parametrize(("share", "again"), [(0.8, 0.1), (0.35, 0.55)])
def test_fused_towers_do_not_run_each_other_again(share, again):
    """A tower's backward reads a little of later ones, whose own is over: that stays, or they would run once more."""
    pytest.importorskip("torch")
    from captured import captured

    graph, around = captured("siamese", fused=True)
    planner = Planner(graph, around)
    plain = planner.everything.prediction
    plan = planner.best(int(share * plain.peak_bytes))
    forward_s = sum(graph.ops[op].time for op in graph.forward)
    assert plan.prediction.time_s - plain.time_s < again * forward_s
    assert max(plan.program.reruns.values()) == 1


def test_a_plan_says_why_it_was_chosen():
    graph = towers(6)
    planner, chain = Planner(graph, Surroundings()), Planner(graph, Surroundings(), as_chain=True)
    most = planner.everything.prediction.peak_bytes
    enough, too_little = most * 2 // 3, chain.least.prediction.peak_bytes - 1
    assert planner.best(most).why == "it fits, and nothing runs again"
    assert planner.least.why == "the lowest peak found"
    plan, as_chain = planner.best(enough), chain.best(enough)
    assert as_chain.why == "the only way to cut and count that was tried"
    longer = as_chain.prediction.time_s / plan.prediction.time_s - 1
    assert longer > 0
    lower = planner.best(too_little)
    for chosen, room, ending in ((plan, enough, f"{longer:+.1%}"), (lower, too_little, "it does not fit")):
        assert chosen.why.startswith("fastest of 5 ways to cut; next best +")
        above = chosen.prediction.time_s / Choices(graph, Surroundings()).least_s(room) - 1
        assert chosen.why.endswith(f", as a chain {ending}, at most {above:.1%} above the least possible")


def test_late_gradients_leave_their_memory_to_the_step():
    graph = layers(12)
    plain = Planner(graph, Surroundings()).everything.prediction
    room = plain.peak_bytes // 3
    late = {i: 2 for i, _ in graph.gradients if i in graph.parameters}
    kept, free = (Planner(graph, Surroundings(late=each)).best(room) for each in ({}, late))
    assert free.prediction.time_s < kept.prediction.time_s
    check(graph, free.program, Surroundings(late=late))
    assert free.prediction.backward_bytes[-1] <= room


@given(problems())
@settings(max_examples=40, phases=[Phase.generate])
def test_the_least_that_one_planner_names_another_can_plan(problem):
    """Somebody told what would be enough asks for just that, later."""
    graph, around, _ = problem
    least = Planner(graph, around).least.prediction.peak_bytes
    assert Planner(graph, around).best(least) is not None


@given(graphs(7), surroundings())
@settings(max_examples=40)
def test_how_far_from_the_best_single_recomputation(graph, around):
    """Not a promise: pytest --hypothesis-show-statistics says how often small graphs are planned as well as by trying
    every set of values to keep, the others recomputed once, when first needed."""
    planner = Planner(graph, around)
    plain = planner.everything.prediction
    fronts = {(p.peak_bytes, p.time_s) for p in single_recomputations(graph, around)}
    assert (plain.peak_bytes, plain.time_s) in fronts
    for room in range(min(peak for peak, _ in fronts), plain.peak_bytes):
        best = min(time for peak, time in fronts if peak <= room)
        plan = planner.best(room)
        if plan is None:
            event("no plan, though there is one")
        else:
            event("as fast" if plan.prediction.time_s <= best else "slower")


def single_recomputations(graph, around):
    return (predict(graph, make_program(graph, order), around) for order in every_single_recomputation(graph))


# --- by hand -------------------------------------------------------------------------------------------------


WIDE = Step("plain", (1,), (16, 1), 1, 1, 0, True, False, False, False, True, False)
NARROW = replace(WIDE, sizes=(1, 1))


def layers(count: int):
    """Layers that widen sixteenfold and come back, as a transformer's do."""
    return graph_of([WIDE, WIDE, NARROW] * count)


def towers(count: int):
    """Two towers of such layers that meet in the end."""
    first, second = [WIDE, WIDE, NARROW] * count, [WIDE, WIDE, NARROW] * count
    second[0] = replace(WIDE, back=(len(first) + 1,))
    return graph_of([*first, *second, replace(NARROW, back=(1, len(second) + 1))])


def test_layers_in_a_third_of_the_memory_take_at_most_one_more_forward():
    graph = layers(12)
    planner = Planner(graph, Surroundings())
    plain = planner.everything.prediction
    plan = planner.best(plain.peak_bytes // 3)
    assert plan is not None
    check(graph, plan.program)
    forward_s = sum(graph.ops[op].time for op in graph.forward)
    assert plain.time_s < plan.prediction.time_s <= plain.time_s + forward_s
    assert planner.least.prediction.peak_bytes < plain.peak_bytes // 4


def test_a_graph_without_a_backward_has_one_plan():
    frozen = Step("plain", (1,), (2, 2), 1, 1, 0, False, False, False, False, True, False)
    graph = graph_of([frozen] * 3, inputs=(False, False, False))
    assert not graph.backward
    planner = Planner(graph, Surroundings())
    peak = planner.everything.prediction.peak_bytes
    assert planner.least is planner.everything
    assert planner.best(peak) is planner.everything
    assert planner.best(peak - 1) is None
