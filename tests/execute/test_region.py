"""Regions: a captured graph at run time, with the programs that may run it and the backward of each forward."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.errors import ElbowroomError  # noqa: E402
from elbowroom.execute.region import Build, makes_gradients  # noqa: E402
from elbowroom.execute.saved_numbers import as_number, numbers_as_tensors  # noqa: E402
from elbowroom.measure.measured import Measured  # noqa: E402
from elbowroom.step.program import make_program  # noqa: E402
from elbowroom.step.referee import Surroundings  # noqa: E402
from fusible import gradients, perceptron, set_gradients  # noqa: E402
from tracing import looked_at  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


class Subject:
    """A model with dropout, looked at, whose programs are installed by hand."""

    def __init__(self) -> None:
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5)) for _ in range(3)]
        self.model, self.x = nn.Sequential(*layers), torch.randn(16, 8)
        self.compiled, self.region, _ = looked_at(self.model, self.x)
        graph = self.region.traced.graph
        self.everything, self.nothing = (
            Build(Measured(self.region.traced), make_program(graph, order))
            for order in (graph.backward, [*graph.forward, *graph.backward])
        )

    def stop_looking(self) -> None:
        self.region.looks.calls = None

    def forward(self):
        torch.manual_seed(3)
        return self.compiled(self.x).square().sum()

    def expected(self):
        torch.manual_seed(3)
        found = torch.autograd.grad(self.model(self.x).square().sum(), list(self.model.parameters()))
        return list(found)


def assert_equal(found, expected) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# --- programs ---------------------------------------------------------------------------------------------------


def test_a_program_is_made_ready_once():
    subject = Subject()
    region = subject.region
    first, second = region.add(subject.everything), region.add(subject.nothing)
    assert first != second
    assert region.add(replace(subject.everything)) == first
    assert region.current == -1  # nothing runs yet
    region.install(subject.nothing)
    assert (region.current, region.program) == (second, subject.nothing.program)
    assert " again" in region.source
    region.install(subject.everything)
    assert (region.current, len(region.programs)) == (first, 2)
    assert " again" not in region.source


@pytest.mark.parametrize("fused", [False, True])
def test_which_builds_one_runnable_program_serves(fused):
    """PyTorch's kernels run in one way; of fused ones the layout, recording and where gradients go matter as well."""
    measured = SimpleNamespace(is_fused=fused, channels_last=False)
    one = Build(measured, "program")
    assert one.is_like(Build(SimpleNamespace(is_fused=fused, channels_last=False), "program"))
    assert not one.is_like(replace(one, program="another"))
    assert not one.is_like(Build(SimpleNamespace(is_fused=not fused, channels_last=False), "program"))
    others = [
        replace(one, recorded=True),
        replace(one, makes="write"),
        Build(SimpleNamespace(is_fused=fused, channels_last=True), "program"),
    ]
    assert [one.is_like(other) for other in others] == [not fused] * 3


def test_gradients_that_come_late_are_returned_and_others_have_a_place():
    assert makes_gradients(Surroundings(late={1: 8})) == "return"
    assert makes_gradients(Surroundings()) == "write"


@pytest.mark.parametrize("first", ["everything", "nothing"])
def test_a_pending_backward_belongs_to_the_program_of_its_forward(first):
    subject = Subject()
    subject.stop_looking()
    second = "nothing" if first == "everything" else "everything"
    expected = subject.expected()
    subject.region.install(getattr(subject, first))
    loss = subject.forward()
    subject.region.install(getattr(subject, second))
    other = subject.forward()
    other.backward()
    assert_equal(gradients(subject.model), expected)
    set_gradients(subject.model, None)
    loss.backward()
    assert_equal(gradients(subject.model), expected)


def test_installing_gives_back_what_recordings_hold():
    subject = Subject()
    subject.region.install(subject.everything)
    released = []
    recorder = SimpleNamespace(release=lambda: released.append(True))
    subject.region.programs[0] = replace(subject.region.programs[0], recorder=recorder)
    subject.region.install(subject.nothing)
    assert released == [True]
    subject.region.release()
    assert released == [True, True]


def test_a_program_may_be_installed_when_the_first_call_comes():
    """By then there are real arguments, which the region remembers without keeping them."""
    subject = Subject()
    subject.stop_looking()
    seen = []

    def at_first(region):
        seen.append([given() for given in region.example])
        region.install(subject.nothing)

    subject.region.at_first = at_first
    for _ in range(2):
        subject.forward().backward()
    ((*inputs,),) = seen
    assert any(value is not None and value.data_ptr() == subject.x.data_ptr() for value in inputs)


# --- running ----------------------------------------------------------------------------------------------------


def test_every_run_of_a_program_is_watched():
    subject = Subject()
    subject.stop_looking()
    subject.region.install(subject.everything)
    entered = []

    @contextmanager
    def watch():
        entered.append("in")
        yield
        entered.append("out")

    subject.region.watch = watch
    loss = subject.forward()
    assert entered == ["in", "out"]
    loss.backward()
    assert entered == ["in", "out"] * 2


def test_runs_are_counted_and_forwards_wait_for_their_backward():
    subject = Subject()
    subject.stop_looking()
    region = subject.region
    region.install(subject.everything)
    first, second = subject.forward(), subject.forward()
    assert region.runs == 2
    assert len(region.tickets.waiting) == 2
    first.backward()
    assert len(region.tickets.waiting) == 1
    del second  # its backward will never come
    assert not region.tickets.waiting


def test_a_backward_of_a_look_is_refused():
    subject = Subject()
    loss = subject.forward()
    assert subject.region.looks.calls == [subject.region] * 2
    assert subject.region.runs == 0
    with pytest.raises(ElbowroomError, match="ran only to look at the model"):
        loss.backward()


def test_a_look_at_the_model_that_runs_out_of_memory_is_no_reason_to_give_up(monkeypatch):
    def fail(arguments):
        arguments.clear()
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr("elbowroom.execute.region.emit_outputs_only", lambda *args: fail)
    model, x = perceptron()
    model(x).square().sum().backward()
    expected = gradients(model)
    set_gradients(model, None)
    fitted = elbowroom.fit(model, x, budget="1GiB", kernels="torch", times="estimate")
    fitted(x).square().sum().backward()
    for found, wanted in zip(gradients(model), expected, strict=True):
        assert torch.equal(found, wanted)


# --- numbers ----------------------------------------------------------------------------------------------------


def test_numbers_go_to_the_backward_as_tensors_that_are_no_views_and_come_out_the_same():
    """AOT autograd detaches what is a view, and refuses to do that to a class of ours when a graph first runs."""
    numbers = [3, -5, 2**70, 0.1, 0.1j, True, torch.ones(2)]
    packed = numbers_as_tensors([7, *numbers], 1)
    assert packed[0] == 7
    assert all(isinstance(value, torch.Tensor) and not value._is_view() for value in packed[1:])
    assert [as_number(value) for value in packed[1:-1]] == numbers[:-1]
    assert packed[-1] is numbers[-1]
