"""Sessions: shapes, graphs, budgets and optimizers; what is planned, what is said, and what changes nothing."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import replace
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.errors import BudgetTooSmall, Unplanned  # noqa: E402
from elbowroom.execute.verification import verify_step  # noqa: E402
from fitted import step_peak  # noqa: E402
from trained import Embeds, Net, assert_same_state, batch, both, fit, only_entry, tight  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


def test_changing_batch_sizes_are_planned_one_by_one():
    def run(model):
        for size in (4, 6, 4, 3):
            model(*batch(size)).backward()

    fitted = both(Net(), run, *batch(6))
    assert len(fitted.elbowroom.entries) == 3


def test_more_shapes_than_allowed_are_said_once():
    fitted = fit(Net(), *batch(4), budget="1GiB", max_shapes=1)
    with pytest.warns(UserWarning, match="max_shapes") as said:
        fitted(*batch(5)).backward()
    assert "Net" in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted(*batch(6)).backward()
    strict = fit(Net(), *batch(4), budget="1GiB", max_shapes=1, strict=True)
    with pytest.raises(Unplanned, match="max_shapes"):
        strict(*batch(5))


class Breaks(Net):
    def forward(self, x, y):
        x = self.blocks[1](self.blocks[0](self.stem(x)))
        torch._dynamo.graph_break()
        x = self.blocks[3](self.blocks[2](x))
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


def test_a_graph_break_is_planned_as_two_graphs():
    fitted = both(Breaks(), lambda m: m(*batch()).backward(), *batch(), strict=True, times="measure")
    entry = only_entry(fitted)
    assert len(entry.regions) == 2
    assert step_peak(fitted, batch(), kept=True) <= entry.plan.budget_bytes - entry.plan.resident_bytes


class BreaksInALoop(Net):
    """PyTorch does not trace the loop, only what it calls: one graph that runs four times."""

    def forward(self, x, y):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


def test_a_graph_that_runs_several_times_is_counted_as_often():
    with pytest.warns(UserWarning, match="outside the traced graphs"):
        fitted = both(BreaksInALoop(), lambda m: m(*batch()).backward(), *batch())
    entry = only_entry(fitted)
    assert len(entry.regions) == 4
    assert len(set(entry.regions)) == 1


class Reads(nn.Module):
    """Leaves the graph for a custom autograd function that PyTorch is told not to trace."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.second(outside(torch.tanh(self.first(x)))).square().mean()


@torch._dynamo.disable
def outside(x):
    return torch.exp(-x * x)


def test_what_runs_outside_the_graphs_is_said():
    example = torch.randn(16, 32)
    with pytest.warns(UserWarning, match="outside the traced graphs"):
        fitted = fit(Reads(), example, budget="1GiB")
    fitted(example).backward()
    with pytest.raises(Unplanned, match="not kept"):
        fit(Reads(), example, budget="1GiB", strict=True)


