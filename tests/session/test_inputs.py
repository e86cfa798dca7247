"""What cannot be fitted is refused before anything runs, in one sentence that names it and says what to do."""

from __future__ import annotations

import math
import re

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.errors import BudgetTooSmall, ElbowroomError, InputError  # noqa: E402
from elbowroom.session.inputs import check_optimizer  # noqa: E402
from elbowroom.session.options import Options  # noqa: E402
from trained import fit  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


X = torch.ones(3, 4)


def refused(field, said, **options):
    """Checks what both calls say of the same input; options may replace the model, the batch and the budget."""
    model, example = options.pop("model", None) or network(), options.pop("example", X)
    options.setdefault("budget", "1GiB")
    for call in (elbowroom.fit, elbowroom.plan):
        with pytest.raises(InputError, match=said) as error:
            call(model, example, **options)
        assert error.value.field == field
        assert "\n" not in str(error.value)


class OnMeta(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("far", torch.zeros(2, device="meta"))


def test_models_that_are_none():
    refused("model", r"is the class Tanh; pass an instance, such as Tanh\(\)", model=nn.Tanh)
    refused("model", r"must be a torch.nn.Module, not function", model=lambda x: x)
    lazy = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3))
    refused("model", r"parameter '1.weight' has no shape yet; run the model once", model=lazy)
    refused("model", r"parameter 'weight' is on the meta device.*to_empty", model=nn.Linear(4, 4, device="meta"))
    refused("model", r"buffer 'far' is on the meta device.*to_empty", model=OnMeta())


def test_a_batch_without_values():
    refused("example", r"meta device; pass one with values", example=torch.ones(3, 4, device="meta"))


@pytest.fixture
def one_process(tmp_path):
    distributed = pytest.importorskip("torch.distributed")
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_sharded_parameters():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))

    def shard(name, module, mesh):
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    refused(
        "model", r"parameter '0.weight' is a DTensor.*fully_shard", model=distribute_module(network(), mesh, shard)
    )


def test_losses_that_are_none():
    refused("loss", r"must be a function of the output.*not 'mse'", loss="mse")
    refused("loss", r"is the class MSELoss; pass an instance, such as MSELoss\(\)", loss=nn.MSELoss)


def test_stages_that_are_none():
    refused("stages", r"must be a list of modules, not str", stages="all")
    refused("stages", r"must be a list of modules, not Linear", stages=nn.Linear(4, 4))
    refused("stages", r"must be a list of modules, not generator", stages=(m for m in network()))
    refused("stages", r"is empty", stages=[])
    model = network()
    for listed in (list(model), tuple(model), model, nn.ModuleList(model)):
        assert Options("1GiB", stages=listed).stages is listed


def test_optimizers_that_are_none_or_anothers():
    refused("optimizer", r"is the class Adam; pass an instance, such as Adam\(model", optimizer=torch.optim.Adam)
    refused("optimizer", r"must be a torch.optim.Optimizer, not 'adam'", optimizer="adam")
    other = torch.optim.Adam(network().parameters())
    refused("optimizer", r"Adam holds none of the parameters of Sequential", optimizer=other)


def test_optimizers_of_some_parameters_and_of_others_too():
    model, second = network(), network()
    for held in ([model[0].weight], [*model.parameters(), *second.parameters()]):
        check_optimizer(model, torch.optim.SGD(held, lr=0.1))
    check_optimizer(nn.Tanh(), torch.optim.SGD(second.parameters(), lr=0.1))  # nothing of it could be held
    check_optimizer(model, None)


def test_a_plan_may_be_a_path(tmp_path):
    model, path = network(), tmp_path / "plan.json"
    made = elbowroom.plan(model, X, budget="1GiB", times="estimate")
    made.save(path)
    for given in (path, str(path)):
        fitted = fit(model, X, budget="1GiB", plan=given)
        assert fitted.elbowroom.options.plan == elbowroom.Plan.load(path)
    with pytest.raises(InputError, match=r"^plan: .*nowhere.json cannot be read"):
        fit(model, X, budget="1GiB", plan=tmp_path / "nowhere.json")
    with pytest.raises(InputError, match=r"^plan: must be an elbowroom.Plan or the path of a saved one, not 7"):
        fit(model, X, budget="1GiB", plan=7)


