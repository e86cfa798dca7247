"""The compile backend where a model is several graphs: they share its budget."""

from __future__ import annotations

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.capture.torch_version import TORCH  # noqa: E402
from elbowroom.measure.memory import measure  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")
WIDTH, ROWS = 64, 256
ACTIVATION = 4 * WIDTH * ROWS
# Of the room, at the most. Before 2.13 autograd keeps the gradients it hands to a function, and plans leave room for
# them; that of a sum is one number, whose copy is not kept.
UNUSED_BYTES = ACTIVATION * (4 if TORCH >= (2, 13) else 6)


class Broken(nn.Module):
    """A graph for each part: Dynamo stops between them."""

    def __init__(self, parts: int = 3, layers: int = 6) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(*(module for _ in range(layers) for module in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
            for _ in range(parts)
        )

    def forward(self, x):
        return _rest(x, list(self.parts))


def _rest(x, parts):
    """Not a loop: Dynamo gives up on loops that it cannot trace to their end."""
    x = parts[0](x)
    if len(parts) > 1:
        torch._dynamo.graph_break()
        x = _rest(x, parts[1:])
    return x


def resident(model, x):
    parameters = sum(p.nbytes for p in model.parameters())
    return 2 * parameters + x.nbytes


def budget_of(model, x, activations):
    return resident(model, x) + activations * ACTIVATION + 4096


def compiled(model, budget, **more):
    return torch.compile(model, backend="elbowroom", options={"budget": budget, "times": "estimate"}, **more)


def with_gradients(model):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def peak_of_step(model, x):
    """Bytes above what is resident, the gradients included."""
    for parameter in model.parameters():
        parameter.grad.zero_()
    with measure("cpu", timeline=False) as measured:
        model(x).sum().backward()
    return measured.peak_bytes


def said_in(run):
    """What a call returns, and what elbowroom warned of meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run()
    return result, [str(each.message) for each in caught if "elbowroom" in str(each.message)]


def trained_plainly(model, x):
    plain = with_gradients(copy.deepcopy(model))
    plain(x).sum().backward()
    return [parameter.grad for parameter in plain.parameters()]


def assert_same_gradients(model, expected):
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("activations", [12, 16, 20])
def test_graphs_of_one_model_share_its_budget(activations):
    model, x = with_gradients(Broken()), torch.randn(ROWS, WIDTH)
    expected = trained_plainly(model, x)
    budget = budget_of(model, x, activations)
    planned = compiled(model, budget)
    peaks, said = zip(*(said_in(lambda: peak_of_step(planned, x)) for _ in range(4)), strict=True)
    room = budget - resident(model, x)
    assert peaks[0] <= room or len(said[0]) == 1
    assert not any(said[1:])
    assert max(peaks[1:]) <= room
    assert room - UNUSED_BYTES <= peaks[-1]  # and what there is, is used
    assert_same_gradients(model, expected)


def test_the_first_step_says_that_it_takes_more_and_what_helps():
    model, x = with_gradients(Broken()), torch.randn(ROWS, WIDTH)
    budget = budget_of(model, x, 12)
    planned = compiled(model, budget)
    peak, said = said_in(lambda: peak_of_step(planned, x))
    assert peak > budget - resident(model, x)
    (sentence,) = said
    assert "more than their budget" in sentence
    assert "elbowroom.fit" in sentence


def test_a_budget_that_no_programs_keep_is_said_once():
    model, x = with_gradients(Broken()), torch.randn(ROWS, WIDTH)
    expected = trained_plainly(model, x)
    planned = compiled(model, budget_of(model, x, 6))
    said = [said_in(lambda: peak_of_step(planned, x))[1] for _ in range(4)]
    assert ["over budget" in " ".join(each) for each in said] == [False, True, False, False]
    assert "the least found for this model and batch is" in said[1][0]
    assert_same_gradients(model, expected)


def test_where_all_is_saved_nothing_is_said():
    model, x = with_gradients(Broken()), torch.randn(ROWS, WIDTH)
    planned = compiled(model, "1GiB")
    assert not any(said_in(lambda: peak_of_step(planned, x))[1] for _ in range(3))


@pytest.mark.parametrize("shared", [True, False])
def test_two_models_have_a_budget_each(shared):
    """Even if they are compiled with the same dictionary of options, and one waits while the other runs."""
    first, second = with_gradients(Broken(1)), with_gradients(Broken(1))
    second.parts[0].append(nn.Tanh())
    x = torch.randn(ROWS, WIDTH)
    one = {"budget": budget_of(first, x, 12), "times": "estimate"}
    other = one if shared else dict(one)
    planned = [
        torch.compile(model, backend="elbowroom", options=options)
        for model, options in ((first, one), (second, other))
    ]

    def both():
        (planned[0](x).sum() + planned[1](x).sum()).backward()

    assert not any(said_in(both)[1] for _ in range(3))


def test_other_shapes_are_alternatives():
    model = with_gradients(Broken(2))
    batches = [torch.randn(rows, WIDTH) for rows in (ROWS, ROWS - 16, ROWS)]
    budget = budget_of(model, batches[0], 10)
    planned = compiled(model, budget, dynamic=False)
    room = budget - resident(model, batches[0])
    for x in batches:  # the first step of a shape may take more, and says so
        peak, said = said_in(lambda x=x: peak_of_step(planned, x))
        assert peak <= room or said
    for x in batches * 2:
        expected = trained_plainly(model, x)
        peak, said = said_in(lambda x=x: peak_of_step(planned, x))
        assert not said
        assert room - UNUSED_BYTES <= peak <= room
        assert_same_gradients(model, expected)


@pytest.mark.parametrize(("parts", "activations"), [(1, 8), (3, 16)])
def test_the_state_of_an_optimizer_is_counted_if_it_is_named(parts, activations):
    model, x = with_gradients(Broken(parts)), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.Adam(model.parameters())
    state = 2 * sum(p.nbytes for p in model.parameters())
    budget = budget_of(model, x, activations) + state
    options = {"budget": budget, "times": "estimate", "optimizer": optimizer}
    planned = torch.compile(model, backend="elbowroom", options=options)
    for step in range(4):
        peak, said = said_in(lambda: peak_of_step(planned, x))
        optimizer.step()
        assert peak <= budget - resident(model, x) - state or (step == 0 and said)
    assert peak >= budget - resident(model, x) - state - UNUSED_BYTES  # and what there is, is used


def test_rows_that_are_too_many_to_be_planned_are_said_once(monkeypatch):
    monkeypatch.setattr("elbowroom.session.graph_group._MOST_ROWS", 1)
    model = with_gradients(Broken(2))
    first, other = torch.randn(ROWS, WIDTH), torch.randn(ROWS - 16, WIDTH)
    planned = compiled(model, budget_of(model, first, 10), dynamic=False)
    for _ in range(3):
        said = said_in(lambda: peak_of_step(planned, first))[1]
    assert not said
    assert "more than 1 different rows" in said_in(lambda: peak_of_step(planned, other))[1][0]
    assert not said_in(lambda: peak_of_step(planned, other))[1]
    assert not said_in(lambda: peak_of_step(planned, first))[1]


def test_two_forwards_before_one_backward():
    model, x = with_gradients(Broken(1)), torch.randn(ROWS, WIDTH)
    budget = budget_of(model, x, 11) + x.nbytes
    planned = compiled(model, budget)
    room = budget - resident(model, x)

    def step():
        for parameter in model.parameters():
            parameter.grad.zero_()
        with measure("cpu", timeline=False) as measured:
            (planned(x).sum() + planned(x).sum()).backward()
        return measured.peak_bytes

    first, said = said_in(step)
    assert first <= room or said
    later, said = said_in(step)
    assert later <= room
    assert not said


def test_a_forward_whose_output_is_dropped_waits_for_nothing():
    model, x = with_gradients(Broken(1)), torch.randn(ROWS, WIDTH)
    planned = compiled(model, budget_of(model, x, 16))
    for _ in range(3):
        assert not said_in(lambda: planned(x))[1]


def test_fit_agrees():
    model, x = with_gradients(Broken()), torch.randn(ROWS, WIDTH)
    budget = budget_of(model, x, 12)
    planned = compiled(model, budget)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peak = peak_of_step(planned, x)
    torch._dynamo.reset()
    fitted = elbowroom.fit(model, x, budget=budget, times="estimate", accumulates=True)
    assert abs(peak_of_step(fitted, x) - peak) <= 2 * ACTIVATION
