"""Models that run stage by stage: how to plan them, and what to compare with plain execution."""

from __future__ import annotations

import copy
from functools import cache
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from elbowroom import solve
from elbowroom.execute.by_stages.measuring import fuse_stages, measure_stages, observe, stages_of
from elbowroom.execute.by_stages.runner import ChainRunner
from elbowroom.schedule import Backward, Forward

CPU = torch.device("cpu")


# --- models --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 4 * size), nn.GELU(), nn.Dropout(0.1))
        self.last = nn.Linear(4 * size, size)

    def forward(self, x):
        return x + self.last(self.body(x))


class Lstm(nn.Module):
    """Hands on what nn.LSTM returns, a tensor and a pair of tensors, and takes either that or a tensor."""

    def __init__(self, inputs, size):
        super().__init__()
        self.cell = nn.LSTM(inputs, size, batch_first=True)

    def forward(self, x):
        return self.cell(x) if isinstance(x, torch.Tensor) else self.cell(x[0], x[1])


class Masked(nn.Module):
    """A stage with a dictionary of tensors, numbers and None for input and output."""

    def __init__(self, size):
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, value):
        x = torch.tanh(self.layer(value["x"])) * value["mask"] + value["depth"]
        return {"x": x, "mask": value["mask"], "depth": value["depth"] + 1, "nothing": None}


def conv(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


def build(name):
    """A model and its input."""
    torch.manual_seed(0)
    if name == "conv":
        body = [conv(3, 8), conv(8, 16), nn.MaxPool2d(2), conv(16, 16), nn.Sequential(conv(16, 32), conv(32, 32))]
        model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))
        return model, torch.randn(16, 3, 32, 32)
    if name == "mlp":
        layers = [nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)]
        return nn.Sequential(*layers), torch.randn(512, 128, requires_grad=True)
    if name == "blocks":
        return nn.Sequential(*(Block(48) for _ in range(7))), torch.randn(512, 48, requires_grad=True)
    if name == "lstm":
        cells = [Lstm(24, 32), Lstm(32, 32), Lstm(32, 32)]
        return nn.Sequential(nn.Embedding(50, 24), *cells), torch.randint(0, 50, (32, 30))
    if name == "dictionary":
        mask = torch.rand(256, 1)
        value = {"x": torch.randn(256, 64, requires_grad=True), "mask": mask, "depth": 0, "nothing": None}
        return nn.Sequential(*(Masked(64) for _ in range(6))), value
    raise ValueError(name)


@cache
def measured(name):
    model, value = build(name)
    stages = fuse_stages(stages_of(model), value)
    chain = measure_stages(stages, value)
    return SimpleNamespace(chain=chain, most=solve(chain, 2**50, solver="store-all").peak_bytes)


@cache
def planned(name, solver, part):
    """A schedule: part 0 is the least budget of the solver, part 1 the one that needs no recomputation."""
    problem = measured(name)
    least = solve(problem.chain, 0, solver=solver).least_budget
    return solve(problem.chain, int(least + part * (problem.most - least)), solver=solver)


def runner_for(model, value, part=0.0):
    """Some model's runner within a budget."""
    stages = fuse_stages(stages_of(model), value)
    chain = measure_stages(stages, value)
    most = solve(chain, 2**50, solver="store-all").peak_bytes
    least = solve(chain, 0, solver="persistent").least_budget
    return ChainRunner(stages, solve(chain, int(least + part * (most - least)), solver="persistent").schedule)


def layers(count=6, size=8, dropout=0.0):
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Dropout(dropout)) for _ in range(count)]
    for part in parts:
        part.register_forward_hook(lambda *_: None)  # keeps it one stage
    return nn.Sequential(*parts)


def inputs(size=8, requires_grad=False):
    torch.manual_seed(2)
    return torch.randn(16, size, requires_grad=requires_grad)


def all_rerun(count):
    """Each stage is run from the input for its own backward: every forward but the last runs again."""
    operations = [
        Forward(1, "input"),
        *(Forward(at, "nothing") for at in range(2, count + 1)),
        Forward(count + 1, "all"),
    ]
    for at in range(count + 1, 0, -1):
        if at <= count:
            operations += [Forward(1, "input"), *(Forward(k, "nothing") for k in range(2, at))][: at - 1]
            operations.append(Forward(at, "all"))
        operations.append(Backward(at))
    return operations


# --- what to compare -----------------------------------------------------------------------------------------


def loss_of(output):
    return sum(leaf.square().mean() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))


def fresh(value):
    """The same input in new tensors."""
    if isinstance(value, dict):
        return {key: fresh(each) for key, each in value.items()}
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def state_after(call, model, value, backward=lambda loss: loss.backward(), steps=2):
    """Everything that training steps leave behind; the second adds to gradients that are there."""
    torch.manual_seed(1)
    model.zero_grad()
    value = fresh(value)
    losses = []
    for _ in range(steps):
        loss = loss_of(call(value))
        backward(loss)
        losses.append(loss.detach())
    return {
        "loss": losses,
        "gradients": [p.grad for p in model.parameters()],
        "input gradients": [leaf.grad for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)],
        "buffers": [b.clone() for b in model.buffers()],
        "random": [torch.get_rng_state()],
    }


def twice(call):
    """Two forwards before the backward."""
    return lambda value: (call(value), call(2 * value))


def assert_same(ours, plain):
    for what, tensors in plain.items():
        for mine, theirs in zip(ours[what], tensors, strict=True):
            assert (mine is None) == (theirs is None), what
            assert mine is None or torch.equal(mine, theirs), what


def assert_same_as_plain(model, value, part=0.0, **options):
    """A runner for the model, after comparing it."""
    other = copy.deepcopy(model)
    run = runner_for(model, value, part)
    assert_same(state_after(run, model, value, **options), state_after(other, other, value, **options))
    return run


class Outside(torch.autograd.Function):
    """A loss that takes nothing but its own bytes and the gradient it makes."""

    @staticmethod
    def forward(ctx, output):
        ctx.like = output.shape
        return output.new_zeros(())

    @staticmethod
    def backward(ctx, gradient):
        return gradient.new_ones(ctx.like)


def step_bytes(run, model, value):
    """The peak of one step above its parameters and gradients, the input included."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]

    def step(_):
        Outside.apply(tree_leaves(run(value))[0]).backward()

    step(None)
    for leaf in leaves:
        leaf.grad = None
    _, [level] = observe(CPU, step)
    return level.peak + sum(leaf.untyped_storage().nbytes() for leaf in leaves)
