"""A stage that runs again runs as it did before: with the same buffers, random numbers and precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elbowroom import solve
from elbowroom.execute.by_stages.measuring import measure_stages
from elbowroom.execute.by_stages.runner import ChainRunner
from elbowroom.schedule import Backward, Discard, Forward
from staged import all_rerun, assert_same, inputs, loss_of, state_after, step_bytes, twice


class Counting(nn.Module):
    """Changes buffers in every way there is, and its output depends on them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.spectral_norm(nn.Linear(8, 8))  # changes buffers that it then uses
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.ones(8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.calls += 1
        self.replaced = self.replaced * 0.5
        x = F.batch_norm(self.layer(x), self.mean, self.variance, training=True)
        return torch.tanh(x + self.replaced * self.calls)


@pytest.mark.parametrize("norm", [Counting, lambda: nn.BatchNorm1d(8), lambda: nn.BatchNorm1d(8, momentum=None)])
def test_buffers_that_a_forward_changes(norm):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), norm()) for _ in range(4)))

    ours, plain = model(), model()
    run = ChainRunner(list(ours), all_rerun(4))
    for training in (True, False, True):
        ours.train(training), plain.train(training)
        assert_same(state_after(run, ours, inputs()), state_after(plain, plain, inputs()))


@pytest.mark.parametrize("how", ["autograd", "func"])
@pytest.mark.parametrize("first", ["input", "all"])
def test_a_stage_that_computes_gradients_in_its_forward(how, first):
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("scale", torch.ones(()))

        def energy(self, x):
            return torch.tanh(self.layer(x)).square().sum()

        def forward(self, x):
            self.scale *= 1.5
            x = F.dropout(x, 0.2, self.training) * self.scale.clone()
            if how == "func":
                return torch.func.grad(self.energy)(x)
            return torch.autograd.grad(self.energy(x), x, create_graph=True)[0]

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), Force(), nn.Linear(8, 8))

    schedule = all_rerun(3)
    if first == "all":  # and only later without saving
        schedule = [
            *[Forward(1, "input"), Forward(2, "all"), Forward(3, "input"), Discard(2, "all"), Forward(4, "all")],
            *[Backward(4), Forward(2, "input"), Forward(3, "all"), Backward(3)],
            *[Forward(2, "all"), Backward(2), Forward(1, "all"), Backward(1)],
        ]

    ours, plain = model(), model()
    run = ChainRunner(list(ours), schedule)

    def with_another(call):
        def two(value):  # the backward of the first finds what the second has left
            first, second = twice(call)(value)
            loss_of(first).backward()
            return second

        return two

    assert_same(state_after(with_another(run), ours, inputs()), state_after(with_another(plain), plain, inputs()))
    measure_stages(list(ours), inputs())


def test_a_buffer_that_changes_now_and_then():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(8))
            self.step = 0

        def forward(self, x):
            if self.step == 1:
                self.scale += x.detach().mean(0)
            return x * self.scale

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), Sometimes(), nn.Linear(8, 8))

    ours, plain = model(), model()
    run = ChainRunner(list(ours), all_rerun(3))
    for step in range(3):
        ours[1].step = plain[1].step = step
        assert_same(state_after(run, ours, inputs(), steps=1), state_after(plain, plain, inputs(), steps=1))


@pytest.mark.parametrize("within", [False, True])
def test_autocast(within):
    class Island(nn.Module):
        """Full precision inside autocast: its backward must not be cast either."""

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return torch.tanh(x.float() @ torch.ones(8, 8))

    def model():
        torch.manual_seed(0)
        body = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), Island(), nn.Dropout(0.1)) for _ in range(4)]
        body[1].append(body[1][0])  # a weight that one stage uses twice is cast once
        return nn.Sequential(*body)

    ours, plain = model(), model()
    run = ChainRunner(list(ours), all_rerun(4))

    def under(call, backward):
        def step(value):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(call(value))
                if backward:
                    loss.backward()
            if not backward:
                loss.backward()
            return loss.detach()

        return step

    value = inputs(requires_grad=True)
    skip = {"backward": lambda loss: None}
    mine = state_after(under(run, within), ours, value, **skip)
    assert_same(mine, state_after(under(plain, within), plain, value, **skip))
    assert all(gradient is not None for gradient in mine["gradients"])


def test_casts_of_autocast_are_not_kept():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)))
    stages, value = list(model), torch.randn(32, 256)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chain = measure_stages(stages, value)
    result = solve(chain, solve(chain, 0, solver="persistent").least_budget, solver="persistent")
    run = ChainRunner(stages, result.schedule)

    def call(value):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return run(value)

    assert 0.95 * result.peak_bytes < step_bytes(call, model, value) <= result.peak_bytes
