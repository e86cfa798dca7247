"""Options: what is not one, or makes no sense, is named."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.errors import InputError  # noqa: E402
from elbowroom.session.options import Options, Wishes  # noqa: E402
from fusible import perceptron  # noqa: E402
from trained import Net, batch, fit  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


def test_type_checkers_see_the_options_that_there_are():
    """`Wishes` is what checkers know of the keywords of `fit`; `Options` is what they become."""
    assert ["budget", *Wishes.__annotations__] == [field.name for field in fields(Options)]


@pytest.mark.parametrize("call", [elbowroom.fit, elbowroom.plan])
@pytest.mark.parametrize("wrong", ["optimiser", "budget_bytes", "compilation"])
def test_what_is_no_option_is_named_with_those_that_are(call, wrong):
    with pytest.raises(
        InputError, match=r"is not an option; there are budget, optimizer, loss, .*accumulates"
    ) as error:
        call(Net(), *batch(), budget="1GiB", **{wrong: 1})
    assert error.value.field == wrong


WRONG = [
    ("times", "guess"),
    ("times", None),
    ("kernels", "triton"),
    ("max_shapes", 0),
    ("forwards", 0),
    ("forwards", -1),
    ("compilations", 0),
    ("stages[1]", [nn.Tanh(), torch.relu]),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_value_that_makes_no_sense_is_named(field, value):
    with pytest.raises(InputError, match=re.escape(f"{field}: ")) as error:
        Options("1GiB", **{field.partition("[")[0]: value})
    assert error.value.field == field


@pytest.mark.parametrize(("field", "value"), [("kernels", "inductor"), ("forwards", 2), ("plan", object())])
def test_stages_cut_by_hand_do_not_go_with_everything(field, value):
    with pytest.raises(InputError) as error:
        Options("1GiB", stages=[nn.Tanh()], **{field: value})
    assert error.value.field == field


def test_options_for_a_model_are_in_bytes_and_name_the_kernels():
    wished = Options("1GiB", kernels="auto")
    options = wished.for_model(Net())
    assert (options.budget_bytes, options.kernels) == (2**30, "torch")  # no GPU here that fused ones would pay on
    assert not options.fuses
    assert not options.records
    assert not options.estimate
    assert wished.budget == "1GiB"
    fused = Options("1GiB", kernels="inductor", times="estimate").for_model(Net())
    assert fused.fuses
    assert fused.records
    assert fused.estimate
    assert not replace(fused, cuda_graphs=False).records
    by_hand = Options(2**20, stages=[nn.Tanh()]).for_model(Net())
    assert by_hand.kernels == "torch"
    with pytest.raises(InputError, match="no device is known"):
        Options("50%").for_model(Net())


def test_requests_that_make_no_sense():
    for options, culprit in (
        ({"budget": "lots"}, "budget"),
        ({"budget": "50%"}, "budget"),
        ({"budget": "1GiB", "times": "guess"}, "times"),
        ({"budget": "1GiB", "max_shapes": 0}, "max_shapes"),
    ):
        with pytest.raises(InputError, match=culprit):
            elbowroom.fit(Net(), *batch(), **options)
    with pytest.raises(InputError, match="model"):
        fit(lambda x: x, budget="1GiB")


@pytest.mark.parametrize(("field", "value"), [("kernels", "triton"), ("kernels", None), ("compilations", 0)])
def test_options_that_make_no_sense_are_named(field, value):
    model, x = perceptron()
    with pytest.raises(InputError, match=field) as error:
        elbowroom.fit(model, x, budget="1GiB", **{"kernels": "inductor", field: value})
    assert error.value.field == field


def test_stages_cut_by_hand_are_not_fused():
    model, x = perceptron()
    with pytest.raises(InputError, match="kernels"):
        elbowroom.fit(model, x, budget="1GiB", kernels="inductor", stages=list(model))
