"""Sessions with fused kernels: where these fail or do not fit, PyTorch's serve, and it is said."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from itertools import count

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.errors import BudgetTooSmall  # noqa: E402
from elbowroom.execute import rehearsal  # noqa: E402
from elbowroom.execute.region import Region  # noqa: E402
from elbowroom.execute.trials import Trials  # noqa: E402
from elbowroom.execute.variants import Variants  # noqa: E402
from elbowroom.session import late_gradients, looking  # noqa: E402
from fusible import Cnn, needs_compiler, perceptron  # noqa: E402
from trained import only_entry  # noqa: E402

pytestmark = [needs_compiler, pytest.mark.usefixtures("quick_compiler")]


def assert_falls_back(budget, match: str) -> None:
    model, x = perceptron()
    plain = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=match) as said:
        fitted = elbowroom.fit(model, x, budget=budget, kernels="inductor", times="estimate")
    assert len([s for s in said if "elbowroom" in str(s.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted(x).square().sum().backward()
    plain(x).square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    (entry,) = fitted.elbowroom.entries.values()
    assert entry.plan.peak_bytes <= entry.plan.budget_bytes


def test_a_compiler_that_fails_is_said_once_and_done_without(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no compiler here\nand more")

    monkeypatch.setattr("elbowroom.execute.fused.compile_fx_inner", fail)
    assert_falls_back("1GiB", r"PyTorch's own kernels.*compiling it failed: no compiler here$")


def test_where_others_serve_instead_they_are_told_of_budgets_and_optimizers(monkeypatch):
    monkeypatch.setattr("elbowroom.execute.fused.compile_fx_inner", None)
    model, x = perceptron()
    with pytest.warns(UserWarning, match="PyTorch's own kernels"):
        fitted = elbowroom.fit(model, x, budget="1GiB", kernels="inductor", times="estimate")
    entry = only_entry(fitted)
    assert entry.instead is not None
    fitted.elbowroom.set_optimizer(torch.optim.Adam(model.parameters()))
    size = sum(2 * p.numel() * 4 + 4 for p in model.parameters())
    assert entry.plan.resident["optimizer"] == size
    fitted.elbowroom.set_budget("1MiB")
    assert entry.plan.budget_bytes == entry.instead.options.budget_bytes == 2**20
    assert entry.plan.resident["optimizer"] == size
    with pytest.raises(BudgetTooSmall):
        fitted.elbowroom.set_budget(1024)
    assert fitted.elbowroom.options.budget_bytes == entry.instead.options.budget_bytes == 2**20
    assert entry.plan.budget_bytes == 2**20


def test_a_graph_that_cannot_be_contracted_says_what_failed(monkeypatch):
    def fail(captured):
        raise KeyError("odd")

    monkeypatch.setattr("elbowroom.capture.backend.contract", fail)
    assert_falls_back("1GiB", r"PyTorch's own kernels.*compiling it failed: KeyError: 'odd'$")


def test_a_budget_that_fused_programs_cannot_meet_is_met_without_them(monkeypatch):
    monkeypatch.setattr(Trials, "best", lambda *args: None)
    assert_falls_back("1GiB", r"PyTorch's own kernels.*compiled, it needs at least")


def test_a_budget_that_nothing_can_meet_is_refused():
    model, x = perceptron()
    with pytest.raises(BudgetTooSmall) as unfused:
        elbowroom.fit(model, x, budget=1024, kernels="torch", times="estimate")
    with pytest.raises(BudgetTooSmall) as either:
        elbowroom.fit(model, x, budget=1024, kernels="inductor", times="estimate")
    assert either.value.least_budget <= unfused.value.least_budget


def test_the_least_budget_that_is_named_does_where_programs_take_more_than_predicted(monkeypatch):
    """And more each time that they are measured, as it may be on a GPU."""
    measured, more = rehearsal.launched, count(12345, 1000)

    def launched(*args):
        trial = measured(*args)
        return replace(trial, peak_bytes=trial.peak_bytes + next(more))

    def have_own_room(late, region, options, resident):  # so that trials begin anew with another budget
        return options.budget_bytes > 1

    monkeypatch.setattr(rehearsal, "launched", launched)
    monkeypatch.setattr("elbowroom.session.late_gradients.have_own_room", have_own_room)
    monkeypatch.setattr("elbowroom.session.steps.have_own_room", have_own_room)
    model, x = perceptron()
    fitted = elbowroom.fit(model, x, budget="1GiB", kernels="inductor")
    roomy = fitted.elbowroom.plan.peak_bytes
    with pytest.raises(BudgetTooSmall) as refusal:
        fitted.elbowroom.set_budget(1)
    assert refusal.value.least_budget < roomy
    fitted.elbowroom.set_budget(refusal.value.least_budget)
    assert fitted.elbowroom.plan.budget_bytes == refusal.value.least_budget


def test_a_budget_too_small_for_want_of_a_compiler_says_so(monkeypatch):
    monkeypatch.setattr("elbowroom.execute.fused.compile_fx_inner", None)
    model, x = perceptron()
    with pytest.raises(BudgetTooSmall, match=r"is too small.*PyTorch's own kernels, because compiling it failed"):
        elbowroom.fit(model, x, budget=1024, kernels="inductor", times="estimate")


def test_a_model_that_changes_is_tried_again_before_its_step_runs(monkeypatch):
    """Freezing a layer makes PyTorch trace anew; nothing has run by then."""
    traced = []

    class Noted(Region):
        def __init__(self, captured, looks):
            super().__init__(captured, looks)
            traced.append(self)

    monkeypatch.setattr(looking, "Region", Noted)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    plain, x = copy.deepcopy(model), torch.randn(64, 16)
    fitted = elbowroom.fit(model, x, budget="1GiB", kernels="inductor", loss=lambda y: y.sum(), strict=True)
    for step in range(3):
        for each in (fitted, plain):
            each[2].requires_grad_(step < 1)
            each.zero_grad()
        fitted(x).backward()
        plain(x).sum().backward()
        for ours, theirs in zip(fitted.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    first, second = traced
    for region in (first, second):
        assert [ready.fused is None for ready in region.programs] == [False]
    (region,) = only_entry(fitted).regions
    assert region is second
    assert len(region.traced.graph.gradients) == 4


class ScaledByItself(nn.Module):
    """Fused kernels round its sum otherwise than tracing did, and what follows is traced anew with the new number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.last(x * x.sum().item()).square().mean()


