"""Attention under a causal mask that is written out is told so, and the mask goes; others are left alone."""

from __future__ import annotations

import operator

import pytest

torch = pytest.importorskip("torch")

from torch import fx  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from elbowroom.capture.rewrites.rewrite import _is_causal, rewrite  # noqa: E402
from elbowroom.measure.memory import measure  # noqa: E402

aten = torch.ops.aten

SIZE = 6


def triangle():
    return torch.ones(SIZE, SIZE, dtype=torch.bool).tril()


def added():
    return torch.zeros(SIZE, SIZE).masked_fill(~triangle(), float("-inf"))


def positions():
    place = torch.arange(SIZE)
    return (place.unsqueeze(1) >= place)[None, None].expand(2, 3, SIZE, SIZE)


CAUSAL = {
    "a lower triangle": triangle,
    "one to add": added,
    "one to add, with a large finite number": lambda: torch.full((SIZE, SIZE), -1e9).triu(1),
    "positions compared": positions,
    "half precision": lambda: torch.full((SIZE, SIZE), torch.finfo(torch.bfloat16).min).to(torch.bfloat16).triu(1),
}
OTHERS = {
    "an upper triangle": lambda: triangle().t(),
    "without the diagonal": lambda: torch.ones(SIZE, SIZE, dtype=torch.bool).tril(-1),
    "a band": lambda: triangle().triu(-2),
    "everything is seen": lambda: torch.ones(SIZE, SIZE, dtype=torch.bool),
    "not square": lambda: torch.ones(SIZE, SIZE + 1, dtype=torch.bool).tril(),
    "a penalty that hides little": lambda: -torch.ones(SIZE, SIZE).triu(1),
    "a bias with the distance": lambda: added() - torch.arange(SIZE),
    "one row for all": lambda: triangle()[-1:].expand(SIZE, SIZE),
    "one number for all": lambda: torch.ones(1, 1, dtype=torch.bool).expand(SIZE, SIZE),
    "one row of a batch differs": lambda: torch.stack([triangle(), triangle().triu(-1)]),
}


def mask_node(make) -> fx.Node:
    graph = make_fx(make)().graph
    return graph.output_node().args[0]


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_is_recognized(name):
    assert _is_causal(mask_node(CAUSAL[name]))


@pytest.mark.parametrize("name", OTHERS)
def test_another_mask_is_left_alone(name):
    assert not _is_causal(mask_node(OTHERS[name]))


def test_a_mask_that_depends_on_the_batch_is_left_alone():
    graph = make_fx(lambda x: triangle() & (x > 0))(torch.ones(SIZE)).graph
    assert not _is_causal(graph.output_node().args[0])


def test_a_mask_expanded_over_batch_and_heads_is_looked_at_once():
    """It may be one matrix in memory and gigabytes if written out."""
    mask = mask_node(lambda: torch.ones(256, 256, dtype=torch.bool).tril().expand(64, 32, 256, 256))
    with measure("cpu", timeline=False) as measured:
        assert _is_causal(mask)
    assert measured.peak_bytes < 10 * 256 * 256


def attention_graph(make_mask, device: str = "cuda"):
    """Attention and its backward under a mask, written by hand, on a device that need not be there."""
    mask = mask_node(make_mask)
    graph = mask.graph
    (output,) = graph.find_nodes(op="output")
    with FakeTensorMode():
        tensor = torch.empty(2, 3, SIZE, 8, device=device)
        mask.meta["val"] = torch.empty(2, 3, SIZE, SIZE, device=device)
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        q, k, v, arriving = (graph.placeholder(name) for name in ("q", "k", "v", "tangents_1"))
    for node in (q, k, v, arriving):
        node.meta["val"] = tensor
    forward = aten._scaled_dot_product_efficient_attention
    backward = aten._scaled_dot_product_efficient_attention_backward
    with graph.inserting_before(output):
        attention = graph.call_function(forward.default, (q, k, v, mask, True))
        parts = [graph.call_function(operator.getitem, (attention, i)) for i in range(4)]
        wanted = [True, True, True, False]
        rest = (parts[0], parts[1], parts[2], parts[3], 0.0, wanted)
        gradients = graph.call_function(backward.default, (arriving, q, k, v, mask, *rest))
        kept = [graph.call_function(operator.getitem, (gradients, i)) for i in range(3)]
    output.args = ((parts[0], *kept),)
    return graph, attention, gradients


def test_attention_under_a_causal_mask_is_told_so_and_the_mask_goes():
    graph, attention, gradients = attention_graph(triangle)
    rewrite(graph)
    assert attention.args[3] is None
    assert attention.kwargs == {"is_causal": True}
    assert gradients.args[4] is None
    assert gradients.kwargs == {"is_causal": True}
    assert not graph.find_nodes(op="call_function", target=aten.tril.default)


@pytest.mark.parametrize(("mask", "device"), [(OTHERS["a band"], "cuda"), (triangle, "cpu")])
def test_attention_under_another_mask_or_on_the_cpu_keeps_it(mask, device):
    graph, attention, gradients = attention_graph(mask, device)
    rewrite(graph)
    assert isinstance(attention.args[3], fx.Node)
    assert gradients.args[4] is attention.args[3]
    assert not attention.kwargs
