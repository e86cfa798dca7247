"""Every interpreter of programs handles every operation, or says in one clear line that it does not yet."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elbowroom.errors import ElbowroomError
from elbowroom.problem import Platform
from elbowroom.step.operations import Await, Offload, Prefetch, Release
from elbowroom.step.pool import pool_bytes
from elbowroom.step.program import make_program
from elbowroom.step.referee import Surroundings, predict
from elbowroom.step.timeline import time_line
from moving import may_move, moving
from stepgraphs import graphs, orders

LINK = Platform(to_host=2.0, from_host=3.0)


@given(st.data())
def test_the_pool_and_the_time_line_move_values_like_the_referee(data):
    graph = data.draw(graphs(most=8))
    program = data.draw(moving(graph, make_program(graph, data.draw(orders(graph)))))
    prediction = predict(graph, program, platform=LINK)
    assert pool_bytes(graph, program, Surroundings(), graph.inputs, LINK) >= 0
    assert time_line(graph, program, platform=LINK).peak_bytes == prediction.peak_bytes


def moved(graph, program, value):
    saved = tuple(op for op in program.saved if op != value)
    forward = (*program.forward, Offload(value), Release(value))
    return replace(program, forward=forward, backward=(Prefetch(value), Await(value), *program.backward), saved=saved)


def test_fused_graphs_say_that_they_cannot_yet():
    pytest.importorskip("torch")
    from captured import traced
    from elbowroom.execute.fused_graphs import backward_graph, forward_graph

    _, measured = traced("vgg", fused=True)
    captured = measured.captured
    graph = captured.graph
    program = make_program(graph, graph.backward)
    program = moved(graph, program, may_move(graph, program)[0])
    with pytest.raises(ElbowroomError, match="fused kernels cannot offload values yet"):
        forward_graph(captured, program, [], False)
    with pytest.raises(ElbowroomError, match="fused kernels cannot prefetch values yet"):
        backward_graph(captured, program, (), "return", False)
