"""Floats and lists that a forward changes, call after call: bit for bit as in plain execution, in two plans."""

from __future__ import annotations

import copy
import random
import warnings
from collections import deque

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")

STEPS = 12
ATTRIBUTES = ("log", "other", "named", "recent", "queue", "pair", "temperature", "rate", "mean", "steps")


class Model(nn.Module):
    """`use` is what a forward does besides: a function of the model and its hidden value."""

    def __init__(self, use) -> None:
        super().__init__()
        self.first, self.last, self.use = nn.Linear(16, 16), nn.Linear(16, 4), use
        self.log, self.named, self.pair = [], {"loss": []}, ([], [])
        self.other = self.log
        self.recent, self.queue = deque(maxlen=3), deque()
        self.temperature, self.rate, self.mean, self.steps = 1.0, 0.7, 0.3, 0

    def forward(self, x):
        return self.last(self.use(self, torch.tanh(self.first(x))))


def temperature(self, h):
    self.temperature *= 0.97
    return h / self.temperature


def several_operations(self, h):
    self.temperature = self.temperature * 1.03 * 0.99 - 0.01
    self.rate = max(0.9 * self.rate, 0.1)
    self.mean = -min(3.0 - abs(self.mean), self.mean * 1.1) / 3 + self.rate
    return h * self.rate * (1.0 + 0.97 * self.temperature * 0.97)


def with_a_counter(self, h):
    self.steps += 1
    self.rate = 0.9 * self.rate + 0.1 * self.steps + self.steps / 7
    return h * self.rate


def not_used_in_the_graph(self, h):
    self.rate = 0.99 * self.rate + 0.01
    return h


def ratio_of_a_counter(self, h):
    self.steps += 1
    return torch.add(h, h, alpha=self.steps / 7) * (self.steps / 7)


def in_parts(self, h):
    self.temperature *= 0.97
    print("a step")
    self.rate *= 0.9
    self.log.append(self.rate)
    return h / self.temperature


def appends(self, h):
    self.steps += 1
    self.log.append(h)
    self.other.append((h.detach(), self.steps, "a word", h.shape))
    self.log.append(h.detach())
    self.named["loss"].append(h.mean())
    self.queue.append(len(h.shape))
    self.recent.append(self.steps)
    for each in self.pair:
        each.append(None)
    return h


def appends_its_length(self, h):
    self.log.append(len(self.log))
    self.log.append(len(self.other))
    return h


def appends_in_parts(self, h):
    add = self.log.append
    add(h.detach())
    print(len(self.log))
    add(None)
    return h * 2


def appends_what_is_not_traced(self, h):
    self.log.append(h.detach().mean().item())
    self.log.append(str(print("not traced")))
    return h


LASTING = (
    *(temperature, several_operations, with_a_counter, not_used_in_the_graph, in_parts),
    *(appends, appends_its_length, appends_in_parts, appends_what_is_not_traced),
)


def reads(self, h):
    self.log.append(1.5)
    return h * self.log[-1] * len(self.log)


def reads_another_name(self, h):
    self.log.append(h.detach())
    return h + self.other[0]


def replaces(self, h):
    self.log.append(h.detach())
    self.log = self.other = self.log[-2:]
    return h


def removes(self, h):
    self.log.append(h.detach())
    if len(self.log) > 3:
        self.log.pop(0)
    return h


def appends_a_list(self, h):
    inner = [h.detach()]
    self.log.append(inner)
    inner.append(3)
    return h


def counts_in_a_short_deque(self, h):
    self.recent.append(1)
    return h * len(self.recent) + len(self.recent)


def overwrites_what_was_appended(self, h):
    value = h * 3
    self.log.append(value)
    value.mul_(2)
    return h + value


def divides_by_what_may_be_zero(self, h):
    self.rate -= 0.1
    self.mean = 1.0 / self.rate
    return h


def power(self, h):
    self.rate **= 1.5
    return h * self.rate


