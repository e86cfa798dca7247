"""A model that runs stage by stage and is changed after `fit`: hooks, other parts, faults."""

from __future__ import annotations

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.errors import BudgetTooSmall, Unplanned  # noqa: E402
from fitted import least_budget  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")
LOG: list[str] = []


def row(count: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(count)]
    return nn.Sequential(*layers)


def fitted(model, x, **wishes):
    """With the least memory, so that stages run again."""
    under = elbowroom.fit(model, x, budget="1GiB", stages=list(model), **wishes)
    under.elbowroom.set_budget(least_budget(under))
    return under


def step(model, x):
    torch.manual_seed(3)
    model(x).sum().backward()


def assert_same(model, plain):
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name
    assert all(map(torch.equal, model.buffers(), plain.buffers()))


@pytest.fixture
def x():
    return torch.randn(64, 32)


def test_hooks_of_stages_run(x):
    model = row()
    plain = copy.deepcopy(model)
    under = fitted(model, x)
    seen = {"ours": [], "plain": []}
    for name, each in (("ours", model), ("plain", plain)):
        each[2][0].register_forward_hook(lambda module, inputs, output: output * 2)
        each[3].register_forward_pre_hook(lambda module, inputs: inputs[0] + 1)
        each[4][0].register_full_backward_hook(lambda m, i, outputs, name=name: seen[name].append(outputs[0].clone()))
    step(under, x)
    step(plain, x)
    assert_same(model, plain)
    assert [len(each) for each in seen.values()] == [1, 1]
    assert torch.equal(seen["ours"][0], seen["plain"][0])


def hook_the_whole(model):
    model.register_forward_hook(lambda module, inputs, output: output * 2)


def replace_a_stage(model):
    torch.manual_seed(7)
    model[2] = nn.Linear(32, 32)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("change", "said"),
    [(hook_the_whole, "has a hook and is no stage"), (replace_a_stage, "no longer a part of it")],
)
def test_what_stages_would_leave_out_runs_and_is_said(x, change, said, strict):
    model = row()
    plain = copy.deepcopy(model)
    under = fitted(model, x, strict=strict)
    for each in (model, plain):
        change(each)
    if strict:
        with pytest.raises(Unplanned, match=said):
            step(under, x)
        return
    with pytest.warns(UserWarning, match=said):
        step(under, x)
    step(plain, x)
    assert_same(model, plain)


def test_a_model_that_was_taken_apart_here_is_put_together_again_where_it_gets_a_hook(x):
    """It has backward hooks, or it would be traced."""
    model = nn.Sequential(row(3), row(3))
    model[0][1][0].register_full_backward_hook(lambda *_: None)
    plain = copy.deepcopy(model)
    under = elbowroom.fit(model, x, budget="1GiB")
    assert len(next(iter(under.elbowroom.entries.values())).stages) > 6
    for each in (model, plain):
        each[1].register_forward_hook(lambda module, inputs, output: output * 2)
    step(under, x)
    step(plain, x)
    assert_same(model, plain)


def test_a_part_that_was_replaced_is_measured_again(x):
    model = row()
    plain = copy.deepcopy(model)
    under = fitted(model, x)
    before = under.elbowroom.options.budget_bytes
    for each in (model, plain):
        torch.manual_seed(7)
        each[2][2] = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32))
    with pytest.raises(BudgetTooSmall) as wider:
        under(x)
    assert wider.value.least_budget > before
    under.elbowroom.entries.clear()
    under.elbowroom.set_budget(wider.value.least_budget)
    step(under, x)
    step(plain, x)
    assert_same(model, plain)


def test_eval_mode_and_back(x):
    model = row()
    plain = copy.deepcopy(model)
    under = fitted(model, x)
    for train in (False, True):
        for each in (model, plain):
            each.train(train)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(under, x)
        step(plain, x)
        assert_same(model, plain)
        with torch.no_grad():
            assert torch.equal(model.eval()(x), plain.eval()(x))


class Fails(nn.Module):
    """At one of its runs."""

    def forward(self, x):
        LOG.append("run")
        if len(LOG) == self.at:
            raise RuntimeError("told to")
        return x * 1.0


@pytest.mark.parametrize("at", range(1, 4))
def test_after_an_exception_in_a_stage_the_next_step_is_as_ever(x, at):
    model = row()
    model[1].append(Fails())
    model[1][-1].at = 0
    plain = copy.deepcopy(model)
    under = fitted(model, x)
    LOG.clear()
    model[1][-1].at = at
    with pytest.raises(RuntimeError, match="told to"):
        step(under, x)
    drawn = torch.get_rng_state()
    if at > 1:  # in the backward, where the stage runs again: random numbers go on as after the forward
        torch.manual_seed(3)
        with torch.no_grad():
            plain(x)
        assert torch.equal(torch.get_rng_state(), drawn)
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        each[1][-1].at = 0
        each.zero_grad()
        step(under if each is model else plain, x)
    assert_same(model, plain)
