"""From stages and schedules to programs: they compute the same, keep no more, and take no longer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elbowroom.plan.stages.cuts import cut
from elbowroom.plan.stages.savings import ways_to_save
from elbowroom.plan.stages.staging import _costs, _gradients_crossing, stage
from elbowroom.plan.stages.translate import order_of
from elbowroom.schedule import Forward, simulate
from elbowroom.solve import METHODS, Options, solve
from elbowroom.step.program import make_program
from elbowroom.step.referee import predict
from machine import check
from stepgraphs import Step, graph_of, graphs

SOLVERS = ("persistent", "floating", "revolve", "sequential", "store-all")


def program_for(stages, schedule):
    return make_program(stages.graph, order_of(stages, schedule))


@st.composite
def staged(draw, most: int = 20):
    graph = draw(graphs(most))
    assume(graph.backward)
    return stage(graph, cut(graph, divide=draw(st.booleans()), most=draw(st.sampled_from([2, 4, 120]))))


@st.composite
def schedules(draw):
    made = draw(staged())
    chain = made.chain(draw(st.sampled_from(["full", "once"])), draw(st.integers(0, 4)))
    solver = draw(st.sampled_from(SOLVERS))
    floor = METHODS[solver].least_budget(chain, Options())
    result = solve(chain, floor + draw(st.integers(0, 12)), solver)
    assert result.feasible
    return made, chain, result.schedule


@given(schedules())
@settings(max_examples=100)
def test_a_schedule_becomes_a_program_that_computes_the_same_and_keeps_no_more(made):
    """From forward to backward goes only what the schedule keeps at that moment."""
    stages, _, schedule = made
    graph, sections = stages.graph, stages.sections
    program = program_for(stages, schedule)
    check(graph, program)
    kept, last = set(), ()
    for operation in schedule:
        if operation.at == len(sections) + 1:
            break
        assert isinstance(operation, Forward)
        section = sections[operation.at - 1]
        if operation.save != "nothing":
            kept.update(section.enters)
        if operation.save == "all":
            kept.update(stages.ways[operation.at - 1][operation.way].saved, section.leaves)
        last = section.leaves
    assert {op for op in program.saved if graph.ops[op].kind == "forward"} <= kept.union(last)


@given(schedules())
@settings(max_examples=80)
def test_a_program_takes_no_longer_than_its_schedule(made):
    """It may take less: what happens to be there is not run again."""
    stages, chain, schedule = made
    graph = stages.graph
    program = program_for(stages, schedule)
    assert predict(graph, program).time_s <= simulate(chain, schedule).time
    once = predict(graph, make_program(graph, graph.backward)).time_s
    assert predict(graph, program).time_s >= once


@given(staged())
@settings(max_examples=60)
def test_saving_everything_runs_nothing_again(made):
    chain = made.chain("full", 0)
    assert not program_for(made, solve(chain, None, "store-all").schedule).reruns


@given(staged(40))
@settings(max_examples=80)
def test_repeated_stages_cost_what_they_would_alone(made):
    graph, sections = made.graph, made.sections
    gradients = _gradients_crossing(graph, sections)
    for k, section in enumerate(sections):
        ways = ways_to_save(graph, section)
        assert [(way.bytes, way.time) for way in made.ways[k]] == [(way.bytes, way.time) for way in ways]
        assert all(way.saved <= set(section.forward) for way in made.ways[k])
        assert made.costs[k] == _costs(graph, section, made.ways[k], gradients[k], gradients[k + 1])


def test_repeated_layers_are_worked_out_once():
    step = Step("plain", (1,), (2, 1), 1, 1, 0, True, False, False, False, True, False)
    wide = Step("plain", (1,), (20, 1), 1, 1, 0, True, False, False, False, True, False)
    graph = graph_of([wide, step] * 8)
    made = stage(graph, cut(graph, divide=False))
    assert len(made.sections) >= 8
    assert len(set(made.looks)) <= 4


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_chain_runs_again_what_revolve_would(slots):
    """Equal stages that save their input only: the program's reruns are the schedule's second forwards."""
    step = Step("plain", (1,), (2, 1), 1, 1, 0, True, False, False, False, True, False)
    graph = graph_of([step] * 8, inputs=(False, False, False))
    made = stage(graph, cut(graph, divide=True))
    chain = made.chain("full", 0)
    floor = METHODS["revolve"].least_budget(chain, Options())
    schedule = solve(chain, floor + 2 * slots, "revolve").schedule
    program = program_for(made, schedule)
    check(graph, program)
    assert program.reruns


def test_stages_that_are_wired_differently_are_not_taken_for_one_another():
    """The same operators on the same shapes, but one layer's third operator skips its second."""
    wide = Step("plain", (1,), (20, 1), 1, 1, 0, True, False, False, False, True, False)
    narrow = Step("plain", (1,), (2, 1), 1, 1, 0, True, False, False, False, True, False)
    graph = graph_of([wide, wide, wide, narrow] * 6)
    looks = stage(graph, cut(graph, divide=False, most=6)).looks
    first, second, third = graph.forward[8:11]
    reads = tuple(first if read == second else read for read in graph.ops[third].reads)
    ops = [replace(op, reads=reads, rerun_reads=reads) if op.index == third else op for op in graph.ops]
    graph = replace(graph, ops=tuple(ops))
    other = stage(graph, cut(graph, divide=False, most=6)).looks
    assert looks[2] == looks[1]
    assert other[2] == 2
