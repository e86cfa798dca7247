"""What a network looks like: by hand, on networks people train, and against dominators from networkx."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import combinations

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elbowroom.plan.stages.independent_towers import find_towers
from elbowroom.plan.stages.structure import Structure, structure_of
from elbowroom.step.graph import StepGraph
from stepgraphs import Step, graph_of, graphs

OP = Step("plain", (1,), (4, 1), 1, 1, 0, True, False, False, False, True, False)
FROZEN = {"inputs": (False, False, False)}  # the batch gets no gradient, as in training


def reading(*back: int) -> Step:
    """An operator that reads the values made so many operators before it."""
    return replace(OP, back=back)


def network(*layers: Step, **rest) -> StepGraph:
    return graph_of(list(layers), **FROZEN, **rest)


def unet(levels: int) -> StepGraph:
    """Down, and up again, where the n-th from the bottom also reads the n-th from the bottom on the way down."""
    return network(*[OP] * levels, *(reading(1, 2 * n) for n in range(1, levels)))


def tower(length: int, made: int) -> list[Step]:
    """One that begins with the batch, after so many other operators."""
    return [reading(made + 1), *[OP] * (length - 1)]


# --- by hand -------------------------------------------------------------------------------------------------


def test_operators_in_a_row_are_a_chain():
    assert structure_of(network(*[OP] * 12)) == Structure("chain", "each step reads what the one before it made")


def test_residual_blocks_are_a_chain_of_blocks():
    found = structure_of(network(*[OP, OP, OP, reading(1, 4)] * 10))
    assert found == Structure(
        "chain", "each step reads what the one before it made; the largest block takes 10% of the forward"
    )


def test_one_large_operator_is_no_block():
    assert structure_of(network(OP, replace(OP, time=50), OP)).kind == "chain"


def test_long_skips():
    found = structure_of(unet(10))
    assert found.kind == "skips"
    assert found.why.startswith("8 values skip ahead, by up to 89% of the forward: ")  # 17 of 19 operators


def test_bytes_that_skip_are_told_from_those_that_cross_an_operator():
    """Of 20 operators, the last reads what the first made: 18 in between. 16 values wait for one operator each."""
    found = structure_of(network(OP, *[reading(1, 2)] * 18, reading(1, 19)))
    assert (
        found.why
        == f"a value skips ahead, by up to 90% of the forward: {18 / (18 + 16):.0%} of the bytes that wait to be read"
    )


def test_dense_connections():
    found = structure_of(network(*(reading(*range(1, n + 1)) for n in range(1, 13))))
    assert found.kind == "dense"
    assert "up to 10 times" in found.why


def test_an_encoder_that_all_of_a_decoder_reads_is_one_skip():
    encoder, decoder = [OP] * 8, [reading(*{1, n}) for n in range(1, 9)]
    found = structure_of(network(*encoder, *decoder))
    assert found.kind == "skips"
    assert found.why.startswith("a value skips ahead, by up to 44% of the forward")


@pytest.mark.parametrize("lengths", [(6, 6), (4, 9), (5, 5, 5)])
def test_towers(lengths):
    made, layers = 0, []
    for length in lengths:
        layers += tower(length, made)
        made += length
    ends = [made - sum(lengths[: k + 1]) + 1 for k in range(len(lengths))]
    graph = network(*layers, reading(*ends), OP)
    found = structure_of(graph)
    shares = sorted((f"{length / (made + 2):.0%}" for length in lengths), reverse=True)
    sizes = f"{len(lengths)} towers of {', '.join(shares[:-1])} and {shares[-1]} of the forward"
    assert found == Structure("towers", f"{sizes} meet at {graph.ops[graph.forward[made]].name}")


def test_heads_of_one_trunk_are_towers_with_results_of_their_own():
    """A trunk of four, then two heads of six that never meet: two losses."""
    graph = network(*[OP] * 4, *[OP] * 6, reading(7), *[OP] * 5, results=[(6, True)])
    why = "2 towers of 38% and 38% of the forward lead to results of their own; 2 results get gradients"
    assert structure_of(graph) == Structure("towers", why)


def test_towers_before_a_larger_trunk():
    graph = network(*tower(4, 0), *tower(4, 4), reading(1, 5), *[OP] * 11)
    assert structure_of(graph).why.startswith("2 towers of 20% and 20% of the forward")


def test_small_branches_are_no_towers():
    """Twelve blocks of two branches each: what depends on nothing of one another is small."""
    assert structure_of(network(*[OP, reading(2), reading(1, 2)] * 12)).kind == "chain"


def test_what_gets_no_gradient_ties_nothing_together():
    """A mask made of the batch is read by every operator; with a parameter in it, it is a skip like any other."""
    for parameter, kind in ((False, "chain"), (True, "skips")):
        mask = replace(OP, parameter=parameter)
        layers = [reading(*{1, n}) for n in range(1, 13)]
        assert structure_of(network(mask, *layers)).kind == kind


def test_times_that_are_not_known_count_alike():
    steps = [replace(step, time=0) for step in (*[OP] * 9, reading(1, 9))]
    assert structure_of(network(*steps)).kind == "skips"


def test_a_graph_without_a_forward():
    graph = network(OP)
    assert structure_of(replace(graph, forward=(), results=())).kind == "chain"


def test_three_thousand_operators_take_no_time():
    """Linear, it takes some hundredths of a second."""
    graph = network(*[OP, OP, OP, reading(1, 4)] * 750, most=3000)
    assert len(graph.forward) >= 2990
    started = time.perf_counter()
    structure_of(graph)
    assert time.perf_counter() - started < 1


# --- networks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fused", "kind"),
    [
        ("gpt2", False, "chain"),
        ("resnet", True, "chain"),
        ("unet", False, "skips"),
        ("unet", True, "skips"),
        ("t5, four decoder layers", False, "skips"),
        ("densenet", True, "dense"),
        ("clip", False, "towers"),
        ("siamese", False, "towers"),
        ("siamese", True, "towers"),
    ],
)
def test_networks(name, fused, kind):
    """Masks, positions, rotary tables and running statistics do not count, nor do weights that towers share."""
    pytest.importorskip("torch")
    from captured import captured

    found = structure_of(captured(name, fused=fused)[0])
    assert found.kind == kind, found
    assert kind != "towers" or found.why.startswith("3 towers" if name == "siamese" else "2 towers")


# --- towers, against every pair of operators -----------------------------------------------------------------


@st.composite
def wirings(draw):
    """What each of at most nine operators reads: with equal shares, any of them is large enough for a tower."""
    size = draw(st.integers(2, 9))
    return [sorted(draw(st.sets(st.integers(0, k - 1), max_size=2))) if k else [] for k in range(size)]


@given(wirings())
@settings(max_examples=300)
def test_towers_are_children_of_one_dominator_without_a_path_between_them(reads):
    graph = networkx.DiGraph((read, k) for k, read_by in enumerate(reads) for read in read_by or ["batch"])
    parent = networkx.immediate_dominators(graph, "batch")
    shares = [1 / len(reads)] * len(reads)
    dominated = {k: sum(k in dominators(parent, op) for op in range(len(reads))) for k in range(len(reads))}
    pairs = [
        dominated[a] + dominated[b]
        for a, b in combinations(range(len(reads)), 2)
        if parent[a] == parent[b] and not networkx.has_path(graph, a, b)
    ]
    found = find_towers(reads, shares)
    if found is None:
        assert max(pairs, default=0) < 0.3 * len(reads)
    else:
        assert sum(found.shares) * len(reads) >= max(pairs) - 1e-9
        assert len(found.shares) > 1


def dominators(parent, op):
    while op != "batch":
        yield op
        op = parent[op]


@given(graphs(30))
@settings(max_examples=100)
def test_every_graph_has_a_structure(graph):
    found = structure_of(graph)
    assert found.kind in ("chain", "skips", "dense", "towers", "graph")
    assert found.why
