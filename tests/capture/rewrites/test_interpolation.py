"""Gradients of bilinear interpolation as matrix products: the same sums; what only looks like one stays as it is."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from elbowroom.capture.rewrites import interpolation  # noqa: E402
from elbowroom.capture.rewrites.interpolation import multiply_interpolations  # noqa: E402
from tracing import traced  # noqa: E402

aten = torch.ops.aten
SIZES = st.tuples(st.integers(1, 7), st.integers(1, 7))


def gradient_of(function):
    def gradient(image, arriving):
        image = image.detach().requires_grad_()
        (found,) = torch.autograd.grad(function(image), image, arriving)
        return found

    return gradient


def puts(graph):
    return [node for node in graph.nodes if node.target in interpolation._PUTS]


def replaced(module):
    multiply_interpolations(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    return not puts(module.graph)


@settings(max_examples=20, deadline=None)
@given(
    small=SIZES, large=SIZES, images=st.integers(1, 2), channels=st.integers(1, 3), corners=st.booleans(),
    last=st.booleans(), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_the_gradient_is_the_same(small, large, images, channels, corners, last, dtype):
    torch.manual_seed(0)
    layout = torch.channels_last if last else torch.contiguous_format
    image = torch.randn(images, channels, *small, dtype=dtype).to(memory_format=layout)
    arriving = torch.randn(images, channels, *large, dtype=dtype).to(memory_format=layout)
    gradient = gradient_of(lambda x: F.interpolate(x, large, mode="bilinear", align_corners=corners))
    module = traced(gradient, image, arriving)
    if not puts(module.graph):  # nothing to interpolate
        assert small == large
        return
    original = module(image, arriving)
    assert replaced(module)
    exact = gradient(image.double(), arriving.double())
    actual = module(image, arriving)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), exact, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=2e-2)
    assert (actual - exact).abs().max() <= 1.5 * (original - exact).abs().max() + 1e-6


def test_what_is_read_elsewhere_as_well_gets_both_gradients():
    image, arriving = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 9, 9)
    gradient = gradient_of(lambda x: F.interpolate(x.tanh(), (9, 9), mode="bilinear") + x.sum() + x.tanh().sum())
    module = traced(gradient, image, arriving)
    expected = module(image, arriving)
    multiply_interpolations(module.graph)
    module.recompile()
    torch.testing.assert_close(module(image, arriving), expected)


def sharing(weigh):
    """Adds what arrives to four places, by shares that are not those of an interpolation."""

    def gradient(image, arriving):
        y, x = torch.arange(4).reshape(4, 1) // 2, torch.arange(4) // 2
        below, beside = (y + 1).clamp(max=1), (x + 1).clamp(max=1)
        places = (y, x), (y, beside), (below, x), (below, beside)
        total = None
        for (row, column), value in zip(places, weigh(image, arriving), strict=True):
            zeros = torch.full_like(image, 0)
            put = aten._unsafe_index_put(zeros, [None, None, row, column], value, True)
            total = put if total is None else total + put
        return total

    return gradient


def halves(image, arriving):
    down, right = torch.full((4, 1), 0.25), torch.full((4,), 0.5)
    return arriving, arriving * right, arriving * down, arriving * down * right


def squares(image, arriving):
    return (arriving * arriving,) * 3 + (arriving * torch.full((4, 1), 0.5) * torch.full((4,), 0.5),)


def shared(down, right, arriving):
    both, one = arriving * down * right, arriving * down
    return arriving - one - (arriving - one) * right, (arriving - one) * right, one - both, both


def variable(image, arriving):
    return shared(image[0, 0, 0, 0].expand(4, 1), torch.full((4,), 0.5), arriving)


def fair(image, arriving):
    return shared(torch.full((4, 1), 0.25), torch.full((4,), 0.5), arriving)


@pytest.mark.parametrize(("weigh", "is_one"), [(halves, False), (squares, False), (variable, False), (fair, True)])
def test_what_only_looks_like_one_stays(weigh, is_one):
    image, arriving = torch.rand(1, 2, 2, 2), torch.randn(1, 2, 4, 4)
    module = traced(sharing(weigh), image, arriving)
    assert any(map(interpolation._four_puts, module.graph.nodes))
    expected = module(image, arriving)
    assert replaced(module) == is_one
    torch.testing.assert_close(module(image, arriving), expected)


def test_very_large_images_stay():
    module = traced(
        gradient_of(lambda x: F.interpolate(x, (4, 4200), mode="bilinear")),
        torch.randn(1, 1, 2, 2100),
        torch.randn(1, 1, 4, 4200),
    )
    assert puts(module.graph)
    assert not replaced(module)
