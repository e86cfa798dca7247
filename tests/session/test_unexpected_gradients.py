"""Whoever trains a fitted model around its plan is told so, and nobody else."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from elbowroom.errors import Unplanned  # noqa: E402
from elbowroom.execute.accumulation import has_hooks  # noqa: E402
from trained import fit  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


def small():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def batch():
    return torch.randn(4, 8)


def fitted(model=None, **options):
    return fit(model or small(), batch(), budget="1MiB", **options)


def train(model):
    model(batch()).sum().backward()


AROUND = {
    "forward": lambda model, x: model.forward(x),
    "a part": lambda model, x: model[0](x),
    "compiled": lambda model, x: torch.compile(lambda given: model(given), backend="eager")(x),
}


@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_gradients_without_a_call_are_said(around, calls):
    model = fitted()
    for _ in range(calls):
        train(model)
    with pytest.warns(UserWarning, match="got gradients without having been called"):
        around(model, batch()).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model)


def test_parameters_that_take_the_place_of_others_tell_from_the_next_call_on():
    model = fitted()
    train(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    train(model)
    with pytest.warns(UserWarning, match="without having been called"):
        model.forward(batch()).sum().backward()


@pytest.mark.parametrize("calls", [0, 2])
def test_a_strict_model_that_is_not_called_raises(calls):
    model = fitted(strict=True)
    for _ in range(calls):
        train(model)
    with pytest.raises(Unplanned, match="without having been called"):
        model.forward(batch()).sum().backward()


def test_stage_by_stage_too():
    model = small()
    fit(model, batch(), budget="1MiB", stages=list(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model)
        train(model)
    with pytest.warns(UserWarning, match="without having been called"):
        model.forward(batch()).sum().backward()


def test_whichever_parameter_gets_a_gradient_tells():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.layer = nn.Linear(3, 3), nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x)

    model = fitted(Model())
    with pytest.warns(UserWarning, match="without having been called"):
        model.forward(batch()).sum().backward()


class Halves(nn.Module):
    """Of two graphs, or of one and a part that PyTorch does not trace."""

    def __init__(self, traced: bool) -> None:
        super().__init__()
        self.first, self.last, self.traced = nn.Linear(8, 8), nn.Linear(8, 8), traced

    def forward(self, x):
        h = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.last(h) if self.traced else torch._dynamo.disable(self.last)(h)


def in_parts():
    return fitted(Halves(True))


def partly_planned():
    with pytest.warns(UserWarning, match="runs outside the traced graphs"):
        return fitted(Halves(False))


def hooked():
    """Planned, and gradients are left to autograd."""
    model = small()
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    return fitted(model)


def evaluated(model):
    with torch.no_grad():
        model(batch())
    train(model)


def off(model):
    with model.elbowroom.off():
        out = model(batch())
    out.sum().backward()
    train(model)


def twice_before_a_backward(model):
    with model.elbowroom.off():
        first, second = model(batch()), model(batch())
    first.sum().backward()
    second.sum().backward()


def outside_too(model):
    """The loss reads a parameter itself."""
    weight = next(model.parameters())
    (model(batch()).sum() + weight.square().sum()).backward()


def in_a_checkpoint(model):
    x = batch().requires_grad_()
    checkpoint(model, x, use_reentrant=False).sum().backward()
    checkpoint(model, x, use_reentrant=True).sum().backward()


def on_the_host(model):
    with torch.autograd.graph.save_on_cpu():
        out = model(batch())
    out.sum().backward()


def accumulated(model):
    train(model)
    train(model)


def asked_for(model):
    torch.autograd.grad(model(batch()).sum(), list(model.parameters()))
    model(batch()).sum().backward(inputs=list(model.parameters()))


DONE = [evaluated, off, twice_before_a_backward, outside_too, accumulated, in_a_checkpoint, on_the_host, asked_for]


@pytest.mark.parametrize("done", DONE)
@pytest.mark.parametrize("made", [fitted, in_parts, partly_planned, hooked])
def test_nothing_is_said_of_steps_that_a_call_accounts_for(made, done):
    model = made()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done(model)
        done(model)


def test_nothing_is_said_twice_of_steps_that_cannot_be_planned():
    class Untraceable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        @torch._dynamo.disable
        def forward(self, x):
            return self.layer(x)

    with pytest.warns(UserWarning, match="is not planned"):
        model = fitted(Untraceable())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model)
        train(model)


def test_of_many_parameters_few_are_watched_once_the_model_was_called():
    model = fitted(nn.Sequential(*(nn.Linear(8, 8) for _ in range(12))))
    assert all(p._post_accumulate_grad_hooks for p in model.parameters())
    train(model)
    watched = [bool(p._post_accumulate_grad_hooks) for p in model.parameters()]
    assert sum(watched) == 3
    assert watched[0]
    assert watched[-1]
    session = model.elbowroom
    fit(model, batch(), budget="1MiB")
    assert not session._gradients._watched


def test_gradients_of_watched_parameters_are_not_left_to_autograd():
    model = fitted()
    train(model)
    assert not any(has_hooks(p) for p in model.parameters())
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: None)
    assert [has_hooks(p) for p in model.parameters()] == [True, False, False, False]
