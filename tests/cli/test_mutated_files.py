"""Ten thousand damaged problem files: exit status 2 and one line that names the culprit, always."""

from __future__ import annotations

import copy
import json
from functools import partial
from random import Random

import pytest

CHAIN = {
    "kind": "chain",
    "input_bytes": 5,
    "input_gradient_bytes": 5,
    "stages": [
        {
            "name": f"s{i}",
            "forward_time": 1.5,
            "backward_time": 2,
            "output_bytes": 3,
            "saved_bytes": 5,
            "gradient_bytes": 3,
            "forward_overhead_bytes": 1,
            "backward_overhead_bytes": 0,
            "alternatives": [{"saved_bytes": 4, "backward_time": 3}],
        }
        for i in range(4)
    ],
}
JOIN = {
    "kind": "join",
    "lengths": [2, 3],
    "forward_time": 1,
    "backward_time": 1,
    "loss_time": 1,
    "keep_gradients": [0, 1],
}
TOWERS = {
    "kind": "towers",
    "towers": [
        {
            "input_bytes": 2,
            "input_gradient_bytes": 2,
            "keep_gradient": k,
            "steps": [
                {
                    "name": f"s{i}",
                    "forward_time": 1,
                    "backward_time": 2.5,
                    "output_bytes": 3,
                    "gradient_bytes": 3,
                    "saved_bytes": None,  # a number is as good
                    "forward_overhead_bytes": 0,
                    "backward_overhead_bytes": 1,
                    "weight_bytes": 4,
                }
                for i in range(2)
            ],
        }
        for k in range(2)
    ],
    "loss_time": 1,
    "loss_overhead_bytes": 0,
    "in_place": 0,
    "shared_weights": 1,
}
GRAPH = {
    "kind": "graph",
    "nodes": [{"name": f"v{i}", "time": 1, "bytes": 4} for i in range(4)],
    "edges": [[0, 1], [1, 2], [0, 3]],
}
WHOLE = [["forward", i, "all"] for i in (1, 2, 3, 4)] + [["backward", i] for i in (4, 3, 2, 1)]
LINK = {"bandwidth": 4, "to_host": 3.5, "from_host": 5, "duplex": 2, "seconds_per_copy": 0.25, "host_budget": 64}
MOVING = [*WHOLE[:2], ["offload", 1, "all"], *WHOLE[2:4], ["prefetch", 1, "all", {"keep": True, "start": 6}]]
MOVED = {**CHAIN, **LINK, "schedule": [*MOVING, *WHOLE[4:]]}
PROBLEMS = {"chain": CHAIN, "join": JOIN, "towers": TOWERS, "graph": GRAPH, "plan": {**CHAIN, "schedule": WHOLE}}
OPTIONAL = {"name", "alternatives", "schedule", "keep", "start", *LINK}

NEGATIVE = [-1, -0.5, -(10**30), -1e300]
HUGE = [10**30, 2**64, 1e300, 10**400]
NOT_FINITE = [float("nan"), float("inf"), float("-inf")]
NESTED = json.loads("[" * 900 + "]" * 900)
MISSING = object()
WRONG = [None, "text", "", [], {}, [1, 2, 3, 4, 5, 6, 7], {"a": 1}, "1"]


def paths(value, path=()):
    """Every place in a document, with its value."""
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths(inner, (*path, key))


def changed(document, path, change):
    """A copy in which `change(container, key)` was done to the place that a path names."""
    document = copy.deepcopy(document)
    place = document
    for key in path[:-1]:
        place = place[key]
    change(place, path[-1])
    return document


def mutate(rng, document):
    """A damaged document and the place whose field must be named."""
    places = [(p, v) for p, v in paths(document) if p]
    numbers = [p for p, v in places if isinstance(v, int | float)]
    # A stage, or an operation to start with, that does not exist is an answer, not bad input.
    sizes = [p for p in numbers if p[0] != "schedule"]
    required = [p for p, _ in places if isinstance(p[-1], str) and p[-1] not in OPTIONAL and "alternatives" not in p]
    objects = [p for p, v in places if isinstance(v, dict)] or [()]
    where, what = rng.choice(
        [
            (required, [MISSING]),
            (sizes, NEGATIVE),
            (numbers, NOT_FINITE),
            (sizes, HUGE),
            (numbers, WRONG),
            ([p for p, _ in places], [NESTED]),
            ([(*p, "colour") for p in objects], ["red"]),
        ]
    )
    path, new = rng.choice(where), rng.choice(what)
    change = dict.pop if new is MISSING else partial(_put, new)
    return changed(document, path, change), path


def _put(new, place, key):
    place[key] = new


def names_culprit(message, path):
    """The complaint names the field, or (inside lists and schedules) the place that holds it."""
    keys = [key for key in path if isinstance(key, str)]
    return any(key in message for key in keys)


