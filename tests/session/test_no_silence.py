"""Steps that have more in them than graphs: within budget at the least one that there is, or something is said."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.errors import BudgetTooSmall, Unplanned  # noqa: E402
from elbowroom.measure.memory import measure  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        for n, layer in enumerate(self.layers):
            x = self.after(n, torch.tanh(layer(x)))
        return x

    def after(self, n, x):
        return x


class ReadsANumber(Row):
    def after(self, n, x):
        return x * (1 + x.detach().mean().item()) if n == 2 else x


class ReturnsADataclass(Row):
    def forward(self, x):
        x = super().forward(x)
        return Output(x, 2 * x)


class Untraceable(torch.autograd.Function):
    """Takes more than it keeps."""

    @staticmethod
    def forward(ctx, x):
        torch._dynamo.graph_break()
        return x + x.repeat(20, 1).mean()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class HasAnUntraceableFunction(Row):
    def after(self, n, x):
        return Untraceable.apply(x) if n == 2 else x


def loss(output):
    if isinstance(output, Output):
        return output.logits.square().mean() + output.hidden.square().mean()
    return output.square().mean()


def least(model, x):
    with pytest.raises(BudgetTooSmall) as refusal:
        elbowroom.fit(copy.deepcopy(model), x, budget=1024)
    return refusal.value.least_budget


def taken_by_step(model, x):
    """With all that is there before it."""
    model.zero_grad()
    with measure("cpu", timeline=False) as measured:
        loss(model(x)).backward()
    return measured.peak_bytes + sum(p.nbytes for p in model.parameters()) + x.nbytes


def as_accelerate_prepares(model):
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)


def as_it_is(model):
    pass


@pytest.mark.parametrize("kind", [ReadsANumber, ReturnsADataclass])
@pytest.mark.parametrize("change", [as_it_is, as_accelerate_prepares])
def test_at_the_least_budget_a_step_keeps_it_or_says_so(kind, change):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(512, 64)
    budget = least(model, x)
    plain = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        elbowroom.fit(model, x, budget=budget)
        for each in (model, plain):
            change(each)
        for _ in range(4):  # some are watched
            model.zero_grad()
            loss(model(x)).backward()
        taken = [taken_by_step(model, x) for _ in range(2)]
    assert max(taken) <= budget or [each for each in said if "budget" in str(each.message)]
    assert max(taken) <= budget or change is not as_it_is
    loss(plain(x)).backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_a_function_that_cannot_be_traced_is_said_each_time_that_the_budget_is_set():
    model, x = HasAnUntraceableFunction(), torch.randn(512, 64)
    with pytest.warns(UserWarning, match="is not planned"):
        elbowroom.fit(model, x, budget="2MiB")
    with pytest.warns(UserWarning, match="is not planned"):
        model.elbowroom.set_budget("1MiB")
    with pytest.raises(Unplanned):
        elbowroom.fit(HasAnUntraceableFunction(), x, budget="2MiB", strict=True)


@pytest.mark.parametrize("by_stages", [False, True])
@pytest.mark.parametrize(
    "register", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
)
def test_hooks_of_all_modules_run_and_are_said(register, by_stages):
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8, requires_grad=True)
    ours, seen = copy.deepcopy(plain), {}
    elbowroom.fit(ours, x, budget="1MiB", times="estimate", stages=list(ours) if by_stages else None)
    for model in (plain, ours):
        calls = seen[model] = []
        hook = getattr(nn.modules.module, f"register_module_{register}")(lambda m, *_: calls.append(type(m)))  # noqa: B023
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                model(x).sum().backward()
        finally:
            hook.remove()
    assert seen[plain] == seen[ours]
    assert seen[ours]
    assert any("registered for all modules" in str(each.message) for each in said)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(x).sum().backward()
    assert seen[plain] == seen[ours]


def test_stages_that_are_not_planned_are_said_again_of_another_budget():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    fitted = elbowroom.fit(model, x, budget="1MiB", stages=list(model))
    model.register_forward_hook(lambda *_: None)
    for budget in ("2MiB", "3MiB"):
        with pytest.warns(UserWarning, match="has a hook and is no stage"):
            fitted(x)
        fitted.elbowroom.set_budget(budget)
