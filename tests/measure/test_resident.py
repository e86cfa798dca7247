"""What is resident beside a step."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from elbowroom.measure.resident import multiplies_matrices  # noqa: E402


@pytest.mark.parametrize(
    ("function", "multiplies"),
    [
        (lambda x: torch.relu(x).sum(), False),
        (lambda x: F.conv2d(x[None, None], torch.ones(1, 1, 3, 3)), False),
        (lambda x: F.linear(x, x), True),
        (lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]), True),
        (lambda x: torch.einsum("ij,kj->ik", x, x), True),
    ],
)
def test_which_graphs_multiply_matrices(function, multiplies):
    graph = make_fx(function)(torch.randn(8, 8)).graph
    assert multiplies_matrices(graph.nodes) == multiplies
