"""What changes with every step is noticed and said; what comes now and then, or another way, is not."""

from __future__ import annotations

import copy
import random
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from trained import fit  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


class Changing(nn.Module):
    """Something in it changes with every step, in a way that PyTorch looks at."""

    def __init__(self, change, in_parts=False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls, self.name, self.seen, self.known, self.row = 0, "", set(), {}, ()
        self.change, self.in_parts = change, in_parts

    def forward(self, x):
        self.calls += 1
        h = torch.tanh(self.first(x))
        if self.in_parts:
            torch._dynamo.graph_break()
        self.change(self)
        return self.last(h)


def name(model):
    model.name += "a"


def set_of_calls(model):
    model.seen.add(model.calls)


def table_of_calls(model):
    model.known[model.calls] = True


def row_of_calls(model):
    model.row = (*model.row, 1)


CHANGES = [(name, False), (set_of_calls, True)]
MORE = [
    (name, True),
    (set_of_calls, False),
    *((change, n) for change in (table_of_calls, row_of_calls) for n in (0, 1)),
]


@pytest.mark.parametrize(
    ("change", "in_parts"), [*CHANGES, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)]
)
def test_what_is_planned_in_every_step_is_said_at_the_ninth(change, in_parts):
    model, x = Changing(change, in_parts), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(model, x, budget="1MiB")
        for _ in range(9):
            model(x).sum().backward()
            plain(x).sum().backward()
    (unplanned,) = [str(each.message) for each in said if "is not kept" in str(each.message)]
    assert "makes each step another one" in unplanned
    counts = model.elbowroom._traces.counts.total()
    model(x).sum().backward()
    plain(x).sum().backward()
    assert model.elbowroom._traces.counts.total() == counts
    for mine, others in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, others.grad)
    assert (model.calls, model.name, model.seen, model.known, model.row) == (
        *(plain.calls, plain.name, plain.seen, plain.known, plain.row),
    )


@pytest.mark.parametrize("in_parts", [False, True])
def test_shapes_that_are_new_one_after_the_other_are_planned(in_parts):
    model = Changing(lambda _: None, in_parts)
    fit(model, torch.randn(4, 8), budget="1MiB", max_shapes=16, strict=True)
    for size in range(5, 16):
        model(torch.randn(size, 8)).sum().backward()


class Choosing(nn.Module):
    """Chance decides how many graphs it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        if random.random() < 0.5:
            h = torch.sin(h)
            torch._dynamo.graph_break()
        return self.last(h)


def test_fewer_graphs_than_were_planned_are_planned_all_the_same():
    model, x = Choosing(), torch.randn(4, 8)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="elbowroom.*not planned")
        fit(model, x, budget="1MiB")
        for _ in range(12):
            model(x).sum().backward()


def test_parts_that_pytorch_runs_as_they_are_are_said():
    model, x = Changing(lambda _: None, in_parts=True), torch.randn(4, 8)
    fit(model, x, budget="1MiB")
    with torch.compiler.set_stance("force_eager"):
        with pytest.warns(UserWarning, match=r"without the planned program \(.* keeps .* bytes"):
            loss = model(x).sum()
        assert not torch._C._autograd._profiler_enabled()  # no graph has run that would tell the end of its backward
        loss.backward()
