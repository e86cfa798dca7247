"""Gradients that are not there when a step begins: their memory serves it, until somebody keeps them."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.errors import Unplanned  # noqa: E402
from fitted import least_budget, set_gradients, step_peak  # noqa: E402

WIDTH, DEPTH = 64, 6


class Tower(nn.Module):
    """Wide layers, so that gradients are as large as activations. Two share a weight, one has a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.layers[3].weight = self.layers[1].weight
        self.layers[2].bias.requires_grad_(False)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * torch.sigmoid(x)
        return self.head(x)


def batch(size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(size, WIDTH), torch.randint(8, (size,))


def fitted_tower(budget: int | str = "1GiB", kernels: str = "torch", **options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Tower()
    return elbowroom.fit(model, *batch(), budget=budget, loss=cross_entropy, kernels=kernels, **options)


def entry_of(fitted):
    (entry,) = fitted.elbowroom.entries.values()
    return entry


@pytest.mark.parametrize("accumulates", [False, True])
def test_the_peak_is_predicted_to_the_byte_with_gradients_and_without(accumulates):
    fitted = fitted_tower(accumulates=accumulates)
    entry = entry_of(fitted)
    assert entry.plan.late_gradients == (not accumulates)
    least, plain = least_budget(fitted), entry.plan.peak_bytes
    for share in (0.0, 0.4, 1.0):
        fitted.elbowroom.set_budget(int(least + share * (plain - least)) + 2048)
        step_peak(fitted, batch(), kept=accumulates)  # the first allocates what stays
        measured = step_peak(fitted, batch(), kept=accumulates)
        assert entry.plan.peak_bytes - entry.plan.resident_bytes == pytest.approx(measured, abs=64)
        assert entry.plan.resident_bytes + measured <= entry.plan.budget_bytes


def test_without_them_less_is_enough_and_the_same_is_faster():
    free, kept = fitted_tower(), fitted_tower(accumulates=True)
    assert least_budget(free) < least_budget(kept)
    budget = least_budget(kept)
    free.elbowroom.set_budget(budget)
    kept.elbowroom.set_budget(budget)
    assert entry_of(free).plan.time_s < entry_of(kept).plan.time_s
    assert any("without gradients" in note for note in entry_of(free).plan.notes)


def test_gradients_that_would_have_room_of_their_own_come_late_where_nothing_else_fits(monkeypatch):
    """On a GPU, little ones are planned to lie beside a recording. A budget that does without that is not refused."""
    least = least_budget(fitted_tower())
    monkeypatch.setattr("elbowroom.session.late_gradients.have_own_room", lambda *_: True)
    monkeypatch.setattr("elbowroom.session.steps.have_own_room", lambda *_: True)
    fitted = fitted_tower()
    assert not entry_of(fitted).plan.late_gradients
    fitted.elbowroom.set_budget(least)
    assert entry_of(fitted).plan.late_gradients
    assert entry_of(fitted_tower(least)).plan.late_gradients
    assert least_budget(fitted) == least


def test_the_first_step_that_keeps_them_is_planned_again():
    budget = least_budget(fitted_tower(accumulates=True)) + 2048
    fitted = fitted_tower(budget)
    plain = Tower()
    plain.load_state_dict(fitted.state_dict())
    before = entry_of(fitted).plan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            fitted(*batch()).backward()
    after = entry_of(fitted).plan
    assert before.late_gradients
    assert not after.late_gradients
    assert after.time_s > before.time_s
    assert after.resident_bytes + step_peak(fitted, batch(), kept=True) <= budget
    set_gradients(fitted, there=False)
    for _ in range(3):
        cross_entropy(plain(batch()[0]), batch()[1]).backward()
        fitted(*batch()).backward()
    for (name, expected), got in zip(plain.named_parameters(), fitted.parameters(), strict=True):
        if expected.requires_grad:
            assert torch.equal(expected.grad, got.grad), name


def test_where_keeping_them_does_not_fit_it_is_said_and_goes_on():
    budget = least_budget(fitted_tower()) + 2048
    fitted = fitted_tower(budget)
    fitted(*batch()).backward()
    once = {name: p.grad.clone() for name, p in fitted.named_parameters() if p.grad is not None}
    with pytest.warns(UserWarning, match="gradients of an earlier backward; set them to None before each step"):
        fitted(*batch()).backward()
    for name, p in fitted.named_parameters():
        if p.grad is not None:
            assert torch.equal(p.grad, 2 * once[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted(*batch()).backward()
    strict = fitted_tower(budget, strict=True)
    strict(*batch()).backward()
    with pytest.raises(Unplanned, match="earlier backward"):
        strict(*batch())


def test_gradients_that_are_there_from_the_start_are_planned_for():
    torch._dynamo.reset()
    model = Tower()
    set_gradients(model, there=True)
    fitted = elbowroom.fit(model, *batch(), budget="1GiB", loss=cross_entropy, kernels="torch")
    assert not entry_of(fitted).plan.late_gradients
    with pytest.raises(elbowroom.BudgetTooSmall, match=r"zero_grad\(\) frees them"):
        fitted.elbowroom.set_budget(1024)


def test_several_forwards_before_a_backward_keep_them():
    assert not entry_of(fitted_tower(forwards=2)).plan.late_gradients


def test_a_plan_made_without_them_says_so_when_it_is_loaded(tmp_path):
    budget = least_budget(fitted_tower()) + 2048
    fitted = fitted_tower(budget)
    path = tmp_path / "plan.json"
    entry_of(fitted).plan.save(path)
    again = fitted_tower(budget, plan=elbowroom.Plan.load(path))
    assert entry_of(again).plan.late_gradients
    again(*batch()).backward()
    with pytest.warns(UserWarning, match="its plan is for steps that begin without"):
        again(*batch()).backward()


def test_fused_kernels_give_them_one_by_one(quick_compiler):
    peaks, gradients = [], []
    for accumulates in (False, True):
        fitted = fitted_tower(kernels="inductor", accumulates=accumulates)
        plan = entry_of(fitted).plan
        peaks.append(plan.peak_bytes)
        assert plan.resident_bytes + step_peak(fitted, batch(), kept=accumulates) <= plan.peak_bytes + 1024
        set_gradients(fitted, there=False)
        fitted(*batch()).backward()
        gradients.append([p.grad for p in fitted.parameters() if p.requires_grad])
        for p in fitted.parameters():
            if p.requires_grad:
                assert p.grad.stride() == p.stride()
                assert p.grad.untyped_storage().nbytes() == p.numel() * p.element_size()
    assert peaks[0] < peaks[1]
    for free, kept in zip(*gradients, strict=True):
        assert torch.allclose(free, kept, atol=1e-6)
