"""Python inside a forward runs as often as in plain training: once per step, never in `fit`; so do its hooks."""

from __future__ import annotations

import collections
import copy
import random
import warnings
from collections import deque

import numpy
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.errors import BudgetTooSmall  # noqa: E402
from elbowroom.session.steps import StepPlanner  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)
        self.steps, self.temperature = 0, 1.0
        self.seen: deque = deque(maxlen=3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, scale=1.0):
        h = torch.tanh(self.norm(self.first(self.before(x)))) * scale
        return self.last(self.after(h)).square().mean() / self.temperature

    def before(self, x):
        return x

    def after(self, h):
        return h


class Counts(Base):
    def before(self, x):
        self.steps += 1
        return x


class CountsAndUses(Base):
    def before(self, x):
        self.steps += 1
        return x * (1 + 1 / self.steps)


class Prints(Base):
    def before(self, x):
        print("a step")
        return x


class DrawsFromPython(Base):
    def after(self, h):
        return h * random.random()


class DrawsFromItsOwn(Base):
    """Dynamo would draw the same numbers at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(3)

    def after(self, h):
        return h * (self.random.random() + self.random.uniform(1, 2))


class DrawsFromNumpy(Base):
    def after(self, h):
        return h * float(numpy.random.rand())


class TakesTurns(Base):
    """Decides by a number that tracing does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.tensor(0))

    def after(self, h):
        self.turn += 1
        return h * (1 + self.turn) if self.turn.item() % 2 else h.sin()


class AssignsABuffer(Base):
    def after(self, h):
        self.count = self.count + 1
        return h


class ReadsANumber(Base):
    def after(self, h):
        self.last_mean = h.mean().item()
        return h


class UsesANumber(Base):
    def after(self, h):
        return h * h.detach().mean().item()


class Remembers(Base):
    def after(self, h):
        self.seen.append(h.detach().mean().item())
        return h


