"""The interpreters of programs that need no torch handle every operation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elbowroom.problem import Platform
from elbowroom.step.pool import pool_bytes
from elbowroom.step.program import make_program
from elbowroom.step.referee import Surroundings, predict
from elbowroom.step.timeline import time_line
from moving import moving
from stepgraphs import graphs, orders

LINK = Platform(to_host=2.0, from_host=3.0)


@given(st.data())
def test_the_pool_and_the_time_line_move_values_like_the_referee(data):
    graph = data.draw(graphs(most=8))
    program = data.draw(moving(graph, make_program(graph, data.draw(orders(graph)))))
    prediction = predict(graph, program, platform=LINK)
    assert pool_bytes(graph, program, Surroundings(), graph.inputs, LINK) >= 0
    assert time_line(graph, program, platform=LINK).peak_bytes == prediction.peak_bytes
