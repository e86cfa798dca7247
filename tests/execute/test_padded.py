"""A language model whose vocabulary is no multiple of anything, fused: padded products, in the memory of others."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.capture.rewrites import padding  # noqa: E402
from fusible import needs_compiler  # noqa: E402

pytestmark = [needs_compiler, pytest.mark.usefixtures("quick_compiler")]

WORDS, WIDTH = 1021, 32
WEIGHT_BYTES = (WORDS + 3) * WIDTH * 4


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens, labels):
        logits = F.linear(self.body(self.embedding(tokens)).tanh(), self.embedding.weight)
        return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1))


@pytest.mark.parametrize("pads", [False, True])
def test_logits_are_padded_in_the_memory_that_they_would_take_anyway(monkeypatch, pads):
    """Where they are computed again, their gradient is written over them, padded or not."""
    if pads:
        monkeypatch.setattr(padding, "_DEVICES", ("cpu",))
        monkeypatch.setattr(padding, "_ALIGNED", {torch.float32: 4})
        monkeypatch.setattr(padding, "_LARGE", 1)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = LanguageModel(), tuple(torch.randint(WORDS, (2, 8, 64)))
    model(*batch).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    logits = batch[0].numel() * (WORDS + 3 * pads) * 4
    state = 2 * sum(parameter.numel() * 4 for parameter in model.parameters()) + 2 * batch[0].numel() * 8
    budget = state + int(1.7 * logits) + pads * WEIGHT_BYTES
    fitted = elbowroom.fit(model, *batch, budget=budget, kernels="inductor", times="estimate")
    fitted(*batch).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    (entry,) = fitted.elbowroom.entries.values()
    assert entry.regions  # it is fused
    assert ("constant_pad_nd" in entry.regions[0].source) == pads
    (tried,) = entry.trials.known
    assert abs(tried.surplus) <= 0.05 * logits
