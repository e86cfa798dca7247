"""How Hugging Face's Trainer computes a loss, with a fitted model in the place of a plain one.

It looks a model's class up by its name: causal models have their labels shifted for label smoothing.
"""

from __future__ import annotations

import copy
import json
import warnings
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from trained import fit  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


def small_model():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def batch():
    torch.manual_seed(1)
    ids = torch.randint(50, (4, 16))
    return {"input_ids": ids, "labels": ids.clone()}


def loss_as_by_trainer(model, smoothing):
    """`Trainer.compute_loss`, on what it reads of a trainer. A whole one needs accelerate."""
    from transformers.trainer import LabelSmoother, Trainer

    trainer = SimpleNamespace(
        model=model,
        label_smoother=LabelSmoother(epsilon=smoothing) if smoothing else None,
        compute_loss_func=None,
        model_accepts_loss_kwargs=False,
        accelerator=SimpleNamespace(unwrap_model=lambda wrapped: wrapped, parallelism_config=None),
        args=SimpleNamespace(average_tokens_across_devices=False, n_gpu=0),
    )
    return Trainer.compute_loss(trainer, model, batch())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_same_loss_is_trained(smoothing):
    plain = small_model()
    without_labels = {"input_ids": batch()["input_ids"]}
    model = fit(copy.deepcopy(plain), batch() if not smoothing else without_labels, budget="1GiB")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="elbowroom.*not planned")
        expected, found = (loss_as_by_trainer(each, smoothing) for each in (plain, model))
        expected.backward()
        found.backward()
    assert torch.equal(found, expected)
    for mine, others in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, others.grad)


def test_what_is_saved_names_the_class_and_loads(tmp_path):
    model = fit(small_model(), batch(), budget="1GiB")
    loss_as_by_trainer(model, 0.0).backward()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    again = type(model).from_pretrained(tmp_path)
    assert again.elbowroom is None
    for mine, others in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, others)
