"""What PyTorch does when it looks at a step: where it traces, counts what it ran, or gives up, and what it keeps."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import elbowroom  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.last(torch.tanh(self.first(x)))


def test_another_thread_that_resets_pytorchs_counter_costs_no_step():
    """PyTorch counts what a call ran in one place for all threads."""
    counter = getattr(torch._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", None)
    if counter is None:
        pytest.skip("this PyTorch does not count")
    model, x = Small(), torch.randn(8, 16)
    session = elbowroom.fit(model, x, budget="1MiB").elbowroom
    looks = session._looker.looks
    may_run = looks.may_run

    def reset_meanwhile(region):
        counter(-1)
        counter(0)  # and the other thread begins a call of its own
        return may_run(region)

    looks.may_run = reset_meanwhile
    try:
        model(x).sum().backward()
    finally:
        counter(-1)
    assert model.first.weight.grad is not None


def test_steps_of_two_threads_that_overlap_leave_tracing_as_it_was():
    """What PyTorch switches off while a step runs as one graph is switched off for all threads."""
    x = torch.randn(8, 16)
    first, second = (elbowroom.fit(Small(), x, budget="1MiB") for _ in range(2))
    for model in (first, second) * 3:  # until nothing is traced any more
        model(x)
    second_runs, first_ended = threading.Event(), threading.Event()

    def begin_the_second(region, known=first.elbowroom._looker.looks.may_run):
        thread.start()
        assert second_runs.wait(60)
        return known(region)

    def outlast_the_first(region, known=second.elbowroom._looker.looks.may_run):
        second_runs.set()
        assert first_ended.wait(60)
        return known(region)

    first.elbowroom._looker.looks.may_run = begin_the_second
    second.elbowroom._looker.looks.may_run = outlast_the_first
    thread = threading.Thread(target=second, args=(x,))
    first(x)
    first_ended.set()
    thread.join()
    elbowroom.fit(Halves(), x, budget="1MiB", strict=True)


class Halves(Small):
    """Cannot be one graph, but two."""

    def forward(self, x):
        h = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.last(h)


def test_a_step_that_pytorch_was_told_not_to_trace_runs_once_and_is_said():
    plain, x = Small(), torch.randn(8, 16)
    model = elbowroom.fit(copy.deepcopy(plain), x, budget="1MiB")
    with torch.compiler.set_stance("force_eager"), pytest.warns(UserWarning, match="without tracing it"):
        found = model(x)
    assert torch.equal(found, plain(x))
    assert model.calls == plain.calls
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model(x), plain(x))


class Cut(Small):
    """Cannot be one graph once it is told so."""

    cut = False

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if self.cut:
            torch._dynamo.graph_break()
        return self.last(h)


@pytest.mark.parametrize("in_training", [False, True])
def test_what_a_step_had_that_was_no_single_graph_goes_with_it(in_training):
    """Nobody has to look for rings to let go of the batch."""
    model, x = Cut(), torch.randn(8, 16)
    model.cut = not in_training
    gc.collect()
    gc.disable()
    try:
        elbowroom.fit(model, x, budget="1MiB")
        model.cut = True
        model(x).sum().backward()
        batch = weakref.ref(x)
        del x
        assert batch() is None
    finally:
        gc.enable()


class Widened(nn.Module):
    """In two graphs; the layer in the second of them may be replaced. Counts before the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.calls = nn.Linear(16, 16), nn.Linear(16, 16), []

    def forward(self, x):
        h = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        self.calls.append(len(self.calls))
        torch._dynamo.graph_break()
        return self.last(h).square().mean()


