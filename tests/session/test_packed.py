"""Hooks of saved tensors, such as `save_on_cpu` and a checkpoint around a fitted model: gradients as without a plan.

A backward gets what the hooks made of what its forward saved, parameters too, which are other objects then.
"""

from __future__ import annotations

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from trained import fit  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


class Model(nn.Module):
    """What it saves may have a number in it that changes with every step."""

    def __init__(self, dropped: float, counts: bool) -> None:
        super().__init__()
        self.steps, self.counts = 0, counts
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropped), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x):
        self.steps += self.counts
        return self.layers(x) * (2 + self.steps / 7)


def within(hooks):
    def call(model, x):
        with hooks():
            return model(x)

    return call


CALLS = {
    "on the host": within(save_on_cpu),
    "as they are": within(lambda: saved_tensors_hooks(lambda t: t, lambda t: t)),
    "without their gaps": within(lambda: saved_tensors_hooks(lambda t: t.contiguous().clone(), lambda t: t)),
    "copied": within(lambda: saved_tensors_hooks(torch.clone, lambda t: t)),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "reentrant checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=True),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_gradients_arrive(call):
    counts = "checkpoint" not in call.__code__.co_names  # which runs a forward twice
    assert_gradients_arrive(call, Model(0.2, counts), kernels="torch")


@pytest.mark.slow  # a compiler runs
def test_gradients_of_fused_kernels_arrive():
    assert_gradients_arrive(CALLS["as they are"], Model(0, False), kernels="inductor")


class Attention(nn.Module):
    """Saves slices of one tensor, with gaps in their memory."""

    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(-3, -2) for part in self.qkv(x[None]).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("kernels", ["torch", pytest.param("inductor", marks=pytest.mark.slow)])
def test_what_hooks_bring_back_without_its_gaps_is_laid_out_as_it_was(kernels):
    assert_gradients_arrive(CALLS["without their gaps"], Attention(), kernels)


def assert_gradients_arrive(call, plain, kernels):
    torch.manual_seed(0)
    ours, x = copy.deepcopy(plain), torch.randn(4, 8, requires_grad=True)
    fit(ours, x, budget="1MiB", kernels=kernels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(4):
            for model in (plain, ours):
                torch.manual_seed(seed)
                call(model, x).square().sum().backward()
    assert ours.steps == plain.steps
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, **({"rtol": 0, "atol": 0} if kernels == "torch" else {}))
