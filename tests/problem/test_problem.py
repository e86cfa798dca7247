"""Problems validate themselves, and the error names the field."""

from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elbowroom.errors import InputError
from elbowroom.problem import Chain, Graph, Join, Node, Platform, Saving, Stage, problem_from_json
from problems import byte_chain, random_chain, random_join, random_towers

STAGE = {
    "name": "conv1",
    "forward_time": 1.0,
    "backward_time": 2.0,
    "output_bytes": 1,
    "saved_bytes": 5,
    "gradient_bytes": 1,
    "forward_overhead_bytes": 0,
    "backward_overhead_bytes": 0,
}
CHAIN = {"kind": "chain", "input_bytes": 5, "input_gradient_bytes": 5, "stages": [STAGE]}
JOIN = {
    "kind": "join",
    "lengths": [4, 10],
    "forward_time": 1,
    "backward_time": 1,
    "loss_time": 1,
    "keep_gradients": [0, 1],
}
GRAPH = {"kind": "graph", "nodes": [{"name": "a", "time": 1, "bytes": 4}] * 3, "edges": [[0, 1], [1, 2]]}


@pytest.mark.parametrize("data", [CHAIN, JOIN, GRAPH])
def test_json_round_trip(data):
    assert problem_from_json(data).to_json() == data


@given(st.integers(0, 2**32))
def test_random_problems_round_trip(seed):
    rng = Random(seed)
    for problem in (
        random_chain(rng, 5, alternatives=True),
        byte_chain(rng, 3),
        random_join(rng, 3, 9),
        random_towers(rng, 2, 4),
    ):
        assert problem_from_json(json.loads(json.dumps(problem.to_json()))) == problem


def stage(**changes):
    return {**CHAIN, "stages": [STAGE, {**STAGE, **changes}]}


def without(data, field):
    return {key: value for key, value in data.items() if key != field}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (stage(forward_time=-1), "stages[1].forward_time: must not be negative"),
        (stage(forward_time=float("nan")), "stages[1].forward_time: must be finite, not nan"),
        (stage(backward_time=float("inf")), "stages[1].backward_time: must be finite, not inf"),
        (stage(backward_time=1e30), "stages[1].backward_time: is too large; the most is 1e18"),
        (stage(forward_time="fast"), "stages[1].forward_time: must be a number, not text"),
        (stage(forward_time=True), "stages[1].forward_time: must be a number, not true or false"),
        (stage(output_bytes=1.5), "stages[1].output_bytes: must be a whole number of bytes, not 1.5"),
        (stage(output_bytes=2**61), "stages[1].output_bytes: is too large; the most is 2^60"),
        (stage(output_bytes=[1]), "stages[1].output_bytes: must be a whole number of bytes, not a list"),
        (stage(saved_bytes=0), "stages[1].saved_bytes: 0 is less than output_bytes (1), which it includes"),
        (stage(name=5), "stages[1].name: must be text, not 5"),
        (stage(output_byte=5), "stages[1].output_byte: is not a field here; did you mean 'output_bytes'?"),
        (stage(alternatives=[{"saved_bytes": 0}]), "stages[1].alternatives[0].saved_bytes: 0 is less than"),
        (stage(alternatives=[{"output_bytes": 9}]), "stages[1].alternatives[0].output_bytes: belongs to"),
        (stage(alternatives=[7]), "stages[1].alternatives[0]: must be an object"),
        (stage(alternatives={}), "stages[1].alternatives: must be a list"),
        ({**CHAIN, "stages": [without(STAGE, "gradient_bytes")]}, "stages[0].gradient_bytes: missing"),
        ({**CHAIN, "stages": [3]}, "stages[0]: must be an object, not 3"),
        ({**CHAIN, "stages": []}, "stages: is empty"),
        ({**CHAIN, "stages": "x"}, "stages: must be a list, not text"),
        (without(CHAIN, "input_bytes"), "input_bytes: missing"),
        (without(CHAIN, "kind"), "kind: missing; one of chain, join, towers, graph"),
        ({**CHAIN, "kind": "tree"}, "kind: must be one of chain, join, towers, graph, not 'tree'"),
        ({**CHAIN, "kind": None}, "kind: must be one of"),
        (stage(output_bytes=2**59, saved_bytes=2**60), "stages: sizes add up to"),
        ({**JOIN, "lengths": []}, "lengths: is empty"),
        ({**JOIN, "lengths": [4, -1]}, "lengths[1]: must not be negative"),
        ({**JOIN, "lengths": 4}, "lengths: must be a list"),
        ({**JOIN, "keep_gradients": [0]}, "keep_gradients: has 1 entries for 2 branches"),
        ({**JOIN, "keep_gradients": [0, 2]}, "keep_gradients[1]: must be 0 or 1"),
        ({**JOIN, "loss_time": None}, "loss_time: must be a number, not null"),
        ({**GRAPH, "nodes": []}, "nodes: is empty"),
        ({**GRAPH, "edges": [[0, 3]]}, "edges[0][1]: names node 3, but there are 3 nodes"),
        ({**GRAPH, "edges": [[0, 0]]}, "edges[0]: joins node 0 to itself"),
        ({**GRAPH, "edges": [[0, 1], [0, 1]]}, "edges[1]: [0, 1] is given twice"),
        ({**GRAPH, "edges": [[0, 1], [1, 2], [2, 0]]}, "edges: form a cycle through node 0"),
        ({**GRAPH, "edges": [[0]]}, "edges[0]: must be a [producer, consumer] pair"),
        ({**GRAPH, "edges": [[0, "b"]]}, "edges[0][1]: must be a whole number, not text"),
        ([], "problem: must be a JSON object"),
        (None, "problem: must be a JSON object"),
    ],
)
def test_errors_name_the_field(data, message):
    with pytest.raises(InputError) as refused:
        problem_from_json(data)
    assert str(refused.value).startswith(message)


def test_problems_are_frozen_and_hashable():
    chain = problem_from_json(CHAIN)
    assert hash(chain) == hash(problem_from_json(CHAIN))
    with pytest.raises(AttributeError):
        chain.input_bytes = 3


def test_the_stage_itself_is_way_zero():
    made = Stage("s", 1, 2, 3, 4, 5, 6, 7, (Saving(1, 9, 3, 6, 8),))
    assert made.ways[0] == Saving(1, 2, 4, 6, 7)
    assert made.ways[1].backward_time == 9


def test_integral_floats_are_sizes_and_whole_times_stay_exact():
    chain = problem_from_json({**CHAIN, "input_bytes": 5.0})
    assert chain.input_bytes == 5
    assert isinstance(chain.input_bytes, int)
    assert Chain(0, 0, (Stage("s", 1, 2, 0, 0, 0),)).stages[0].forward_time == 1


def test_python_callers_get_the_same_checks():
    with pytest.raises(InputError, match=r"^alternatives\[0\].forward_time: must not be negative"):
        Stage("s", 1, 2, 3, 4, 5, alternatives=(Saving(-1, 1, 4, 0, 0),))
    with pytest.raises(InputError, match=r"^lengths: must be a list"):
        Join(3, 1, 1, 1, (0,))
    with pytest.raises(InputError, match=r"^bytes: must not be negative"):
        Node("v", 1, -2)
    with pytest.raises(InputError, match=r"^bandwidth: must be positive"):
        Platform(0)
    assert Graph((Node("v", 1, 2), Node("w", 1, 2)), ((1, 0),)).order == (1, 0)
