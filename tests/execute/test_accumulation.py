"""Gradients of parameters: taken over, copied, added to those that are there, or handed to autograd."""

from __future__ import annotations

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.execute.accumulation import accumulator, on_trial  # noqa: E402
from fusible import needs_compiler  # noqa: E402
from trained import Net, batch, both  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


def test_gradients_accumulate_over_micro_batches():
    def run(model):
        for seed in range(3):
            (model(*batch(seed=seed)) / 3).backward()

    both(Net(), run, *batch())


def test_autograd_grad_writes_no_gradients():
    def run(model):
        loss = model(*batch())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        assert all(p.grad is None for p in model.parameters())
        return torch.cat([g.flatten() for g in gradients])

    both(Net(), run, *batch())


def test_backward_for_some_inputs_only():
    def run(model):
        some = [model.head.weight, model.stem.bias]
        model(*batch()).backward(inputs=some)

    both(Net(), run, *batch())


def test_hooks_on_parameters_see_their_gradients():
    def run(model):
        seen = {}
        model.head.weight.register_hook(lambda g: seen.update(head=g.clone()) or 2 * g)
        model.stem.weight.register_post_accumulate_grad_hook(lambda p: seen.update(stem=p.grad.clone()))
        model(*batch()).backward()
        return torch.cat([seen["head"].flatten(), seen["stem"].flatten()])

    both(Net(), run, *batch())


# --- as a program does it --------------------------------------------------------------------------------------


class Program(torch.autograd.Function):
    """Stands for a program: its backward makes the gradient of one parameter, and takes it as programs do."""

    @staticmethod
    def forward(ctx, parameter, gradient, owned):
        ctx.parameter, ctx.gradient, ctx.owned = parameter, gradient, owned
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        accumulate, accumulate_copy = accumulator()
        rest = (accumulate if ctx.owned else accumulate_copy)(ctx.parameter, ctx.gradient)
        ctx.handed_on = rest
        return rest, None, None


def loss_of(parameter, gradient=None, *, owned=True):
    return Program.apply(parameter, torch.ones(4, 3) if gradient is None else gradient, owned)


@pytest.fixture
def parameter():
    return nn.Parameter(torch.zeros(4, 3))


def test_a_gradient_of_its_own_is_taken_over(parameter):
    gradient = torch.ones(4, 3)
    loss_of(parameter, gradient).backward()
    assert parameter.grad.data_ptr() == gradient.data_ptr()


def test_a_gradient_that_others_may_hold_is_copied(parameter):
    gradient = torch.ones(4, 3)
    loss_of(parameter, gradient, owned=False).backward()
    assert parameter.grad.data_ptr() != gradient.data_ptr()
    assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("gradient", [torch.ones(3, 4).t(), torch.ones(4, 3, dtype=torch.float64)])
def test_a_gradient_of_another_layout_or_type_is_copied(parameter, gradient):
    """An optimizer expects that a parameter and its gradient are alike."""
    loss_of(parameter, gradient).backward()
    assert parameter.grad.data_ptr() != gradient.data_ptr()
    assert (parameter.grad.stride(), parameter.grad.dtype) == (parameter.stride(), parameter.dtype)
    assert torch.equal(parameter.grad, torch.ones(4, 3))


@pytest.mark.parametrize("owned", [True, False])
def test_a_gradient_is_added_to_one_that_is_there_in_its_place(parameter, owned):
    parameter.grad = kept = torch.full((4, 3), 2.0)
    loss_of(parameter, owned=owned).backward()
    assert parameter.grad is kept
    assert torch.equal(kept, torch.full((4, 3), 3.0))


@pytest.mark.parametrize("owned", [True, False])
def test_whoever_asks_autograd_for_gradients_gets_them(parameter, owned):
    (found,) = torch.autograd.grad(loss_of(parameter, owned=owned), parameter)
    assert torch.equal(found, torch.ones(4, 3))
    assert parameter.grad is None


