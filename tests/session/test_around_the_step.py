"""Faults around a step: exceptions, resets, many fits, changed modules, wrong inputs, what nobody planned."""

from __future__ import annotations

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.errors import BudgetTooSmall, OverBudget  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


class Small(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, width), nn.Linear(width, 16)
        self.broken = False

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if self.broken:
            raise ArithmeticError("broken")
        return torch.tanh(self.last(h))


def loss(output):
    return output.square().mean()


def least(model, x, **options):
    with pytest.raises(BudgetTooSmall) as refusal:
        elbowroom.fit(model, x, budget=1024, **options)
    return refusal.value.least_budget


def assert_planned(model, x):
    """Nothing is said, and a program runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).sum().backward()
    (entry,) = model.elbowroom.entries.values()
    assert entry.regions[0].runs


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_one_fit_after_the_other_is_planned(count):
    x = torch.randn(64, 16)
    for number in range(count):
        model = elbowroom.fit(Small(8 + number), x, budget="1GiB", loss=loss, times="estimate", strict=True)
        assert_planned(model, x)


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_one_model_is_fitted_to_one_budget_after_the_other(count):
    model, x = Small(), torch.randn(64, 16)
    for number in range(count):
        elbowroom.fit(model, x, budget=2**20 + number, loss=loss, times="estimate", strict=True)
        model.zero_grad()
        assert_planned(model, x)


def test_an_exception_in_one_model_leaves_others_planned():
    x = torch.randn(64, 16)
    ours, other = (elbowroom.fit(Small(), x, budget="1MiB", loss=loss, strict=True) for _ in range(2))
    for _ in range(3):
        other.broken = True
        with pytest.raises(ArithmeticError, match="broken"):
            other(x)
        other.broken = False
        for model in (ours, other):
            model.zero_grad()
            assert_planned(model, x)


class InParts(Small):
    """Its second graph is that of a function which may raise."""

    def forward(self, x):
        h = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        h = h.sin()
        if self.broken:
            raise ArithmeticError("broken")
        return torch.tanh(self.last(h))


def test_an_exception_in_one_model_leaves_others_of_its_class_planned_in_all_parts():
    x = torch.randn(64, 16)
    ours, other = (elbowroom.fit(InParts(), x, budget="1MiB", loss=loss) for _ in range(2))
    for steps in range(1, 4):
        other.broken = True
        with pytest.raises(ArithmeticError, match="broken"):
            other(x)
        other.broken = False
        for model in (ours, other):
            model.zero_grad()
            model(x).backward()
            (entry,) = model.elbowroom.entries.values()
            assert len(entry.regions) >= 2
            assert min(region.runs for region in entry.regions) >= steps


def test_a_reset_of_the_tracer_leaves_the_least_budget_enough():
    model, x = Small(), torch.randn(64, 16)
    elbowroom.fit(model, x, budget=least(model, x, loss=loss), loss=loss, strict=True)
    assert_planned(model, x)
    torch._dynamo.reset()
    model.zero_grad()
    assert_planned(model, x)


def test_a_submodule_that_is_replaced_is_planned_anew():
    torch.manual_seed(0)
    plain, x = Small(), torch.randn(64, 16)
    ours = copy.deepcopy(plain)
    elbowroom.fit(ours, x, budget="1MiB", loss=loss, strict=True)
    ours(x).backward()
    first, last = nn.Linear(16, 48), nn.Linear(48, 16)
    for model in (plain, ours):
        model.zero_grad()
        model.first, model.last = copy.deepcopy(first), copy.deepcopy(last)
    ours(x).backward()
    loss(plain(x)).backward()
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("wrong", [torch.randn(4, 7), "text", None])
def test_a_wrong_input_raises_the_models_own_error(wrong):
    plain, x = Small(), torch.randn(64, 16)
    ours = elbowroom.fit(copy.deepcopy(plain), x, budget="1MiB", loss=loss)
    with pytest.raises(Exception) as expected:
        plain(wrong)
    for call in (lambda: ours(wrong), lambda: elbowroom.fit(Small(), wrong, budget="1MiB", loss=loss)):
        with pytest.raises(expected.type) as raised:
            call()
        assert str(raised.value) == str(expected.value)
    assert_planned(ours, x)


class Printing(nn.Module):
    """In parts, because it prints between them. The last one takes a number that each step changes, and computes with
    it again where memory is short."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.calls = 0

    def forward(self, x):
        h = torch.nn.functional.layer_norm(torch.nn.functional.gelu(self.first(x)), (8,))
        h = self.second(h) * 1.5
        print(end="")
        self.calls += 1
        return self.last(h * (1.0 + 0.5 / self.calls))