def test_a_step_of_which_a_part_is_traced_anew_is_verified_as_a_fused_one():
    torch.manual_seed(0)
    model, x = ScaledByItself(), torch.randn(64, 32)
    plain = copy.deepcopy(model)
    fitted = elbowroom.fit(model, x, budget="1GiB", kernels="inductor", loss=lambda loss: loss, verify=True)
    fitted(x).backward()
    plain(x).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_little_gradients_of_a_step_that_may_be_recorded_are_not_late(monkeypatch):
    """They get a place of their own, unless the budget becomes so small that they are no longer little."""
    monkeypatch.setattr(late_gradients, "recordable", lambda captured: True)
    torch._dynamo.reset()
    model, batch = Cnn(16, layers=8), (torch.randn(8, 16, 8, 8), torch.randint(10, (8,)))
    fitted = elbowroom.fit(model, *batch, budget="1GiB", kernels="inductor", times="estimate")
    (entry,) = fitted.elbowroom.entries.values()
    assert not entry.late
    assert not entry.plan.late_gradients
    (region,) = entry.regions
    fitted(*batch).backward()
    assert region.programs[region.current].fused.has_run == {"write"}
    room = 19 * sum(p.numel() * p.element_size() for p in model.parameters())
    fitted.zero_grad()
    fitted.elbowroom.set_budget(entry.plan.resident_bytes + room)
    assert entry.plan.late_gradients
    assert len(entry.late) == len(list(model.parameters()))
    with pytest.raises(BudgetTooSmall):
        fitted.elbowroom.set_budget(entry.plan.resident_bytes + 1)
    assert entry.late
    assert region.programs[region.current].build.makes == "return"
    fitted.elbowroom.set_budget("1GiB")
    assert not entry.late
    assert region.programs[region.current].build.makes == "write"


def test_a_budget_is_set_when_parameters_have_changed_their_type():
    """What was planned of the former type is planned again, too, and tried on tensors of that type."""
    model, x = perceptron()
    fitted = elbowroom.fit(model, x, budget="1GiB", kernels="inductor", times="estimate")
    fitted.double()
    fitted(x.double()).square().sum().backward()
    fitted.zero_grad()
    assert len(fitted.elbowroom.entries) == 2
    with pytest.raises(BudgetTooSmall):
        fitted.elbowroom.set_budget(1)
    fitted.elbowroom.set_budget("1MiB")
    assert {entry.plan.budget_bytes for entry in fitted.elbowroom.entries.values()} == {2**20}


class Queue(nn.Module):
    """Writes to a buffer, at a place that changes with every step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(8, 32))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        with torch.no_grad():
            place, rows = int(self.place), x.shape[0]
            self.queue[:, place : place + rows] = x.mean(1).t()
            self.place[0] = (place + rows) % 32
        return self.head(x + (x @ self.queue.clone()).softmax(-1).mean(-1, keepdim=True))


@pytest.mark.parametrize("first", range(4))
@pytest.mark.filterwarnings("error:elbowroom")
def test_no_number_that_changes_is_compiled_for_some_of_its_values_only(first, monkeypatch):
    """A place is 0 now and then. What is compiled when it is must not stay in force when it is not."""
    compiled, make = [], Variants._make
    monkeypatch.setattr(Variants, "_make", lambda self, numbers: compiled.append(numbers) or make(self, numbers))
    torch.manual_seed(0)
    plain, x = Queue(), torch.randn(8, 8, 8)
    plain.place[0] = 8 * first
    ours = elbowroom.fit(copy.deepcopy(plain), x, budget="1MiB", kernels="inductor")
    for step in range(16):
        compiled_before = len(compiled)
        if step == 3:
            torch._dynamo.reset()  # so that the number is known to change, and has another value
        x = torch.randn(8, 8, 8)
        for model in (plain, ours):
            model.zero_grad()
            model(x).square().mean().backward()
        torch.testing.assert_close(ours.queue, plain.queue)
        assert ours.place == plain.place
        torch.testing.assert_close(ours.head.weight.grad, plain.head.weight.grad)
    assert 0 < compiled_before == len(compiled)
