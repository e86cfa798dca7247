"""Products with rows at odd addresses: padded once, by who computes them, with the same results."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from elbowroom.capture.rewrites import padding  # noqa: E402
from elbowroom.capture.rewrites.padding import align_products  # noqa: E402
from elbowroom.capture.rewrites.rewrite import _look_again  # noqa: E402
from tracing import traced  # noqa: E402

aten = torch.ops.aten
STEP = 4  # elements, for doubles on the CPU here


@pytest.fixture(autouse=True)
def padding_here():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(padding, "_DEVICES", ("cpu",))
        patched.setattr(padding, "_ALIGNED", {torch.float64: STEP})
        patched.setattr(padding, "_LARGE", 1)
        yield


def aligned(function, *inputs):
    module = traced(function, *inputs)
    align_products(module.graph)
    _look_again(module.graph)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return module


def nodes(module, target):
    return module.graph.find_nodes(op="call_function", target=target)


def products(module):
    return [*nodes(module, aten.mm.default), *nodes(module, aten.addmm.default)]


def is_aligned(product):
    """Whether what lies side by side in memory is a multiple, in the operands and the result."""
    values = [node.meta["val"] for node in (*product.args[-2:], product)]
    sides = [value.shape[value.stride().index(1)] for value in values if 1 in value.stride()]
    return all(side % STEP == 0 for side in sides)


def language_model(tokens, weight, labels, *bias):
    """The head of one, and all gradients."""
    leaves = [leaf.detach().requires_grad_() for leaf in (tokens, weight, *bias)]
    hidden = leaves[0].tanh()
    logits = F.linear(hidden, leaves[1] * 1, *leaves[2:])
    loss = F.cross_entropy(logits.view(1, *logits.shape).view(logits.shape), labels)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def example(rows, inner, columns, bias=False):
    torch.manual_seed(0)
    tensors = torch.randn(rows, inner), torch.randn(columns, inner), torch.randn(columns)
    doubles = [tensor.double() for tensor in tensors]
    labels = torch.randint(columns, (rows,))
    return (*doubles[:2], labels, *doubles[2:]) if bias else (*doubles[:2], labels)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(2, 13), inner=st.integers(2, 13), columns=st.integers(2, 13), bias=st.booleans())
def test_results_are_the_same_and_all_products_aligned(rows, inner, columns, bias):
    inputs = example(rows, inner, columns, bias)
    module = aligned(language_model, *inputs)
    for found, expected in zip(module(*inputs), language_model(*inputs), strict=True):
        assert found.shape == expected.shape
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    if inner % STEP == 0:  # else a gradient is returned that would have to be copied
        assert all(map(is_aligned, products(module)))


def test_logits_and_their_gradient_are_padded_once():
    inputs = example(12, 8, 13)
    module = aligned(language_model, *inputs)
    pads = nodes(module, aten.constant_pad_nd.default)
    assert sorted(tuple(pad.meta["val"].shape) for pad in pads) == [(12, 16), (16, 8)]
    assert len(products(module)) == 3
    gradient = next(pad for pad in pads if pad.meta["val"].shape == (12, 16))
    assert {user.target for user in gradient.users} == {aten.permute.default, aten.mm.default}


def next_token(tokens, weight, labels):
    """Rows without a label get a gradient of zeros: it is scattered, not computed elementwise."""
    leaves = [leaf.detach().requires_grad_() for leaf in (tokens, weight)]
    logits = F.linear(leaves[0].tanh(), leaves[1] * 1).view(2, -1, len(weight))
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, len(weight)), labels.view(2, -1)[:, 1:].flatten())
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def test_gradients_of_shifted_logits_are_padded():
    inputs = example(12, 8, 13)
    module = aligned(next_token, *inputs)
    for found, expected in zip(module(*inputs), next_token(*inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert len(products(module)) == 3
    assert all(map(is_aligned, products(module)))


def test_others_read_the_padded_value():
    """The gradient of a bias is a sum of what both products read."""
    module = aligned(language_model, *example(12, 8, 13, bias=True))
    gradient = next(pad for pad in nodes(module, aten.constant_pad_nd.default) if pad.meta["val"].shape == (12, 16))
    assert [user.target for user in gradient.args[0].users] == [aten.constant_pad_nd.default]
    assert any(user.target is aten.slice.Tensor for user in gradient.users)


def similarities(a, b):
    """Both ways, so that rows of one product are columns of the next."""
    a, b = a * 1, b * 1
    return (a @ b.t()).exp().sum() + (b @ a.t()).sin().sum() + (a.t() @ a).cos().sum()


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(2, 9), others=st.integers(2, 9), inner=st.integers(2, 9))
def test_a_value_that_is_read_in_several_ways_is_padded_once(rows, others, inner):
    inputs = torch.randn(rows, inner, dtype=torch.float64), torch.randn(others, inner, dtype=torch.float64)
    module = aligned(similarities, *inputs)
    torch.testing.assert_close(module(*inputs), similarities(*inputs), rtol=1e-9, atol=1e-12)
    assert len(nodes(module, aten.constant_pad_nd.default)) <= 2


def returned(a, b):
    return (a * 1) @ (b * 1).t()


def flattened(a, b):
    return ((a * 1) @ (b * 1).t()).view(-1).cumsum(0)


def broadcast(a, b):
    return aten.addmm(a[:1, :1].view(1), a * 1, (b * 1).t()).exp().sum()


def arriving(a, b):
    return a @ (b * 1)  # `a` is as large as anything, and nobody computes it here


@pytest.mark.parametrize(
    ("function", "first", "second"),
    [
        (returned, (12, 8), (13, 8)),
        (flattened, (12, 8), (13, 8)),
        (broadcast, (12, 8), (13, 8)),
        (arriving, (12, 13), (13, 8)),
    ],
)
def test_what_would_have_to_be_copied_or_is_unusual_stays(function, first, second):
    inputs = torch.randn(first, dtype=torch.float64), torch.randn(second, dtype=torch.float64)
    module = aligned(function, *inputs)
    assert not nodes(module, aten.constant_pad_nd.default)
    assert torch.equal(module(*inputs), function(*inputs))


def test_small_products_and_other_types_stay(monkeypatch):
    inputs = example(12, 8, 13)
    monkeypatch.setattr(padding, "_LARGE", 12 * 8 * 13 + 1)
    assert not nodes(aligned(language_model, *inputs), aten.constant_pad_nd.default)
    monkeypatch.setattr(padding, "_LARGE", 1)
    monkeypatch.setattr(padding, "_ALIGNED", {torch.float16: 8})
    assert not nodes(aligned(language_model, *inputs), aten.constant_pad_nd.default)
