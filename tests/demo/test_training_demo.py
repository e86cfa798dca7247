"""The demonstration that trains: on smaller models the rows, the check against plain execution, the picture."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from elbowroom.demo import training  # noqa: E402
from elbowroom.demo.models import Residual, Subject, Transformer  # noqa: E402


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(Residual(3, 3, stride=1) for _ in range(2)))

    def forward(self, images):
        return self.body(images).square().mean()


def transformer(device):
    tokens = [(torch.randint(9, (2, 16)), torch.randint(9, (2, 16))) for _ in range(2)]
    return Subject("transformer", Transformer(9, 16, 8, 2, 3, dropout=0.1), tokens, nullcontext)


def cnn(device):
    return Subject("CNN", Cnn(), [(torch.randn(4, 3, 8, 8),) for _ in range(2)], nullcontext)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELBOWROOM_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_demo(elbowroom, folder, monkeypatch):
    """The demonstration on smaller models: the rows, the check against plain execution, the picture."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(training, "transformer_subject", transformer)
    monkeypatch.setattr(training, "cnn_subject", cnn)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    runs = training.run_training_demo(lambda part: None)
    monkeypatch.setattr(training, "run_training_demo", lambda report: runs)
    status, out, err = elbowroom("demo", "--json", "--plot", "demo.png")
    rows = json.loads(out)["runs"]
    assert (status, err) == (0, "picture: demo.png\n")
    assert (folder / "demo.png").stat().st_size > 10_000
    assert [row["model"] for row in rows] == ["transformer"] * 3 + ["CNN"] * 3
    assert [row["share"] is None for row in rows] == [True, False, False] * 2
    for row in rows:
        assert row["identical"] is True
        if row["share"] is not None:
            assert row["measured_peak_bytes"] <= row["budget_bytes"]
            assert row["least"] or row["share"] in (0.5, 0.25)
    status, out, _ = elbowroom("demo")
    assert status == 0
    for word in ("transformer", "plain", "predicted", "measured", "gradients", "yes"):
        assert word in out
    assert "…" not in out, "cut off"
