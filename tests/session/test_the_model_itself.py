"""A fitted model is the model: same object, same class, and everything that goes with that."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402

from elbowroom.errors import ElbowroomError  # noqa: E402
from trained import Net, batch, fit, recomputes, tight  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


class Registered(nn.Module):
    """Its subclasses are kept by name, as many libraries do."""

    kinds: dict[str, type] = {}  # noqa: RUF012

    def __init_subclass__(cls) -> None:
        Registered.kinds[cls.__name__] = cls


class Kept(Registered):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.layer(x)).square().mean()


def test_object_class_and_registries_stay():
    model, x = Kept(), torch.randn(4, 8)
    shown = repr(model)
    fitted = fit(model, x, budget="1MiB")
    assert fitted is model
    assert type(fitted) is Kept
    assert Registered.kinds == {"Kept": Kept}
    assert repr(fitted) == shown
    made = type(fitted)(16)
    assert made.elbowroom is None
    made(torch.randn(4, 16)).backward()


def test_slices_of_a_sequence_are_plain():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    fitted = fit(model, torch.randn(4, 8), budget="1MiB")
    part = fitted[:2]
    assert part.elbowroom is None
    assert part(torch.randn(3, 8)).shape == (3, 8)


def test_pickles_hold_the_plain_model():
    fitted = fit(Net(), *batch(), budget="1GiB")
    text = pickle.dumps(fitted)
    assert b"elbowroom" not in text
    assert pickle.loads(text).elbowroom is None
    assert "_compiled_call_impl" not in vars(pickle.loads(text))


def test_a_model_with_parametrizations_can_still_be_copied():
    layer = parametrizations.weight_norm(nn.Linear(8, 8))
    assert torch.equal(copy.deepcopy(layer).weight, layer.weight)


def test_fitting_again_replaces_the_plan():
    model = fit(Net(), *batch(), budget="1GiB")
    first = model.elbowroom
    again = fit(model, *batch(), budget="2GiB")
    assert again is model
    assert model.elbowroom is not first
    assert model.elbowroom.plan.budget_bytes == 2 * 2**30


def test_a_model_is_planned_while_another_thread_traces(monkeypatch):
    model, x = fit(nn.Linear(8, 8), torch.randn(4, 8), budget="1MiB", strict=True), torch.randn(4, 8)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # as it is then, in all threads
    model(x).sum().backward()
    (entry,) = model.elbowroom.entries.values()
    assert entry.regions[0].runs == 1


def test_off_runs_plainly_and_allows_double_backward():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(4, 8, requires_grad=True)
    fitted = fit(model, x, budget="1MiB")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fitted.elbowroom.off():
            (slope,) = torch.autograd.grad(fitted(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
    assert fitted[0].weight.grad is not None


def test_the_handle_shows_the_plan():
    fitted = tight(Net(), *batch())
    assert recomputes(fitted)
    assert fitted.elbowroom.table() == fitted.elbowroom.plan.table()
    assert "Net: " in fitted.elbowroom.report()
    without = fit(Net(), budget="1GiB")
    with pytest.raises(ElbowroomError, match="nothing is planned yet"):
        _ = without.elbowroom.plan


def test_copies_are_fitted_and_plan_when_they_are_called():
    fitted = tight(Net(), *batch())
    other = copy.deepcopy(fitted)
    assert other.elbowroom is not fitted.elbowroom
    other(*batch()).backward()
    assert other.elbowroom.plan.budget_bytes == fitted.elbowroom.plan.budget_bytes
    assert fitted.head.weight.grad is None