@pytest.mark.parametrize("budget", [-1, 2.5, math.nan, True, None, "abc", "10 parsecs", "-3GiB", "nan", "", "1GiB2"])
def test_budgets_that_are_none(budget):
    refused("budget", r"^budget: ", budget=budget)


def test_a_budget_of_nothing_is_answered_with_the_least():
    with pytest.raises(BudgetTooSmall, match=r"budget: 0 B is too small; the least"):
        fit(network(), X, budget=0)


# --- losses that return something else -----------------------------------------------------------------------

RETURNED = {
    "of each element": (
        lambda out: out.square(),
        r"a tensor of shape \[3, 4\]; reduce it with .mean\(\) or .sum\(\)",
    ),
    "a pair": (lambda out: (out.mean(), out), r"a value of type tuple; return nothing but the loss"),
    "a mapping": (lambda out: {"loss": out.mean()}, r"a value of type dict"),
    "a number": (lambda out: 1.0, r"a value of type float"),
    "nothing": (lambda out: None, r"a value of type NoneType"),
}


@pytest.mark.parametrize(("loss", "said"), RETURNED.values(), ids=RETURNED)
def test_a_loss_returns_one_number(loss, said):
    refused("loss", f"must return a tensor with one number, and returned {said}", loss=loss)
    fitted = fit(network(), budget="1GiB", loss=loss)
    with pytest.raises(InputError, match=said):
        fitted(X)
    with pytest.raises(InputError, match=said), torch.no_grad():
        fitted(X)


@pytest.mark.parametrize("loss", [lambda out: out.mean(), lambda out: out.mean().reshape(1, 1)])
def test_a_loss_of_one_number_may_have_any_shape(loss):
    fitted = fit(network(), X, budget="1GiB", loss=loss)
    fitted(X).backward()


def test_a_loss_with_a_target_returns_one_number():
    def apart(out, target):
        return F.mse_loss(out, target, reduction="none")

    with pytest.raises(InputError, match=r"^loss: must return .*shape \[3, 4\]"):
        fit(network(), X, X, budget="1GiB", loss=apart)
    good = fit(network(), X, X, budget="1GiB", loss=F.mse_loss)  # what was refused has not spoilt this one
    good(X, X).backward()
    assert good.elbowroom.prepare((X, X), {}).plan is not None


# --- models with little in them ------------------------------------------------------------------------------


class Idle(nn.Module):
    """Has a parameter that nothing uses, and perhaps a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.unused = layer, nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return torch.tanh(self.layer(x))


LITTLE = {
    "a bare layer": lambda: nn.Linear(4, 4),
    "no parameters": nn.Tanh,
    "nothing at all": nn.Identity,
    "an unused parameter": lambda: Idle(nn.Linear(4, 4)),
    "nothing but an unused parameter": lambda: Idle(nn.Tanh()),
    "frozen": lambda: network().requires_grad_(False),
}


@pytest.mark.filterwarnings("ignore:.*is not planned")
@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("loss", [None, lambda out: out.square().mean()], ids=["outside", "inside"])
@pytest.mark.parametrize("kind", LITTLE)
def test_models_with_little_in_them(kind, loss, needs_gradient):
    """They are planned and shown, or it is said that they cannot be; they run in any case, on an empty batch too."""
    for size in (3, 0):
        model, x = LITTLE[kind](), torch.ones(size, 4, requires_grad=needs_gradient)
        try:
            plan = elbowroom.plan(model, x, budget="1GiB", loss=loss)
        except ElbowroomError as refusal:
            assert re.search(r"cannot be planned: .+", str(refusal))  # noqa: PT017
            assert kind not in ("a bare layer", "an unused parameter")
        else:
            assert "total" in plan.table()
            assert plan.picture()
        fitted = fit(model, x, budget="1GiB", loss=loss, verify=True)
        out = fitted(x)
        if out.requires_grad:
            out.sum().backward()