class Queue(Base):
    """As in MoCo: a queue of keys, and where its next place is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(32, 24))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def after(self, h):
        place = int(self.pointer)
        self.queue[:, place : place + len(h)] = h.detach().T
        self.pointer[0] = (place + len(h)) % self.queue.shape[1]
        return h + (h @ self.queue.clone()) @ self.queue.clone().T


KINDS = (
    *(Counts, CountsAndUses, Prints, DrawsFromPython, DrawsFromItsOwn, DrawsFromNumpy, TakesTurns),
    *(AssignsABuffer, ReadsANumber, UsesANumber, Remembers, Queue),
)


def attributes(model):
    return {name: value for name, value in vars(model).items() if isinstance(value, int | float | list | deque | str)}


def seeds():
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)


def drawn():
    return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()


def fitted_tightly(model, x):
    """Within the least budget that there is."""
    try:
        return elbowroom.fit(model, x, budget=1024)
    except BudgetTooSmall as refusal:
        return elbowroom.fit(model, x, budget=refusal.least_budget)


@pytest.mark.parametrize("kind", KINDS)
def test_fit_leaves_everything_as_it_was(kind, capsys):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(8, 16)
    state, known = copy.deepcopy(model.state_dict()), copy.deepcopy(attributes(model))
    seeds()
    before = drawn()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted_tightly(model, x)
    assert drawn() == before
    assert attributes(model) == known
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", KINDS)
def test_side_effects_happen_once_per_step(kind, capsys):
    torch.manual_seed(0)
    plain, x = kind(), torch.randn(8, 16)
    ours = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted_tightly(ours, x)
        results = [run(each, x, capsys) for each in (plain, ours)]
    assert results[0] == results[1]
    theirs, mine = (each.state_dict(keep_vars=True) for each in (plain, ours))
    for (name, p), q in zip(theirs.items(), mine.values(), strict=True):
        assert torch.equal(p, q), name
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad), name


def run(model, x, capsys):
    seeds()
    losses = []
    for _ in range(5):
        model.zero_grad()
        loss = model(x)
        loss.backward()
        losses.append(loss.item())
    return losses, attributes(model), drawn(), capsys.readouterr().out


@pytest.mark.parametrize("changes", ["counter", "temperature", "argument"])
def test_numbers_that_change_are_planned_but_twice(changes, monkeypatch):
    model, x = Counts() if changes == "counter" else Base(), torch.randn(8, 16)
    fitted = elbowroom.fit(model, x, 1.0, budget="1GiB", strict=True)
    planned = []
    plan = type(fitted.elbowroom)._plan_new
    monkeypatch.setattr(
        type(fitted.elbowroom), "_plan_new", lambda self, *rest: planned.append(rest) or plan(self, *rest)
    )
    for step in range(12):
        if changes == "temperature":
            fitted.temperature = 1.0 + step / 10
        fitted(x, 1.0 + step / 7 if changes == "argument" else 1.0).backward()
    assert len(planned) <= 2
    assert len(fitted.elbowroom.entries) == 1


class CountsOfAll(Base):
    """Its counters are a class's and a module's."""

    total = 0

    def before(self, x):
        global counted
        counted += 1
        CountsOfAll.total += 1
        return x * (1 + counted / 7)


counted = 0


def test_counters_of_a_class_and_global_ones_are_planned_but_twice(monkeypatch):
    torch.manual_seed(0)
    plain, x = CountsOfAll(), torch.randn(8, 16)
    ours = copy.deepcopy(plain)
    elbowroom.fit(ours, x, budget="1GiB", strict=True)
    looked = []
    plan = type(ours.elbowroom)._plan_new
    monkeypatch.setattr(
        type(ours.elbowroom), "_plan_new", lambda self, *rest: looked.append(rest) or plan(self, *rest)
    )
    losses = []
    for model in (plain, ours):
        monkeypatch.setitem(globals(), "counted", 0)
        monkeypatch.setattr(CountsOfAll, "total", 0)
        losses.append([model(x).item() for _ in range(9)])
        assert (counted, CountsOfAll.total) == (9, 9)
    assert losses[0] == losses[1]
    assert len(looked) <= 2


class QueueThatBeginsAgain(Queue):
    """Where it writes is decided by data, and is another place at every step."""

    def after(self, h):
        place = int(self.pointer)
        place = place if place + len(h) <= self.queue.shape[1] else 0
        self.queue[:, place : place + len(h)] = h.detach().T
        self.pointer[0] = place + len(h)
        return h + (h @ self.queue.clone()) @ self.queue.clone().T


class Branches(Base):
    def forward(self, x):
        h = self.first(x)
        h = torch.tanh(self.last(h.sin())) if x.mean() > 0 else self.last(h.cos().exp())
        return h.square().mean()


@pytest.mark.parametrize("kernels", ["torch", "inductor"])
def test_a_place_that_data_decide_is_planned(kernels):
    torch.manual_seed(0)
    model, x = QueueThatBeginsAgain(), torch.randn(8, 16)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        elbowroom.fit(model, x, budget="1GiB", kernels=kernels)
        for _ in range(7):
            model(x).backward()
    assert not [each for each in said if "elbowroom" in str(each.message)]
    regions = {region for entry in model.elbowroom.entries.values() for region in entry.regions}
    assert sum(region.runs for region in regions) >= 2 * 7  # two graphs, and nothing runs beside them


def test_graphs_that_were_found_midway_are_planned_again_for_another_budget(monkeypatch):
    torch.manual_seed(0)
    model, x = Branches(), torch.randn(8, 16).abs()
    budgets = []
    plan_midway = StepPlanner.plan_midway

    def noting(self, region, running):
        budgets.append(self.options.budget_bytes)
        return plan_midway(self, region, running)

    monkeypatch.setattr(StepPlanner, "plan_midway", noting)
    elbowroom.fit(model, x, budget="1GiB", strict=True)
    for batch in (x, -x, x, -x, x, -x):
        model(batch).backward()
        model.zero_grad()
    assert budgets == [2**30]
    model.elbowroom.set_budget("1MiB")
    for batch in (x, -x, x, -x):
        model(batch).backward()
        model.zero_grad()
    assert budgets == [2**30, 2**20]


def hook_forward(model, seen):
    return model.first.register_forward_hook(lambda module, args, out: seen.append("forward") or out * 0.5)


def hook_pre(model, seen):
    return model.last.register_forward_pre_hook(lambda module, args: seen.append("pre") or (args[0] * 2,))


def hook_backward(model, seen):
    return model.first.register_full_backward_hook(lambda *_: seen.append("backward"))


@pytest.mark.parametrize("hook", [hook_forward, hook_pre, hook_backward])
def test_hooks_registered_after_fit_run(hook):
    torch.manual_seed(0)
    plain, x = Base(), torch.randn(8, 16)
    ours = copy.deepcopy(plain)
    elbowroom.fit(ours, x, budget="1GiB")
    seen = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a backward hook cannot be planned, which is said
        for each in (plain, ours):
            each(x).backward()
            calls = seen[each] = []
            handle = hook(each, calls)
            each(x).backward()
            handle.remove()
            each(x).backward()
    assert seen[plain] == seen[ours]
    assert seen[ours]
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("is_keyword", [False, True])
def test_a_list_that_is_a_default_argument_of_a_hook_is_filled(is_keyword):
    seen = []
    model, x = elbowroom.fit(Base(), torch.randn(8, 16), budget="1GiB"), torch.randn(8, 16)
    model(x).backward()
    if is_keyword:
        model.first.register_forward_hook(lambda _, __, out, *, seen=seen: seen.append(out.shape))
    else:
        model.first.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out.shape))
    for _ in range(3):
        model(x).backward()
    assert len(seen) == 3


def test_parameters_may_be_frozen_and_thawed_after_fit():
    torch.manual_seed(0)
    plain, x = Base(), torch.randn(8, 16)
    ours = elbowroom.fit(copy.deepcopy(plain), x, budget="1GiB")
    for frozen in (False, False, True, True, False):
        for model in (plain, ours):
            model.first.weight.requires_grad_(not frozen)
            model.zero_grad()
            model(x).backward()
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("start", [2**62, 2**63 - 1, 2**70, -(2**63) - 1])
def test_integers_of_any_size_may_change(start):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.count = nn.Linear(8, 8), start

        def forward(self, x):
            self.count += 1
            return torch.tanh(self.layer(x)) * (self.count % 7)

    torch.manual_seed(0)
    plain, x = Counts(), torch.randn(4, 8)
    ours = copy.deepcopy(plain)
    elbowroom.fit(ours, x, budget="1MiB", times="estimate")
    for _ in range(4):
        outputs = [model(x) for model in (plain, ours)]
        assert torch.equal(*outputs)
        for model, output in zip((plain, ours), outputs, strict=True):
            model.zero_grad()
            output.sum().backward()
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    assert plain.count == ours.count == start + 4


class LogsIfAsked(nn.Module):
    """`log` may be None."""

    def __init__(self, log, reads):
        super().__init__()
        self.layer, self.log, self.other, self.reads = nn.Linear(8, 8), log, [], reads

    def forward(self, x):
        if self.log is not None:
            self.log.append(2)
        if self.reads and self.log is self.other:
            return self.layer(x)
        return self.layer(x) * (sum(self.log) if self.reads and self.log else 1)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("log", [None, [], collections.deque(maxlen=3)])
def test_a_log_that_may_be_none(log, reads):
    torch.manual_seed(0)
    plain, x = LogsIfAsked(log, reads), torch.randn(4, 8)
    ours = copy.deepcopy(plain)
    elbowroom.fit(ours, x, budget="1MiB", times="estimate")
    for _ in range(5):
        outputs = [model(x) for model in (plain, ours)]
        assert torch.equal(*outputs)
        outputs[1].sum().backward()
        assert ours.log == plain.log
        assert ours.other == []
    for model in (plain, ours):
        model.log = None if log is not None else []
    assert torch.equal(plain(x), ours(x))
    assert ours.log == plain.log
    if not reads:
        assert max(ours.elbowroom._traces.counts.values()) <= 4