def test_after_wrong_inputs_a_budget_that_was_found_to_do_still_does():
    """Everything is traced anew after an error. Planned from nothing, the same step might be refused; traced in the
    middle of a step, it would not be planned."""
    model, x = Printing(), torch.randn(16, 8, 8)
    plain = copy.deepcopy(model)
    elbowroom.fit(model, x, budget="1MiB")
    known = None
    while True:  # what is looked for within one budget shows that a smaller one does
        with pytest.raises(BudgetTooSmall) as refusal:
            model.elbowroom.set_budget(1)
        if refusal.value.least_budget == known:
            break
        known = refusal.value.least_budget
        model.elbowroom.set_budget(known)
    assert least(Printing(), x) >= known
    for _ in range(10):
        for each in (plain, model):
            with pytest.raises(RuntimeError):
                each(x[..., :-1])
            each.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x).square().mean().backward()
        plain(x).square().mean().backward()
        assert torch.equal(plain.first.weight.grad, model.first.weight.grad)
    assert plain.calls == model.calls
    assert model.elbowroom.plan.peak_bytes <= known


class Scaled(Small):
    """In one piece, with a number that each step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x * (1.0 + 0.5 / self.calls))


def test_a_step_stays_planned_after_any_number_of_wrong_inputs():
    model, x = Scaled(), torch.randn(64, 16)
    elbowroom.fit(model, x, budget="1MiB", strict=True)
    for _ in range(12):
        with pytest.raises(RuntimeError):
            model(x[..., :-1])
        model(x).square().mean().backward()


def greedy(output):
    """Takes eight copies of the output, and keeps them."""
    return sum((output * n).exp() for n in range(8)).mean()


def test_a_loss_outside_that_takes_more_is_said_and_planned_for():
    model, x = Small(), torch.randn(256, 16)
    elbowroom.fit(model, x, budget=least(model, x) + 20_000)
    with pytest.warns(UserWarning, match="more than its budget"):
        greedy(model(x)).backward()
    strict = Small()
    elbowroom.fit(strict, x, budget=least(strict, x) + 20_000, strict=True)
    with pytest.raises(OverBudget, match="more than its budget"):
        greedy(strict(x)).backward()


@torch._dynamo.disable
def outside(h):
    """Takes much more than it keeps."""
    return h + h.repeat(60, 1).mean()


def test_what_an_untraced_part_takes_is_said():
    class Model(Small):
        def forward(self, x):
            return super().forward(outside(torch.tanh(x))).square().mean()

    model, x = Model(), torch.randn(256, 16)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        elbowroom.fit(model, x, budget=least(model, x))
        model(x).backward()
    assert any("more than its budget" in str(each.message) for each in said)


@pytest.mark.parametrize("at", ["fit", "step"])
def test_an_interrupt_leaves_gradients_enabled(at, monkeypatch):
    """It may come in the middle of a block without gradients, as when operators are measured."""

    def interrupted(*_):
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    if at == "step":
        elbowroom.fit(model, x, budget="1MiB")
    monkeypatch.setattr("elbowroom.session.looking.Looker.run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _ = elbowroom.fit(model, x, budget="1MiB") if at == "fit" else model(x)
    assert torch.is_grad_enabled()