class Inverts(nn.Module):
    """Checks, as an effect, that there is an inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return torch.linalg.inv(self.layer(x) + 3 * torch.eye(6)).square().mean()


@pytest.mark.parametrize(
    ("make", "example", "why"),
    [
        (Inverts, torch.randn(6, 6), "_linalg_check_errors.default has effects"),
        (lambda: Embeds(sparse=True), torch.randint(10, (4, 5)), "sparse tensors"),
    ],
)
def test_a_graph_that_cannot_be_planned_runs_as_it_is_and_that_is_said(make, example, why):
    model = make()
    with pytest.warns(UserWarning, match=why):
        fitted = fit(model, example, budget="1GiB")
    assert verify_step(fitted.elbowroom, (example,), {}).against == "eager"
    with pytest.raises(Unplanned, match=why):
        fit(make(), example, budget="1GiB", strict=True)


def test_state_copies_and_pickles():
    model = Net()
    keys = list(model.state_dict())
    fitted = fit(model, *batch(), budget="1GiB")
    assert list(fitted.state_dict()) == keys
    assert isinstance(fitted, Net)
    assert type(model) is Net
    fitted.load_state_dict(Net().state_dict())
    plain = copy.deepcopy(model)
    assert type(plain) is Net
    for copied in (pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps(fitted)), plain):
        assert type(copied) is Net
        assert torch.equal(copied.head.weight, model.head.weight)
    other = copy.deepcopy(fitted)
    assert other.head.weight is not model.head.weight
    other(*batch()).backward()
    assert model.head.weight.grad is None
    assert other.head.weight.grad is not None


def test_the_loss_inside():
    model, reference = Net(), Net()
    reference.load_state_dict(model.state_dict())
    x, y = batch()
    fitted = fit(model, x, y, budget="1GiB", loss=F.cross_entropy)
    torch.manual_seed(3)
    fitted(x, y).backward()
    torch.manual_seed(3)
    F.cross_entropy(reference(x), y).backward()
    assert_same_state(reference, model)
    with torch.no_grad():
        assert fitted(x).shape == (4, 5)
    alone = fit(Net(), x, budget="1GiB", loss=lambda logits: logits.square().mean())
    alone(x).backward()


def test_keyword_arguments_and_structured_outputs():
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, *, x, scale):
            y = self.layer(x) * scale
            return {"loss": y.square().mean(), "y": y}

    x = torch.randn(4, 8)
    fitted = fit(Keyword(), {"x": x, "scale": 2.0}, budget="1GiB")
    fitted(x=x, scale=2.0)["loss"].backward()
    assert fitted.layer.weight.grad is not None


def test_optimizer_state_is_counted():
    model = Net()
    size = sum(p.numel() * 4 for p in model.parameters())
    plan = elbowroom.plan(model, *batch(), budget="1GiB", times="estimate")
    for make, copies in ((torch.optim.Adam, 2), (partial(torch.optim.SGD, lr=0.1), 0)):
        optimizer = make(model.parameters())
        counted = elbowroom.plan(model, *batch(), budget="1GiB", optimizer=optimizer, times="estimate")
        counters = 4 * len(list(model.parameters())) if copies else 0
        assert counted.resident["optimizer"] == copies * size + counters
        assert counted.peak_bytes == plan.peak_bytes + copies * size + counters
    assert plan.resident["parameters"] == plan.resident["gradients"] == size


# --- planning again ---------------------------------------------------------------------------------------------


def state_of(fitted):
    """Everything about a session that must stay as it is where it cannot plan again."""
    session = fitted.elbowroom
    shapes = {
        key: (entry, entry.plan, tuple(entry.graphs), entry.sources, tuple(map(id, entry.late)), entry.trials)
        for key, entry in session.entries.items()
    }
    return session.options, shapes


def adam_bytes(model) -> int:
    """Two moments for each parameter, and a counter."""
    return sum(2 * p.numel() * p.element_size() + 4 for p in model.parameters())


def test_another_budget_is_another_plan_for_all_shapes():
    fitted = fit(Net(), *batch(4), budget="1GiB")
    fitted.elbowroom.prepare(batch(6), {})
    first, second = (entry.plan for entry in fitted.elbowroom.entries.values())
    budget = second.resident_bytes + (second.peak_bytes - second.resident_bytes) * 2 // 3
    fitted.elbowroom.set_budget(budget)
    small, large = (entry.plan for entry in fitted.elbowroom.entries.values())
    assert small.budget_bytes == large.budget_bytes == budget
    assert large.peak_bytes <= budget < second.peak_bytes
    assert large.time_s > second.time_s
    assert small.time_s == first.time_s  # it fits as it is
    assert fitted.elbowroom.options.budget_bytes == budget


def test_a_budget_that_does_not_fit_changes_nothing():
    fitted = tight(Net(), *batch(4))
    budget = only_entry(fitted).plan.budget_bytes
    fitted.elbowroom.prepare(batch(3), {})
    before = state_of(fitted)
    for nonsense in (1024, "100KiB"):
        with pytest.raises(BudgetTooSmall):
            fitted.elbowroom.set_budget(nonsense)
        assert state_of(fitted) == before
    assert fitted.elbowroom.options.budget_bytes == budget
    verify_step(fitted.elbowroom, batch(4), {})


def test_an_optimizer_made_after_fit_is_counted_once_it_is_told():
    """Its state is resident: within the same budget there is less room, and more is computed again."""
    model = Net()
    fitted = tight(model, *batch(), share=0.8)
    before = only_entry(fitted).plan
    assert before.resident["optimizer"] == 0
    # Room for the state, and for activations as before, less a third of them.
    budget = before.resident_bytes + adam_bytes(model) + (before.peak_bytes - before.resident_bytes) * 2 // 3
    fitted.elbowroom.set_budget(budget)
    without = only_entry(fitted).plan
    optimizer = torch.optim.Adam(model.parameters())
    fitted.elbowroom.set_optimizer(optimizer)
    after = only_entry(fitted).plan
    assert after.resident == {**without.resident, "optimizer": adam_bytes(model)}
    assert after.peak_bytes <= after.budget_bytes == without.budget_bytes == budget
    assert after.peak_bytes - after.resident_bytes < without.peak_bytes - without.resident_bytes
    assert after.time_s > without.time_s
    verify_step(fitted.elbowroom, batch(), {})


def test_an_optimizer_that_is_told_is_planned_with_as_one_that_was_passed():
    model = Net()
    told = fit(model, *batch(), budget="1GiB")
    optimizer = torch.optim.Adam(model.parameters())
    told.elbowroom.set_optimizer(optimizer)
    passed = fit(model, *batch(), budget="1GiB", optimizer=optimizer)
    assert only_entry(told).plan.to_json() == only_entry(passed).plan.to_json()
    told(*batch()).backward()
    optimizer.step()  # the state is there now, and takes what was foreseen
    told.elbowroom.set_optimizer(optimizer)
    assert only_entry(told).plan.resident["optimizer"] == adam_bytes(model)
    for other in (told, copy.deepcopy(told)):  # new shapes, and copies, know it too
        entry = other.elbowroom.prepare(batch(7), {})
        assert entry.plan.resident["optimizer"] == adam_bytes(model)


def test_an_optimizer_whose_state_does_not_fit_changes_nothing():
    model = Net()
    fitted = tight(model, *batch(), share=0.0)
    fitted.elbowroom.prepare(batch(2), {})
    before = state_of(fitted)
    with pytest.raises(BudgetTooSmall) as refusal:
        fitted.elbowroom.set_optimizer(torch.optim.Adam(model.parameters()))
    assert ("optimizer", adam_bytes(model)) in refusal.value.largest
    assert state_of(fitted) == before
    assert fitted.elbowroom.options.optimizer is None
    verify_step(fitted.elbowroom, batch(), {})
    fitted.elbowroom.set_budget(refusal.value.least_budget)
    fitted.elbowroom.set_optimizer(torch.optim.Adam(model.parameters()))
    assert only_entry_of_size(fitted, 4).plan.resident["optimizer"] == adam_bytes(model)


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4)])
def test_a_budget_that_is_refused_for_several_shapes_names_one_that_fits_them_all(sizes):
    fitted = fit(Net(), *batch(sizes[0]), budget="1GiB")
    fitted.elbowroom.prepare(batch(sizes[1]), {})
    with pytest.raises(BudgetTooSmall) as refusal:
        fitted.elbowroom.set_budget(1)
    fitted.elbowroom.set_budget(refusal.value.least_budget)


def only_entry_of_size(fitted, size: int):
    return fitted.elbowroom.prepare(batch(size), {})


def test_an_optimizer_without_state_leaves_the_program_as_it_is():
    fitted = tight(Net(), *batch())
    program = only_entry(fitted).regions[0].program
    fitted.elbowroom.set_optimizer(torch.optim.SGD(fitted.parameters(), lr=0.1))
    assert only_entry(fitted).plan.resident["optimizer"] == 0
    assert only_entry(fitted).regions[0].program == program


def test_a_budget_too_small_says_what_to_do():
    with pytest.raises(BudgetTooSmall, match="the least found") as too_small:
        fit(Net(), *batch(), budget="100KiB")
    error = too_small.value
    assert error.largest
    assert fit(Net(), *batch(), budget=error.least_budget)
    with pytest.raises(BudgetTooSmall):
        fit(Net(), *batch(), budget=error.least_budget - 2048)


def test_forwards_in_flight_are_counted_and_said():
    fitted = tight(Net(), *batch())
    first = fitted(*batch(seed=1))
    with pytest.warns(UserWarning, match="forwards="):
        second = fitted(*batch(seed=2))
    (first + second).backward()
    two = tight(Net(), *batch(), forwards=2, times="measure")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):  # what the first round saved is gone by then
            sum(two(*batch(seed=seed)) for seed in range(2)).backward()
    entry = only_entry(two)
    assert len(entry.regions) == 2
    assert not entry.regions[0].tickets.waiting


def test_a_model_that_changes_is_planned_again():
    """Freezing a layer makes PyTorch trace anew, before the step begins."""

    def run(model):
        for step in range(4):
            if step == 2:
                model.blocks[1].requires_grad_(False)
                model.blocks[2].drop.p = 0.5
            model(*batch(seed=step)).backward()

    fitted = both(Net(), run, *batch(), strict=True, times="measure")
    (region,) = only_entry(fitted).regions
    assert len(region.traced.graph.gradients) == len([p for p in fitted.parameters() if p.requires_grad])


def test_another_budget_counts_what_is_resident_as_before():
    """What else is in use at that moment says nothing of what will be: workspaces come and go."""
    fitted = fit(Net(), *batch(), budget="1GiB")
    entry = only_entry(fitted)
    entry.plan = replace(entry.plan, resident={**entry.plan.resident, "other": 12_345})
    fitted.elbowroom.set_budget("512MiB")
    assert entry.plan.resident["other"] == 12_345
