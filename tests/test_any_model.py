"""Models drawn by a number: the same ones every time, small, and held to what plain execution gives."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def any_model(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import any_model

    return any_model


@pytest.fixture
def drawn_models(any_model):
    import drawn_models

    return drawn_models


def test_a_number_tells_which_models_are_drawn(drawn_models):
    first, again, other = (list(islice(drawn_models.names(seed), 50)) for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 50


def test_a_rule_makes_models_small(drawn_models):
    drawn = drawn_models.build("transformers:bert:BertForMaskedLM", torch.device("cpu"))
    assert sum(p.numel() for p in drawn.model.parameters()) < 10**6
    assert drawn.model.config.num_hidden_layers == 2
    again = drawn_models.build("transformers:bert:BertForMaskedLM", torch.device("cpu"))
    assert all(torch.equal(drawn.inputs[name], value) for name, value in again.inputs.items())
    assert drawn_models.first_numbers(drawn.model(**drawn.inputs)).requires_grad


def test_what_cannot_be_built_says_why(drawn_models):
    with pytest.raises(drawn_models.CannotBuild, match="NoSuchHead"):
        drawn_models.build("transformers:bert:NoSuchHead", torch.device("cpu"))


def test_layers_that_differ_keep_as_many_words_as_layers(drawn_models):
    small = drawn_models._made_small({"num_hidden_layers": 6, "layer_types": ["a", "b", "b", "b", "b", "c"]})
    assert small == {"num_hidden_layers": 2, "layer_types": ["a", "c"]}


def step(any_model, loss=1.0, gradient=(1.0, 2.0), buffer=(3.0,)):
    given = None if gradient is None else torch.tensor(gradient)
    return any_model.Step(torch.tensor(loss), {"w": given}, {"mean": torch.tensor(buffer)})


@pytest.mark.parametrize(
    ("ours", "wrong"),
    [
        ({}, ""),
        ({"gradient": (1.0, 2.001)}, ""),  # rounded
        ({"gradient": (1.0, 2.01)}, "gradient of w"),
        ({"gradient": (1.0, float("nan"))}, "gradient of w"),
        ({"gradient": None}, "one is None"),
        ({"loss": 1.1}, "the loss"),
        ({"buffer": (3.1,)}, "buffer mean"),
    ],
)
def test_a_wrong_step_is_told(any_model, ours, wrong):
    said = any_model.verdict([step(any_model, **ours)], [step(any_model)], 10, 10, [])
    assert wrong in said
    assert (said == any_model.GOOD) == (not wrong)


def test_no_number_may_be_what_plain_execution_gives(any_model):
    broken = step(any_model, gradient=(float("nan"), 1.0))
    assert any_model.verdict([broken], [broken], 10, 10, []) == any_model.GOOD


@pytest.mark.parametrize(("said", "verdict"), [([], "OVER IN SILENCE: 1 bytes, 10.0%"), (["elbowroom: …"], "said")])
def test_more_than_the_budget_has_to_be_said(any_model, said, verdict):
    assert any_model.verdict([step(any_model)], [step(any_model)], 11, 10, said) == verdict


@pytest.mark.slow
def test_one_model_is_judged_in_a_process_of_its_own():
    command = [sys.executable, BENCHMARKS / "any_model.py", "--name", "transformers:gpt2:GPT2Model"]
    done = subprocess.run([*command, "--kernels", "torch"], capture_output=True, text=True, check=True)
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["planned"] == "whole"
    assert set(row["budgets"].values()) == {"kept"}
    assert 0 < row["least_bytes"] < row["plain_bytes"]
