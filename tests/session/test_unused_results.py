"""Results that a loss does not use: parameters that only they need have no gradient, as in plain execution."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402
from fusible import needs_compiler  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh", "quick_compiler")
KERNELS = ["torch", pytest.param("inductor", marks=needs_compiler)]


class Heads(nn.Module):
    """A trunk with two heads, a layer that only a detached result needs, and one that nothing needs.

    The third result is a view of the second, and the fourth one of the input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right, self.cut, self.unused = (nn.Linear(8, 8) for _ in range(5))

    def forward(self, x):
        inside = torch.tanh(self.trunk(x))
        right = torch.tanh(self.right(inside))
        return torch.tanh(self.left(inside)), right, right.view(-1), x[1:], self.cut(x).detach()


class Broken(Heads):
    """The same in two graphs. The right head's layer is in the first of them, whose only result goes to the other."""

    def forward(self, x):
        right = torch.tanh(self.right(x))
        torch._dynamo.graph_break()
        return torch.tanh(self.left(x)), torch.sin(right), right.view(-1), x[1:], self.cut(x).detach()


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_like(found, expected):
    assert [name for name, g in found.items() if g is None] == [name for name, g in expected.items() if g is None]
    for name, gradient in found.items():
        assert gradient is None or torch.allclose(gradient, expected[name], atol=1e-6), name


def both(model, run, kernels):
    """Gradients of a fitted model after something was run with it, and of the original."""
    x = torch.randn(4, 8)
    plain = copy.deepcopy(model)
    fitted = elbowroom.fit(model, x, budget="1GiB", kernels=kernels, times="estimate")
    returned = [run(each, x) for each in (fitted, plain)]
    assert_like(gradients(fitted), gradients(plain))
    return returned


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("there", [False, True])
def test_gradients_are_none_where_they_are_in_plain_execution(kernels, used, there):
    """Also where gradients are there before: the others stay as they are."""

    def run(model, x):
        if there:
            for n, p in enumerate(model.parameters()):
                p.grad = torch.full_like(p, float(n))
        results = model(x)
        sum(results[n].sum() for n in used).backward()

    both(Heads(), run, kernels)


@pytest.mark.parametrize("kernels", KERNELS)
def test_one_step_after_the_other_with_other_results(kernels):
    def run(model, x):
        for used in (0, 1, 0, 2):
            model(x)[used].square().sum().backward()
            if used:
                model.zero_grad()
        model(x)[0].sum().backward()

    both(Heads(), run, kernels)


@pytest.mark.parametrize("kernels", KERNELS)
def test_two_backwards_of_one_forward(kernels):
    def run(model, x):
        results = model(x)
        results[1].sum().backward(retain_graph=True)
        assert model.left.weight.grad is None
        results[0].sum().backward()

    both(Heads(), run, kernels)


@pytest.mark.parametrize("kernels", KERNELS)
def test_whoever_asks_autograd_gets_none(kernels):
    def run(model, x):
        return torch.autograd.grad(model(x)[0].sum(), list(model.parameters()), allow_unused=True)

    found, expected = both(Heads(), run, kernels)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("used", [0, 1, 2])
def test_gradients_that_do_not_arrive_in_one_graph_do_not_arrive_in_the_one_before(kernels, used):
    both(Broken(), lambda model, x: model(x)[used].sum().backward(), kernels)


class Apart(nn.Module):
    """A result for each input."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, y):
        return torch.tanh(self.left(x)), torch.tanh(self.right(y))


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_input_that_only_an_unused_result_needs(kernels):
    model, inputs = Apart(), [torch.randn(4, 8, requires_grad=True) for _ in range(2)]
    fitted = elbowroom.fit(model, *inputs, budget="1GiB", kernels=kernels, times="estimate")
    fitted(*inputs)[0].sum().backward()
    assert [value.grad is None for value in (*inputs, model.left.bias, model.right.bias)] == [False, True] * 2
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(fitted(*inputs)[0].sum(), inputs)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", [Heads, Broken])
def test_hooks_of_parameters_that_no_gradient_reaches_are_not_called(kernels, kind):
    """Neither where other results of a graph are used, nor where no result is; and later they are."""

    def run(model, x):
        seen = []
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: seen.append((name, "before", gradient.clone())))
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: seen.append((name, "after", p.grad.clone()))
            )
        for used in (0, 1, 0):
            model(x)[used].sum().backward()
        model.right.weight.register_hook(lambda gradient: 2 * gradient)
        for used in (0, 1):
            model(x)[used].sum().backward()
        return sorted(seen, key=lambda each: each[:2])

    for (*ours, found), (*theirs, expected) in zip(*both(kind(), run, kernels), strict=True):
        assert ours == theirs
        assert torch.allclose(found, expected, atol=1e-5)


def test_a_backward_without_some_gradients_takes_no_more_memory_than_with_them():
    """Gradients that go nowhere are let go as soon as they are computed."""
    from elbowroom.measure.memory import measure

    model = nn.Sequential(Wide(), Wide())
    x = torch.randn(64, 64)
    fitted = elbowroom.fit(model, x, budget="1GiB", kernels="torch", times="estimate")
    peaks = {}
    for used in ((0, 1), (0,)):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for _ in range(2):  # programs are written at first
            with measure("cpu", timeline=False) as measured:
                results = fitted(x)
                torch.autograd.backward([results[n] for n in used], [torch.ones(64, 64) for _ in used])
        peaks[used] = measured.peak_bytes
        del results
    assert peaks[0,] <= peaks[0, 1]


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        one, two = x if isinstance(x, tuple) else (x, x)
        for n, layer in enumerate(self.layers):
            one, two = (torch.tanh(layer(one)), two) if n % 2 else (one, torch.tanh(layer(two)))
        return one, two
