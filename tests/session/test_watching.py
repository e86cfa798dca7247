"""Where a watched step begins and ends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.errors import BudgetTooSmall, OverBudget  # noqa: E402
from elbowroom.session.watching import Watch, more_outside  # noqa: E402

MIB = 2**20

pytestmark = pytest.mark.usefixtures("fresh")


def test_a_backward_inside_of_another_ends_no_step():
    """As those of stages and of reentrant checkpoints."""
    ended = []
    watch = Watch(nn.Linear(1, 1), lambda _, start, taken: ended.append(taken - start))

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            watch.backward_begins()
            with torch.enable_grad():
                torch.ones(1, requires_grad=True).exp().backward()
            torch.ones(MIB, dtype=torch.uint8)  # what comes after it belongs to the step
            return gradient

    watch.begin(object(), SimpleNamespace(budget_bytes=0, resident={}), torch.device("cpu"), None)
    Node.apply(torch.ones(1, requires_grad=True)).backward()
    (taken,) = ended
    assert taken >= MIB


def layers():
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))


class InTwoGraphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = layers()

    def forward(self, x):
        h = self.inner[0](x)
        torch._dynamo.graph_break()
        return self.inner[2](self.inner[1](h))


@pytest.mark.parametrize("kind", ["whole", "in parts", "by stages"])
def test_a_forward_whose_backward_never_comes_is_not_watched_for_ever(kind):
    model, x = InTwoGraphs() if kind == "in parts" else layers(), torch.randn(8, 16)
    stages = {"stages": list(model)} if kind == "by stages" else {}
    elbowroom.fit(model, x, budget="1GiB", **stages)
    output = model(x)
    assert torch._C._autograd._profiler_enabled()
    loss = output.square().mean()
    del output
    assert torch._C._autograd._profiler_enabled()  # its backward may come
    del loss
    assert not torch._C._autograd._profiler_enabled()
    assert torch.autograd._engine_run_backward.__module__ == "torch.autograd.graph"
    model(x).square().mean().backward()
    assert not torch._C._autograd._profiler_enabled()
    assert model.elbowroom._latest.unwatched == 2  # the second step was watched to its end


@pytest.mark.parametrize("kind", ["whole", "in parts"])
def test_a_step_that_fails_is_not_watched_any_longer(kind):
    class Failing(InTwoGraphs if kind == "in parts" else nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.broken = layers(), False

        def forward(self, x):
            if self.broken:
                raise ArithmeticError("broken")
            return super().forward(x) if kind == "in parts" else self.inner(x)

    model, x = Failing(), torch.randn(8, 16)
    elbowroom.fit(model, x, budget="1GiB")
    model.broken = True
    with pytest.raises(ArithmeticError):
        model(x)
    assert not torch._C._autograd._profiler_enabled()


@pytest.mark.parametrize("strict", [False, True])
def test_another_budget_without_room_for_what_was_once_taken_outside_is_planned_and_said(strict):
    """What was seen once may not come again; only those who asked for it are refused."""
    model, x = layers(), torch.randn(64, 16)
    with pytest.raises(BudgetTooSmall) as refusal:
        elbowroom.fit(model, x, budget=1024, strict=strict)
    elbowroom.fit(model, x, budget=refusal.value.least_budget + MIB, strict=strict)
    output = model(x)
    other = torch.ones(4 * MIB, dtype=torch.uint8)
    del other
    with pytest.raises(OverBudget) if strict else pytest.warns(UserWarning, match="more than its budget"):
        output.square().mean().backward()
    model.zero_grad()
    with pytest.raises(BudgetTooSmall) if strict else pytest.warns(UserWarning, match="something outside the plan"):
        model.elbowroom.set_budget(refusal.value.least_budget + MIB // 2)
        model(x).square().mean().backward()


def test_what_a_plan_left_unused_was_taken_from_outside_too():
    plan = SimpleNamespace(budget_bytes=10 * MIB, peak_bytes=7 * MIB, resident={"outside the plan": MIB})
    assert more_outside(plan, 2 * MIB) == (1 + 3 + 2) * MIB + 2 * MIB // 8