OTHERS = (
    *(reads, reads_another_name, replaces, removes, appends_a_list, counts_in_a_short_deque),
    *(ratio_of_a_counter, overwrites_what_was_appended, divides_by_what_may_be_zero, power),
)


@pytest.mark.parametrize("use", LASTING)
def test_two_traces_serve_every_step(use, capsys):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="elbowroom")
        ours = compared(use, "torch")
    assert sum(ours.elbowroom._traces.counts.values()) <= 2


@pytest.mark.parametrize("use", OTHERS)
def test_whatever_else_happens_to_them_is_right(use, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compared(use, "torch")


@pytest.mark.slow
@pytest.mark.parametrize("use", [several_operations, with_a_counter, appends])
def test_fused_kernels_compute_the_same_floats(use, capsys):
    ours = compared(use, "inductor")
    assert sum(ours.elbowroom._traces.counts.values()) <= 2


def test_a_float_argument_may_pass_through_parts_that_do_not_use_it(capsys):
    class Passes(Model):
        def forward(self, x, scale):
            h = self.first(x)
            print("a step")
            h = torch.sin(h)
            print("another")
            return self.last(h) * scale

    model = elbowroom.fit(Passes(None), torch.randn(8, 16), 1.0, budget="1 MiB")
    for number in range(STEPS):
        model(torch.randn(8, 16), 1.0 + number).sum().backward()
    assert sum(model.elbowroom._traces.counts.values()) <= 3


def test_a_hook_may_keep_a_list_of_its_own():
    torch.manual_seed(0)
    model, seen = Model(temperature), []
    model.first.register_forward_hook(lambda module, args, output: seen.append(output.detach().sum()))
    ours = elbowroom.fit(model, torch.randn(8, 16), budget="1 MiB")
    for _ in range(STEPS):
        ours(torch.randn(8, 16)).sum().backward()
    assert len(seen) == STEPS
    assert sum(ours.elbowroom._traces.counts.values()) <= 2


def test_what_a_list_keeps_is_as_good_as_in_plain_execution():
    """A value appended with its graph may be differentiated, as long as nothing else was."""
    torch.manual_seed(0)
    plain, x = Model(lambda self, h: (self.log.append(h), h)[1]), torch.randn(8, 16)
    ours = elbowroom.fit(copy.deepcopy(plain), x, budget="1 MiB")
    for model in (plain, ours):
        model(x)
        model.log[0].square().sum().backward()
    assert torch.equal(plain.first.weight.grad, ours.first.weight.grad)
    assert plain.last.weight.grad is ours.last.weight.grad is None


def compared(use, kernels):
    """A fitted model, after steps beside a plain one: values, gradients and attributes."""
    torch.manual_seed(0)
    plain = Model(use)
    ours = elbowroom.fit(copy.deepcopy(plain), torch.randn(8, 16), budget="1 MiB", kernels=kernels)
    assert ours.other is ours.log
    for number in range(STEPS):
        x = torch.randn(8, 16)
        values = []
        for model in (plain, ours):
            random.seed(number)
            model.zero_grad()
            value = model(x)
            value.square().mean().backward()
            values.append([value.detach(), model.first.weight.grad])
        close(*values, exactly=kernels == "torch")
        for name in ATTRIBUTES:
            close(getattr(plain, name), getattr(ours, name), exactly=kernels == "torch")
    assert (plain.other is plain.log) == (ours.other is ours.log)
    return ours


def close(theirs, mine, *, exactly):
    assert type(theirs) is type(mine)
    if isinstance(theirs, torch.Tensor):
        assert theirs.requires_grad == mine.requires_grad
        assert torch.equal(theirs, mine) if exactly else torch.allclose(theirs, mine, atol=1e-6)
    elif isinstance(theirs, list | tuple | deque | dict):
        assert len(theirs) == len(mine)
        pairs = (
            zip(theirs.values(), mine.values(), strict=True)
            if isinstance(theirs, dict)
            else zip(theirs, mine, strict=True)
        )
        for one, other in pairs:
            close(one, other, exactly=exactly)
    else:
        assert theirs == mine
