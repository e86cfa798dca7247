"""A planned step against a plain one: what is compared, and that the first difference is named."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import elbowroom  # noqa: E402
from elbowroom.errors import Mismatch  # noqa: E402
from elbowroom.execute.verification import Outcome, first_difference, verify_step  # noqa: E402
from fusible import needs_compiler, perceptron  # noqa: E402
from trained import Net, batch, fit, only_entry  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


# --- a step of a fitted model -----------------------------------------------------------------------------------


def test_a_step_that_is_right_is_left_as_it_was_found():
    model = Net()
    model.head.weight.grad = kept = torch.ones_like(model.head.weight)
    fitted = fit(model, *batch(), budget="1GiB", verify=True, accumulates=True)
    state, before = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    verification = verify_step(fitted.elbowroom, batch(), {})
    assert verification.against == "eager"
    tensors = 1 + len(list(model.parameters())) + len(list(model.buffers())) + 1  # the loss, and the random state
    assert verification.compared == tensors
    assert str(verification) == (
        f"identical to eager: outputs, gradients, buffers and random state ({tensors} tensors)"
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.head.weight.grad is kept
    assert (kept == 1).all()
    assert model.stem.weight.grad is None


def spoilt_gradient(fitted):
    fitted.head.weight.grad[0, 0] += 1


def spoilt_buffer(fitted):
    fitted.blocks[2].norm.running_mean[3] += 1


def lost_gradient(fitted):
    fitted.stem.bias.grad = None


def drawn_numbers(fitted):
    torch.rand(1)


@pytest.mark.parametrize(
    ("spoil", "difference"),
    [
        (spoilt_gradient, r"the gradient of head\.weight \(by up to 1, where the largest value is"),
        (spoilt_buffer, r"buffer blocks\.2\.norm\.running_mean \(by up to 1,"),
        (lost_gradient, r"the gradient of stem\.bias is missing in one of them"),
        (drawn_numbers, "the random generator's state afterwards"),
    ],
)
def test_the_first_difference_is_named(spoil, difference):
    fitted = fit(Net(), *batch(), budget="1GiB")
    (region,) = only_entry(fitted).regions
    ready = region.programs[-1]
    region.programs[-1] = replace(ready, backward=_after(ready.backward, lambda: spoil(fitted)))
    with pytest.raises(Mismatch, match=f"the planned step differs from plain execution: {difference}"):
        verify_step(fitted.elbowroom, batch(), {})


def _after(backward, spoil):
    def run(arguments):
        outputs = backward(arguments)
        with torch.no_grad():
            spoil()
        return outputs

    return run


@needs_compiler
@pytest.mark.usefixtures("quick_compiler")
def test_a_fused_step_is_held_against_torch_compile():
    model, x = perceptron()
    fitted = elbowroom.fit(model, x, budget="1GiB", kernels="inductor", times="estimate", loss=lambda y: y.mean())
    verification = verify_step(fitted.elbowroom, (x,), {})
    assert verification.against == "torch.compile"
    assert verification.furthest < 1e-5
    assert str(verification).startswith("equal to torch.compile up to rounding (")
    (region,) = only_entry(fitted).regions
    ready = region.programs[region.current]

    def spoil():
        model[0][0].bias.grad += 1

    region.programs[region.current] = replace(ready, backward=_after(ready.backward, spoil))
    with pytest.raises(Mismatch, match=r"the planned step differs from torch\.compile: the gradient of 0\.0\.bias"):
        verify_step(fitted.elbowroom, (x,), {})


# --- what is compared -------------------------------------------------------------------------------------------


def outputs(first):
    return {"outputs": [first, torch.tensor([1, 2])]}


def outcome_of(**rest):
    usual = {
        **outputs(torch.arange(3.0)),
        "gradients": {"a": torch.ones(2), "b": None},
        "buffers": {"mean": torch.zeros(2)},
        "random": [torch.tensor([1, 2, 3], dtype=torch.uint8)],
    }
    return Outcome(**(usual | rest))


def test_equal_bits_are_no_difference():
    assert first_difference(outcome_of(), outcome_of()) is None
    broken = outputs(torch.tensor([1.0, torch.nan, torch.inf]))
    assert first_difference(outcome_of(**broken), outcome_of(**broken)) is None


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (outputs(torch.tensor([0.0, 1.0, 5.0])), "output 0 (by up to 3, where the largest value is 2)"),
        (outputs(torch.arange(3.0).double()), "output 0 (torch.float32 [3] against torch.float64 [3])"),
        (outputs(torch.arange(4.0)), "output 0 (torch.float32 [3] against torch.float32 [4])"),
        (outputs(torch.tensor([torch.nan, 1.0, 2.0])), "output 0 (by up to nan"),  # where plain execution has a zero
        ({"gradients": {"a": torch.ones(2), "b": torch.ones(2)}}, "the gradient of b is missing in one of them"),
        ({"gradients": {"a": torch.tensor([1.0, 1.5]), "b": None}}, "the gradient of a (by up to 0.5,"),
        ({"buffers": {"mean": torch.tensor([0.0, 1e-30])}}, "buffer mean (by up to 1e-30,"),
        ({"random": [torch.tensor([1, 2, 4], dtype=torch.uint8)]}, "the random generator's state afterwards"),
        ({"buffers": {"mean": torch.ones(2)}} | outputs(torch.zeros(3)), "output 0 (by up to 2,"),
    ],
)
def test_any_other_bit_is_one_and_the_first_is_named(other, difference):
    assert first_difference(outcome_of(), outcome_of(**other)).startswith(difference)
