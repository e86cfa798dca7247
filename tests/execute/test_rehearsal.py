"""Programs of PyTorch's kernels on trial. On the CPU predictions are exact: a trial measures what was predicted."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.execute import rehearsal  # noqa: E402
from elbowroom.execute.trials import Trials  # noqa: E402
from trained import only_entry  # noqa: E402

MIB = 2**20
SLACK = 4096  # scalars that Python and autograd make around a step


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.2)
        self.head = nn.Linear(width, width)
        self.head.weight = self.layers[0].weight  # its gradient is a sum

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(self.drop(self.norm(layer(x))))
        return F.mse_loss(self.head(x), x)


@pytest.fixture(params=[False, True], ids=["no gradients yet", "gradients are there"])
def fitted(request):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4096, 64)
    if request.param:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    return elbowroom.fit(model, x, budget="1GiB", loss=lambda loss: loss, kernels="torch"), x


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_trial_takes_what_was_predicted(fitted, share):
    (graph,) = only_entry(fitted[0]).graphs
    region, planner = graph.region, graph.planner
    plan = planner.best(int(share * planner.everything.prediction.peak_bytes))
    trial = rehearsal.launched(region, region.add(graph.build(plan.program)), 0, planner.around.late_bytes)
    assert abs(trial.peak_bytes - plan.prediction.peak_bytes) <= SLACK
    assert trial.kernels_s == trial.time_s  # nobody will record it


def test_a_trial_changes_nothing(fitted):
    model, _ = fitted
    graphs = only_entry(model).graphs
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    Trials(graphs).best(2 * MIB * 1024, 1, lambda part: None)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)


def test_the_best_of_a_few_plans_serves(fitted):
    graphs = only_entry(fitted[0]).graphs
    planner = graphs[0].planner
    room = int(0.5 * planner.everything.prediction.peak_bytes)
    tried = Trials(graphs).best(room, 3, lambda part: None)
    assert 0.8 * room < tried.peak_bytes <= room
    assert not tried.recorded
    assert Trials(graphs).best(planner.least.prediction.peak_bytes // 2, 3, print) is None


LOSSES = [F.mse_loss, F.smooth_l1_loss, F.soft_margin_loss, F.binary_cross_entropy]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_loss_does_not_keep_the_memory_of_its_terms(loss):
    """In PyTorch it does: the sum is left in the storage that held all terms."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()), torch.rand(4096, 64)
    assert loss(model(x), x).untyped_storage().nbytes() == x.nbytes
    fitted = elbowroom.fit(model, x, x, budget="1GiB", loss=loss, kernels="torch")
    (graph,) = only_entry(fitted).graphs
    region, planner = graph.region, graph.planner
    trial = rehearsal.launched(region, region.current, 0, planner.around.late_bytes)
    assert abs(trial.peak_bytes - planner.everything.prediction.peak_bytes) <= SLACK
    expected = loss(model(x), x)
    actual = fitted(x, x)
    assert torch.equal(actual, expected)
    assert actual.untyped_storage().nbytes() == actual.nbytes
