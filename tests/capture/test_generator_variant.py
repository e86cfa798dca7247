"""Random operators told which generator to draw from: as PyTorch's own, bit for bit, and the generator after it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import fx  # noqa: E402

from elbowroom.capture.generator_variant import drop_out, generator_variant  # noqa: E402
from elbowroom.capture.joint_graph import is_random  # noqa: E402

aten = torch.ops.aten
SHAPES = [(16, 8), (300, 400), (0, 4)]  # the second is drawn in another way than the first, if there is MKL


def node_of(target, *args, **kwargs):
    node = fx.Graph().call_function(target, args, kwargs)
    node.meta["val"] = torch.empty(4)
    return node


def drawn(operator, *args, **kwargs):
    """What it draws from PyTorch's generator, and where that is then."""
    torch.manual_seed(3)
    return operator(*args, **kwargs), torch.get_rng_state()


def drawn_apart(node):
    torch.manual_seed(4)
    before, generator = torch.get_rng_state(), torch.Generator().manual_seed(3)
    value = generator_variant(node)(*node.args, **node.kwargs, generator=generator)
    assert torch.equal(torch.get_rng_state(), before), "the shared generator has moved"
    return value, generator.get_state()


def assert_same(found, expected):
    (values, state), (wanted, wanted_state) = found, expected
    assert torch.equal(state, wanted_state)
    for value, other in zip(
        torch.utils._pytree.tree_leaves(values), torch.utils._pytree.tree_leaves(wanted), strict=True
    ):
        assert torch.equal(value, other)
        assert (value.dtype, value.stride()) == (other.dtype, other.stride())
        assert value.untyped_storage().nbytes() == other.untyped_storage().nbytes()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize(
    ("p", "train"), [(0.5, True), (0.1, True), (0.0, True), (1.0, True), (0.3, None), (0.3, False)]
)
def test_dropout(shape, dtype, p, train):
    values = torch.randn(shape).to(dtype)
    for given in (values, values.t()):
        node = node_of(aten.native_dropout.default, given, p, train)
        assert_same(drawn_apart(node), drawn(node.target, given, p, train))


CALLS = [
    (aten.rand.default, ([5, 3],), {}),
    (aten.randn.default, ([70, 3],), {"dtype": torch.float64}),
    (aten.randint.default, (9, [5, 3]), {}),
    (aten.randint.low, (2, 9, [5, 3]), {}),
    (aten.randperm.default, (20,), {}),
    (aten.rand_like.default, (torch.ones(4, 3).t(),), {}),
    (aten.randn_like.default, (torch.ones(40, 3),), {}),
    (aten.bernoulli.default, (torch.full((6, 7), 0.3),), {}),
    (aten.bernoulli.p, (torch.ones(6, 7), 0.3), {}),
    (aten.multinomial.default, (torch.ones(4, 9), 3), {}),
    (aten.normal.Tensor_float, (torch.ones(40), 2.0), {}),
    (aten.poisson.default, (torch.full((6, 7), 5.0),), {}),
]


@pytest.mark.parametrize(("target", "args", "kwargs"), CALLS, ids=lambda value: str(value)[:20])
def test_operators_that_take_a_generator_or_have_an_overload_that_does(target, args, kwargs):
    node = node_of(target, *args, **kwargs)
    assert is_random(node)
    assert_same(drawn_apart(node), drawn(target, *args, **kwargs))


@pytest.mark.parametrize(
    "node",
    [
        node_of(aten._scaled_dot_product_efficient_attention.default),
        node_of(aten.bernoulli.default, torch.ones(3), generator=torch.Generator()),
        node_of(torch.rand, 3),
    ],
    ids=["takes none", "has one", "no operator"],
)
def test_some_have_none(node):
    assert generator_variant(node) is None


def test_dropout_elsewhere_is_left_as_it_is():
    """How it is written out is known of the CPU and of CUDA."""
    node = node_of(aten.native_dropout.default, torch.empty(3, device="meta"), 0.5, True)
    assert generator_variant(node) is drop_out
    node.meta["val"] = torch.empty(3, device="meta")
    assert generator_variant(node) is None
