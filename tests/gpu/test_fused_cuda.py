"""Fused programs on a GPU: budgets kept, the results of `torch.compile`, dropout that finite differences confirm."""

from __future__ import annotations

import gc

import pytest
import torch

import elbowroom
from elbowroom.demo.models import Cnn, Transformer
from elbowroom.execute.verification import verify_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def transformer():
    tokens = torch.randint(512, (16, 257), device="cuda")
    return Transformer(512, 256, 256, 4, 4, dropout=0.1).cuda(), (tokens[:, :-1], tokens[:, 1:])


def many_words():
    """So many that their number matters: products with logits are padded."""
    tokens = torch.randint(10007, (16, 257), device="cuda")
    return Transformer(10007, 256, 256, 4, 6, dropout=0.0).cuda(), (tokens[:, :-1], tokens[:, 1:])


def cnn():
    return Cnn(32).cuda(), (torch.randn(64, 3, 64, 64, device="cuda"), torch.randint(10, (64,), device="cuda"))


def autocast():
    return torch.autocast("cuda", torch.bfloat16)


@pytest.fixture(scope="module", params=[transformer, many_words, cnn], ids=lambda make: make.__name__)
def fitted(request):
    """Fitted without a limit; tests set budgets, and all programs are compiled once."""
    torch.manual_seed(0)
    model, batch = request.param()
    with autocast():
        # Not strict: what other tests have left in the process may come and go, and counts against the budget.
        model = elbowroom.fit(model, *batch, budget="1TiB", kernels="inductor", loss=lambda loss: loss)
    return model, batch


def plan_of(model):
    (entry,) = model.elbowroom.entries.values()
    assert entry.instead is None, "it runs with PyTorch's kernels"
    return entry.plan


def step(model, batch):
    for parameter in model.parameters():
        parameter.grad = None
    with autocast():
        loss = model(*batch)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("share", [1.0, 0.6, 0.4])
def test_a_budget_is_kept_and_the_results_are_those_of_torch_compile(fitted, share):
    model, batch = fitted
    model.elbowroom.set_budget("1TiB")
    full = plan_of(model)
    budget = full.resident_bytes + int(share * (full.peak_bytes - full.resident_bytes)) + 2**24
    model.elbowroom.set_budget(budget)
    step(model, batch)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    step(model, batch)
    assert torch.cuda.max_memory_allocated() <= budget
    with autocast():
        assert verify_step(model.elbowroom, batch, {}).against == "torch.compile"


def test_products_with_odd_rows_are_padded(fitted):
    model, batch = fitted
    (entry,) = model.elbowroom.entries.values()
    assert ("constant_pad_nd" in entry.regions[0].source) == (batch[0].max() > 1000)


def test_finite_differences_agree_with_dropout_at_every_budget():
    torch.manual_seed(0)
    model, batch = transformer()
    model = elbowroom.fit(model, *batch, budget="1TiB", kernels="inductor", loss=lambda loss: loss)
    full = plan_of(model)
    parameters = list(model.parameters())
    for share in (1.0, 0.7, 0.5):
        model.elbowroom.set_budget(full.resident_bytes + int(share * (full.peak_bytes - full.resident_bytes)) + 2**24)
        for parameter in parameters:
            parameter.grad = None
        torch.cuda.manual_seed(7)
        model(*batch).backward()
        norm = sum(parameter.grad.square().sum() for parameter in parameters).sqrt()
        directions = [parameter.grad / norm for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        ends = []
        for far in (3e-2, -3e-2):
            with torch.no_grad():
                torch._foreach_add_(parameters, directions, alpha=far)
            torch.cuda.manual_seed(7)
            ends.append(model(*batch).detach())  # with gradients enabled: the planned program draws
            with torch.no_grad():
                torch._foreach_add_(parameters, directions, alpha=-far)
        assert ((ends[0] - ends[1]) / 6e-2).item() == pytest.approx(norm.item(), rel=2e-2)
