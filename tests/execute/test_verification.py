"""A planned step against a plain one: what is compared, and that the first difference is named."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from math import inf

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

import elbowroom  # noqa: E402
from elbowroom.errors import Mismatch  # noqa: E402
from elbowroom.execute.verification import Outcome, _share_apart, first_difference, verify_step  # noqa: E402
from elbowroom.measure.random_state import RandomStates  # noqa: E402
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


@needs_compiler
@pytest.mark.usefixtures("quick_compiler")
def test_a_fused_step_may_not_be_broken_where_torch_compile_is_not():
    model, x = perceptron()
    fitted = elbowroom.fit(model, x, budget="1GiB", kernels="inductor", times="estimate", loss=lambda y: y.mean())
    (region,) = only_entry(fitted).regions
    ready = region.programs[region.current]

    def spoil():
        model[0][0].bias.grad.fill_(torch.nan)

    region.programs[region.current] = replace(ready, backward=_after(ready.backward, spoil))
    with pytest.raises(Mismatch, match=r"the gradient of 0\.0\.bias \(some of it is not a number"):
        verify_step(fitted.elbowroom, (x,), {})


class Draws(torch.nn.Module):
    """A step that is its own plan and draws from generators of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.weight = self, torch.nn.Parameter(torch.ones(3))

    def step(self, x):
        return (self.weight * x * random.random() * float(np.random.rand()) * torch.rand(3)).sum()

    forward = step

    def fuses(self, args, kwargs):
        return False

    def parameters(self, recurse=True):
        return iter([self.weight])

    def named_parameters(self, *rest, **options):
        return iter([("weight", self.weight)])

    def buffers(self, recurse=True):
        return iter(())

    named_buffers = buffers


def test_every_generator_is_put_back_between_the_steps_and_afterwards():
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    assert verify_step(Draws(), (torch.ones(3),), {}).against == "eager"
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


# --- what is compared -------------------------------------------------------------------------------------------


def outputs(first):
    return {"outputs": [first, torch.tensor([1, 2])]}


def generators(last, python=(), numpy=None):
    return {"random": RandomStates(torch.tensor([1, 2, last], dtype=torch.uint8), None, python, numpy)}


def outcome_of(**rest):
    usual = {
        **outputs(torch.arange(3.0)),
        "gradients": {"a": torch.ones(2), "b": None},
        "buffers": {"mean": torch.zeros(2)},
        **generators(3),
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
        (outputs(torch.tensor([torch.nan, 1.0, 2.0])), "output 0 (some of it is not a number in one"),
        ({"gradients": {"a": torch.ones(2), "b": torch.ones(2)}}, "the gradient of b is missing in one of them"),
        ({"gradients": {"a": torch.tensor([1.0, 1.5]), "b": None}}, "the gradient of a (by up to 0.5,"),
        ({"buffers": {"mean": torch.tensor([0.0, 1e-30])}}, "buffer mean (by up to 1e-30,"),
        (generators(4), "the random generator's state afterwards"),
        (generators(3, python=(1, 2)), "the state of Python's random generator afterwards"),
        (generators(3, numpy={"pos": 2}), "the state of numpy's random generator afterwards"),
        ({"buffers": {"mean": torch.ones(2)}} | outputs(torch.zeros(3)), "output 0 (by up to 2,"),
    ],
)
def test_any_other_bit_is_one_and_the_first_is_named(other, difference):
    assert first_difference(outcome_of(), outcome_of(**other)).startswith(difference)


NUMBERS = torch.tensor([3.0, 4.0, 0.0])


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [
        (NUMBERS, NUMBERS, 0.0),
        (NUMBERS, NUMBERS + torch.tensor([0.0, 0.0, 0.5]), 0.1),
        (NUMBERS, torch.tensor([3.0, 4.0, torch.nan]), inf),
        (torch.tensor([3.0, 4.0, torch.nan]), NUMBERS, inf),
        (NUMBERS, torch.tensor([3.0, 4.0, inf]), inf),
        (torch.tensor([inf, 1.0]), torch.tensor([-inf, 1.0]), inf),
        (torch.tensor([torch.nan, inf, 1.0]), torch.tensor([torch.nan, inf, 1.0]), 0.0),
        (torch.tensor([torch.nan, 5.0]), torch.tensor([torch.nan, 5.5]), 0.1),
        (torch.tensor([5.0 + 0j]), torch.tensor([5.0 + 0.5j]), 0.1),
    ],
)
def test_how_far_apart_fused_results_are(a, b, apart):
    assert _share_apart(a, b, 0.0) == pytest.approx(apart)
