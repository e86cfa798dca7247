"""Models that run stage by stage, as they were written, under the same planner."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.errors import BudgetTooSmall, InputError, OverBudget, Unplanned  # noqa: E402
from fitted import least_budget, step_peak  # noqa: E402
from trained import Net, assert_same_state, batch, fit, only_entry  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


def test_a_model_with_backward_hooks_runs_stage_by_stage():
    def layers():
        torch.manual_seed(2)
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(8)))

    x = torch.randn(256, 64)
    seen = []
    ours, plain = layers(), layers()
    for model in (ours, plain):
        model[3][0].register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].clone()))
    roomy = elbowroom.fit(ours, x, budget="1GiB")
    plan = only_entry(roomy).plan
    resident = plan.resident_bytes
    budget = resident + (plan.plain_peak_bytes - resident) * 2 // 3
    fitted = elbowroom.fit(ours, x, budget=budget, loss=lambda y: y.square().mean())
    torch.manual_seed(5)
    fitted(x).backward()
    torch.manual_seed(5)
    plain(x).square().mean().backward()
    assert_same_state(plain, ours)
    assert torch.equal(seen[0], seen[1])
    plan = only_entry(fitted).plan
    assert plan.time_s > plan.plain_time_s
    assert step_peak(fitted, (x,), kept=True) <= budget - resident
    for fresh in (copy.deepcopy(fitted), pickle.loads(pickle.dumps(layers()))):
        fresh(x)


def test_stages_given_by_hand():
    model = Net()
    reference = copy.deepcopy(model)
    x, y = batch()
    stages = [model.stem, *model.blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.head]
    with pytest.raises(InputError, match=r"stages\[1\]"):
        fit(model, x, y, budget="1GiB", stages=[model.stem, torch.relu], loss=F.cross_entropy)
    fitted = elbowroom.fit(model, x, y, budget="1GiB", stages=stages, loss=F.cross_entropy)

    class Plain(nn.Module):
        def forward(self, x):
            x = reference.stem(x)
            for block in reference.blocks:
                x = block(x)
            return reference.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))

    torch.manual_seed(3)
    fitted(x, y).backward()
    torch.manual_seed(3)
    F.cross_entropy(Plain()(x), y).backward()
    assert_same_state(reference, model)
    with pytest.raises(BudgetTooSmall, match="the least for these stages") as too_small:
        fitted.elbowroom.set_budget("100KiB")
    fitted.elbowroom.set_budget(too_small.value.least_budget)
    fitted(x, y).backward()
    with pytest.raises(InputError, match="forwards"):
        fit(model, x, y, budget="1GiB", stages=stages, forwards=2, loss=F.cross_entropy)
    strict = fit(model, x, y, budget="1GiB", stages=stages, max_shapes=1, strict=True, loss=F.cross_entropy)
    with pytest.raises(Unplanned, match="max_shapes"):
        strict(*batch(5))


def test_a_budget_that_is_refused_for_several_shapes_names_one_that_fits_them_all():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    fitted = elbowroom.fit(model, torch.randn(8, 64), budget="1GiB", stages=list(model))
    fitted.elbowroom.prepare((torch.randn(64, 64),), {})
    with pytest.raises(BudgetTooSmall) as refusal:
        fitted.elbowroom.set_budget(1)
    fitted.elbowroom.set_budget(refusal.value.least_budget)


def test_a_hooked_model_that_is_no_row_of_stages_says_so():
    model = Net()
    model.head.register_full_backward_hook(lambda module, inputs, outputs: None)
    with pytest.warns(UserWarning, match=r"'head' has a backward hook.*stages="):
        fit(model, *batch(), budget="1GiB")


def test_an_optimizer_that_is_told_is_counted():
    """And where its state does not fit, nothing changes."""
    torch.manual_seed(2)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    x = torch.randn(256, 64)
    fitted = elbowroom.fit(model, x, budget="1GiB", stages=list(model), loss=lambda y: y.square().mean())
    plain = only_entry(fitted).plan
    activations = plain.plain_peak_bytes - plain.resident_bytes
    state = sum(p.numel() * p.element_size() for p in model.parameters())
    budget = plain.resident_bytes + activations * 2 // 3 + state
    fitted.elbowroom.set_budget(budget)
    without = only_entry(fitted).plan
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fitted.elbowroom.set_optimizer(momentum)
    after = only_entry(fitted).plan
    assert after.resident == {**without.resident, "optimizer": state}
    assert after.peak_bytes <= after.budget_bytes == budget
    assert after.time_s > without.time_s
    before = fitted.elbowroom.options, dict(fitted.elbowroom.entries)
    fitted.elbowroom.set_budget(after.peak_bytes + 2048)
    smaller = fitted.elbowroom.options, dict(fitted.elbowroom.entries)
    with pytest.raises(BudgetTooSmall):
        fitted.elbowroom.set_optimizer(torch.optim.Adam(model.parameters(), amsgrad=True))
    assert (fitted.elbowroom.options, fitted.elbowroom.entries) == smaller
    assert before[0].optimizer is fitted.elbowroom.options.optimizer is momentum
    fitted(x).backward()


def greedy(output):
    """Takes eight copies of the output, and keeps them."""
    return sum((output * n).exp() for n in range(8)).mean()


def watched(**wishes):
    """A row of stages within the least budget that its stages can do with, and its input."""
    torch.manual_seed(2)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    x = torch.randn(256, 64)
    fitted = elbowroom.fit(model, x, budget="1GiB", stages=list(model), **wishes)
    fitted.elbowroom.set_budget(least_budget(fitted))
    return fitted, x


def said_in(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught]


def test_steps_that_keep_their_budget_are_watched_and_nothing_is_said():
    """Stages start backwards of their own, with which a step does not end."""
    fitted, x = watched()
    entry = only_entry(fitted)
    for left in (2, 1, 0, 0):
        assert not said_in(lambda: fitted(x).sum().backward())
        assert entry.unwatched == left


@pytest.mark.parametrize("inside", [True, False])
def test_a_loss_that_takes_more_is_said_and_planned_for(inside):
    fitted, x = watched(loss=greedy) if inside else watched()

    def run():
        fitted.zero_grad()
        (fitted(x) if inside else greedy(fitted(x))).backward()

    budget = only_entry(fitted).plan.budget_bytes
    (said,) = said_in(run)
    assert "more than its budget" in said
    (said,) = said_in(run)
    assert "something outside the plan takes more than is left for it; allow at least" in said
    assert not said_in(run)
    fitted.elbowroom.set_budget(least_budget(fitted))
    assert only_entry(fitted).plan.resident["outside the plan"]
    assert only_entry(fitted).plan.budget_bytes > budget
    for _ in range(3):
        assert not said_in(run)
    assert only_entry(fitted).unwatched == 0


def test_what_an_earlier_step_took_is_left_free_once_the_budget_allows_it():
    fitted, x = watched()
    fitted.elbowroom.set_budget(only_entry(fitted).plan.budget_bytes * 3 // 2)

    def run():
        fitted.zero_grad()
        greedy(fitted(x)).backward()

    assert len(said_in(run)) == 1
    for _ in range(4):
        assert not said_in(run)
    assert only_entry(fitted).plan.resident["outside the plan"]


def test_a_strict_step_over_its_budget_is_an_error():
    fitted, x = watched(strict=True)
    with pytest.raises(OverBudget, match="more than its budget"):
        greedy(fitted(x)).backward()
