"""The runner of stages gives what plain execution gives, bit for bit, in the memory that the referee predicts."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elbowroom.errors import InputError, InvalidSchedule
from elbowroom.execute.by_stages.measuring import fuse_stages, stages_of
from elbowroom.execute.by_stages.runner import ChainRunner
from elbowroom.schedule import Backward, Discard, Forward
from staged import (
    all_rerun,
    assert_same,
    assert_same_as_plain,
    build,
    inputs,
    layers,
    measured,
    planned,
    state_after,
    step_bytes,
)

SOLVERS = ("persistent", "floating", "sequential")


@pytest.mark.parametrize("part", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", ["conv", "mlp", "blocks", "lstm", "dictionary"])
def test_planned_steps(name, solver, part):
    result = planned(name, solver, part)
    model, value = build(name)
    plain = copy.deepcopy(model)
    stages = fuse_stages(stages_of(model), value)
    run = ChainRunner(stages, result.schedule)
    counts = [0] * len(stages)
    for i, stage in enumerate(stages):
        stage.register_forward_hook(lambda *_, i=i: counts.__setitem__(i, counts[i] + 1))

    assert_same(state_after(run, model, value), state_after(plain, plain, value))
    planned_counts = result.simulation.forwards
    assert counts == [2 * planned_counts[i + 1] for i in range(len(stages))]

    peak_bytes = step_bytes(run, model, value)
    assert peak_bytes <= result.peak_bytes
    # Stages of a single operation may not need their output in their backward: one activation less is held.
    slack = 0.01 * result.peak_bytes
    if name in ("mlp", "dictionary"):
        slack += 2 * max(measured(name).chain.output_bytes)
    if solver != "sequential":  # which does not use alternatives
        assert peak_bytes >= result.peak_bytes - slack


def test_more_memory_means_fewer_forwards():
    counts = [planned("blocks", "persistent", part).simulation.recomputed_forwards for part in (0.0, 0.4, 1.0)]
    assert counts[0] > counts[1] > counts[2] == 0


# --- models of all kinds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_input_with_and_without_gradient(requires_grad):
    assert_same_as_plain(layers(dropout=0.3), inputs(requires_grad=requires_grad))


@pytest.mark.parametrize("frozen", [(0, 1, 2), (2, 3), (5,), (0, 2, 4)])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_frozen_stages(frozen, requires_grad):
    model = layers(dropout=0.3)
    for i in frozen:
        model[i].requires_grad_(False)
    assert_same_as_plain(model, inputs(requires_grad=requires_grad))


def test_frozen_first_stages_do_not_run_again_for_nothing():
    model = layers(4)
    model[:2].requires_grad_(False)
    run = ChainRunner(list(model), all_rerun(4))
    counts = [0] * 4
    for i, stage in enumerate(model):
        stage.register_forward_hook(lambda *_, i=i: counts.__setitem__(i, counts[i] + 1))
    run(inputs()).sum().backward()
    assert counts == [3, 3, 3, 2]  # one forward, and what the backwards of stages 4 and 3 need


def test_everything_frozen():
    model = layers().requires_grad_(False)
    run = assert_same_as_plain(model, inputs(requires_grad=True))
    assert not run(inputs()).requires_grad


def test_a_stage_used_twice():
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
    one.register_forward_hook(lambda *_: None)
    assert_same_as_plain(nn.Sequential(one, nn.Linear(8, 8), one, nn.Tanh(), one), inputs())


@pytest.mark.parametrize(
    "module", [lambda: nn.LSTM(8, 8), lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))]
)
def test_shared_modules_that_keep_their_parameters_elsewhere(module):
    class First(nn.Module):
        def forward(self, x):
            return x[0] if isinstance(x, tuple) else x

    torch.manual_seed(0)
    one = module()
    assert_same_as_plain(nn.Sequential(one, nn.Sequential(First(), nn.Tanh()), one, First()), inputs())


def test_tied_weights_are_added_to_once():
    class Head(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return F.linear(x, self.weight)

    torch.manual_seed(0)
    embedding = nn.Embedding(30, 8)
    model = nn.Sequential(embedding, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), Head(embedding.weight))
    run = assert_same_as_plain(model, torch.randint(0, 30, (16, 4)))
    seen = []
    embedding.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    embedding.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    model.zero_grad()
    run(torch.randint(0, 30, (16, 4))).sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])


def test_hooks_on_stages_and_parameters():
    def watched():
        model, seen = layers(4), []
        for stage in model:
            stage.register_full_backward_hook(lambda _, inner, outer: seen.extend([*inner, *outer]))
            stage.register_full_backward_pre_hook(lambda _, outer: tuple(2 * g for g in outer))
            stage[0].weight.register_hook(lambda g: 3 * g)
            stage[0].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        return model, seen

    (model, ours), (other, plain) = watched(), watched()
    run = ChainRunner(list(model), all_rerun(4))
    value = inputs(requires_grad=True)
    assert_same(state_after(run, model, value), state_after(other, other, value))
    assert len(ours) == len(plain) > 0
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, plain, strict=True))


# --- what is refused -----------------------------------------------------------------------------------------


def test_a_stage_that_writes_into_its_input():
    run = ChainRunner([nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)], all_rerun(3))
    with pytest.raises(InputError, match="ReLU writes into its input"):
        run(inputs())


def test_schedules_that_cannot_run():
    stages = [nn.Linear(8, 8), nn.Tanh()]
    good = [Forward(1, "all"), Forward(2, "all"), Forward(3, "all"), Backward(3), Backward(2), Backward(1)]
    ChainRunner(stages, good)
    with pytest.raises(InvalidSchedule):
        ChainRunner(stages, good[:-1])
    with pytest.raises(InvalidSchedule):
        ChainRunner(stages[:1], good)
    with pytest.raises(InputError, match="runs once"):
        ChainRunner(stages, [*good[:2], Forward(3, "input"), *good[2:]])
    with pytest.raises(InputError, match="empty"):
        ChainRunner([], [Forward(1, "all"), Backward(1)])


def test_discarding_and_saving_again():
    model, plain = layers(3), layers(3)
    schedule = [
        *[Forward(1, "input"), Forward(2, "all"), Discard(2, "all"), Forward(2, "input"), Forward(3, "all")],
        *[Forward(4, "all"), Backward(4), Backward(3), Discard(2, "input"), Forward(1, "all"), Forward(2, "all")],
        *[Backward(2), Backward(1)],
    ]
    run = ChainRunner(list(model), schedule)
    assert_same(state_after(run, model, inputs()), state_after(plain, plain, inputs()))