def test_a_step_that_needs_more_in_its_middle_goes_on_and_the_next_is_refused():
    model, x = Widened(), torch.randn(64, 16)
    elbowroom.fit(model, x, budget="1MiB")
    with pytest.raises(elbowroom.BudgetTooSmall) as refusal:
        model.elbowroom.set_budget(1)
    model.elbowroom.set_budget(refusal.value.least_budget)
    model(x).backward()
    model.zero_grad()
    model.last = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16))
    plain = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="in the middle of a step"):
        model(x).backward()
    with plain.elbowroom.off():
        plain(x).backward()
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)
    assert model.calls == [0, 1]
    model.zero_grad()
    with pytest.raises(elbowroom.BudgetTooSmall) as refusal:
        model(x)
    assert model.calls == [0, 1]
    model.elbowroom.set_budget(refusal.value.least_budget)
    model(x).backward()


def test_a_graph_that_is_traced_in_the_middle_of_a_step_is_planned_beside_the_whole_batch():
    """What comes out of the graph before it is no batch, and the batch is there all the same."""
    model, x = Widened(), torch.randn(64, 16)
    wide = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16))
    other = Widened()
    other.last = wide
    with pytest.raises(elbowroom.BudgetTooSmall) as refusal:
        elbowroom.fit(other, x, budget=1)
    elbowroom.fit(model, x, budget=refusal.value.least_budget - 1)
    model(x).backward()
    model.zero_grad()
    model.last = wide
    with pytest.warns(UserWarning, match="in the middle of a step"):
        model(x).backward()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_checkpoint_around_a_model_in_parts_sees_what_the_step_saves_alone(replaced):
    """It counts what is saved, in the forward and when it runs that again. Looks save something, too; and a graph
    that is traced in the middle of the forward runs with the same program once more."""
    model, x = Widened(), torch.randn(64, 16)
    plain = copy.deepcopy(model)
    elbowroom.fit(model, x, budget="1MiB")
    given = x.clone().requires_grad_()  # unlike the example, so that the call is looked at
    if replaced:
        checkpoint(model, given, use_reentrant=False).backward()
        for each in (model, plain):
            torch.manual_seed(0)
            each.last = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
            each.zero_grad()
    checkpoint(model, given, use_reentrant=False).backward()
    plain(x).backward()
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


class Changing(Small):
    """In parts, of which the later ones are traced anew when its number changes in a way that they look at."""

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if h.mean() > 5:
            h = torch.cos(h)
        if self.calls % 2:
            h = torch.sin(h)
        torch._dynamo.graph_break()
        return self.last(h if h.mean() < 5 else torch.cos(h))


class Ring:
    """Refers to itself, as what PyTorch leaves behind of a trace does."""

    def __init__(self) -> None:
        self.itself = self


def test_what_tracing_in_the_middle_of_a_step_leaves_behind_goes_with_the_step(monkeypatch):
    model, x = Changing(), torch.randn(8, 16)
    planner = elbowroom.fit(model, x, budget="1MiB").elbowroom._planner
    plan_midway, left = planner.plan_midway, []

    def plan_and_leave_something(*given):
        ring = Ring()
        left.append(weakref.ref(ring))
        gc.collect()  # it is old now; PyTorch looks for rings after it has traced, but for young ones only
        return plan_midway(*given)

    monkeypatch.setattr(planner, "plan_midway", plan_and_leave_something)
    gc.collect()
    gc.disable()
    try:
        for calls in (0, 1, 2, 3):
            model.calls = calls
            model(x).sum().backward()
            assert all(ring() is None for ring in left)
        assert left
    finally:
        gc.enable()


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_model_is_planned_after_any_number_of_resets(in_parts, capsys):
    """Each has it traced anew. That tells nothing of the step."""

    class Model(Small):
        def forward(self, x):
            out = super().forward(x)
            if in_parts:
                print(float(out.mean()))
            return out

    model, x = Model(), torch.randn(8, 16)
    elbowroom.fit(model, x, budget="1MiB", strict=True)
    for _ in range(12):
        torch._dynamo.reset()
        model(x).sum().backward()
        model.zero_grad()
    assert model.elbowroom.plan.budget_bytes == 2**20
    assert len(model.elbowroom.entries) == 1