def test_a_backward_for_some_inputs_is_autograds(parameter):
    """It may not reach this parameter at all: autograd knows."""
    other = nn.Parameter(torch.ones(()))
    (loss_of(parameter) + 2 * other).backward(inputs=[other])
    assert parameter.grad is None
    assert other.grad == 2
    loss_of(parameter).backward(inputs=[parameter])
    assert torch.equal(parameter.grad, torch.ones(4, 3))


def test_hooks_see_the_gradient_before_it_is_taken(parameter):
    seen = []
    hook = parameter.register_hook(lambda gradient: seen.append(gradient.clone()) or 3 * gradient)
    loss_of(parameter).backward()
    hook.remove()
    assert torch.equal(seen[0], torch.ones(4, 3))
    assert torch.equal(parameter.grad, torch.full((4, 3), 3.0))
    parameter.grad = None
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    loss_of(parameter).backward()
    assert torch.equal(seen[1], torch.ones(4, 3))


def test_a_gradient_flows_on_through_what_is_no_leaf(parameter):
    loss_of(2 * parameter).backward()
    assert torch.equal(parameter.grad, torch.full((4, 3), 2.0))


@pytest.mark.parametrize("plain_inside", [False, True])
def test_the_innermost_backward_decides(parameter, plain_inside):
    """A backward may run another one: what that was asked for counts, not what the first was."""
    found = []

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad():
                loss = loss_of(parameter)
            if plain_inside:
                loss.backward()
            else:
                found.extend(torch.autograd.grad(loss, parameter))
            return gradient

    x = torch.ones((), requires_grad=True)
    outer = Inside.apply(x)
    if plain_inside:
        torch.autograd.grad(outer, x)
    else:
        outer.backward()
    assert (parameter.grad is None) == (not plain_inside)
    assert len(found) == (not plain_inside)


def test_where_no_backward_runs_gradients_are_handed_over(parameter):
    gradient = torch.ones(4, 3)
    for take in accumulator():
        assert take(parameter, gradient) is gradient
    assert parameter.grad is None


@pytest.mark.parametrize("keeps", [True, False])
def test_a_trial_leaves_gradients_alone(parameter, keeps):
    """It takes as much memory for them: the same one, or a copy."""
    gradient = torch.ones(4, 3)
    with on_trial(keeps=keeps):
        taken, copied = (take(parameter, gradient) for take in accumulator())
    assert parameter.grad is None
    assert (taken is gradient) == keeps
    if keeps:
        assert copied.data_ptr() != gradient.data_ptr()
        assert torch.equal(copied, gradient)
    else:
        assert taken is copied is None


# --- gradients of one program -----------------------------------------------------------------------------------


class Shared(nn.Module):
    """Two parameters with the same gradient, and a third whose gradient is the one that arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = (nn.Parameter(torch.randn(8, 16)) for _ in range(3))

    def forward(self, x):
        return ((self.one + self.two) * x).sin() + self.last


@pytest.fixture(params=["torch", pytest.param("inductor", marks=needs_compiler)])
def shared(request, fresh, quick_compiler):
    x = torch.randn(8, 16)
    return elbowroom.fit(Shared(), x, budget="1GiB", kernels=request.param, times="estimate"), x


def test_every_gradient_has_memory_of_its_own(shared):
    (fitted, x), arriving = shared, torch.randn(8, 16)
    for _ in range(2):
        fitted.zero_grad()
        fitted(x).backward(arriving)
    one, two, last = (parameter.grad for parameter in fitted.parameters())
    assert len({tensor.data_ptr() for tensor in (one, two, last, arriving)}) == 4
    assert torch.equal(one, two)
    assert torch.equal(last, arriving)


def test_gradients_set_to_none_are_gone_at_once(shared):
    """The next step uses their memory: nothing may hold them until garbage is collected."""
    fitted, x = shared
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            fitted(x).sum().backward()
            left = [weakref.ref(parameter.grad) for parameter in fitted.parameters()]
            fitted.zero_grad()
            assert [gradient() for gradient in left] == [None] * 3
    finally:
        gc.enable()