@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("part", range(2))
def test_damaged_documents(elbowroom, tmp_path, kind, part):
    rng = Random(f"{kind} {part}")
    path = tmp_path / "problem.json"
    command = ("simulate", path) if kind == "plan" else ("solve", path, "--budget", 40)
    for _ in range(1000 if kind == "graph" else 400):
        document, place = mutate(rng, PROBLEMS[kind])
        path.write_text(json.dumps(document))
        status, out, err = elbowroom(*command, "--json")
        assert (status, out, err.count("\n")) == (2, "", 1), (document, status, out, err)
        assert err.startswith("elbowroom: ")
        assert names_culprit(err, place), (place, err)


@pytest.mark.parametrize("part", range(4))
def test_damaged_platforms_and_transfers(elbowroom, tmp_path, part):
    """With damaged text below, ten thousand files with a link, transfers and a host budget."""
    rng = Random(f"platforms {part}")
    path = tmp_path / "problem.json"
    assert json.loads(elbowroom("simulate", written(path, MOVED), "--json").out)["valid"]
    for _ in range(2500):
        document, place = mutate(rng, MOVED)
        if means_something(document, place):
            continue
        status, out, err = elbowroom("simulate", written(path, document), "--json")
        assert (status, out, err.count("\n")) == (2, "", 1), (document, status, out, err)
        assert err.startswith("elbowroom: ")
        assert names_culprit(err, place), (place, err)


def means_something(document, place):
    """Whether the damage is none: what may be left out may be null, and a budget may be text."""
    value = document
    for key in place:
        value = value.get(key, MISSING) if isinstance(value, dict) else value[key]
    return (value is None and place[-1] in OPTIONAL) or (value == "1" and place == ("host_budget",))


def written(path, document):
    path.write_text(json.dumps(document))
    return path


def tangled(rng: Random):
    """A random graph with one thing wrong with its edges or nodes, and what must be named."""
    count = rng.randint(2, 12)
    nodes = [{"name": f"v{i}", "time": rng.randint(0, 9), "bytes": rng.randint(0, 99)} for i in range(count)]
    pairs = [[i, j] for i in range(count) for j in range(i + 1, count)]
    edges = rng.sample(pairs, rng.randint(1, len(pairs)))
    at = rng.randrange(len(edges))
    damage = rng.choice(("twice", "cycle", "itself", "unknown", "short", "long", "word", "negative", "empty"))
    if damage == "twice":
        edges.insert(rng.randrange(len(edges) + 1), list(edges[at]))
    elif damage == "cycle":
        a, b = edges[at]
        edges.append([b, a])
    elif damage == "empty":
        nodes = []
    else:
        end, node = rng.randrange(2), edges[at][0]
        edges[at] = {
            "itself": [node, node],
            "unknown": [*edges[at][:end], count + rng.randint(0, 10**9), *edges[at][end + 1 :]],
            "short": edges[at][:end],
            "long": [*edges[at], 0],
            "word": [str(node), edges[at][1]],
            "negative": [-1, edges[at][1]],
        }[damage]
    return {"kind": "graph", "nodes": nodes, "edges": edges}, ("nodes" if damage == "empty" else "edges",)


@pytest.mark.parametrize("part", range(4))
def test_damaged_graphs(elbowroom, tmp_path, part):
    """With those above, ten thousand graphs."""
    rng = Random(f"graphs {part}")
    path = tmp_path / "problem.json"
    method = ("auto", "lower-sets", "chen", "lower-sets-chain")[part]
    for number in range(2000):
        document, place = tangled(rng) if number % 2 else mutate(rng, GRAPH)
        path.write_text(json.dumps(document))
        status, out, err = elbowroom("solve", path, "--budget", 400, "--solver", method, "--json")
        assert (status, out, err.count("\n")) == (2, "", 1), (document, status, out, err)
        assert err.startswith("elbowroom: ")
        assert names_culprit(err, place), (place, err)


@pytest.mark.parametrize("part", range(2))
def test_damaged_text(elbowroom, tmp_path, part):
    """Bytes flipped, cut, doubled or swapped: an answer, or status 2 and one line; never a traceback."""
    rng = Random(part)
    path = tmp_path / "problem.json"
    refused = 0
    for _ in range(500):
        text = bytearray(json.dumps(PROBLEMS[rng.choice(list(PROBLEMS))]).encode())
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text))
            action = rng.randrange(4)
            if action == 0:
                text[at] = rng.randrange(256)
            elif action == 1:
                del text[at : at + rng.randint(1, 20)]
            elif action == 2:
                text[at:at] = text[at : at + rng.randint(1, 20)]
            else:
                text[at:at] = rng.choice([b"\n", b"[" * 3000, b'"', b"9" * 5000, b"-", b"1e999", b"NaN", b"\x00"])
        path.write_bytes(bytes(text))
        status, out, err = elbowroom("solve", path, "--budget", 40, "--json")
        assert status in (0, 2, 3), text
        if status == 2:
            refused += 1
            assert (out, err.count("\n")) == ("", 1), text
        else:
            assert err == ""
            assert all(json.loads(line) for line in out.splitlines())
    assert refused > 400
