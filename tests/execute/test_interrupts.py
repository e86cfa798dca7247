"""An interrupt at any moment of a step: the next step is as if there had been none, and so is its memory."""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from elbowroom.execute.region import Build  # noqa: E402
from elbowroom.measure.measured import Measured  # noqa: E402
from elbowroom.measure.memory import measure  # noqa: E402
from elbowroom.step.program import make_program  # noqa: E402
from tracing import looked_at  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")
ROWS, WIDTH = 32, 48


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.4)
        return self.norm(x)


class Subject:
    """A model with a program that runs all of its forward again, some of it twice."""

    def __init__(self) -> None:
        self.model, self.x = Net(), torch.randn(ROWS, WIDTH)
        self.compiled, self.region, _ = looked_at(self.model, self.x)
        graph = self.region.traced.graph
        half = len(graph.backward) // 2
        order = [*graph.forward, *graph.backward[:half], *graph.forward, *graph.backward[half:]]
        self.region.looks.calls = None
        self.region.install(Build(Measured(self.region.traced), make_program(graph, order)))
        assert self.region.program.reseeded
        self.buffers = [buffer.clone() for buffer in self.model.buffers()]
        self.step()  # what is made once is made
        self.expected = self.step()

    def prepare(self) -> None:
        torch.manual_seed(3)
        self.model.zero_grad()
        with torch.no_grad():
            for buffer, kept in zip(self.model.buffers(), self.buffers, strict=True):
                buffer.copy_(kept)

    def forward(self):
        return self.compiled(self.x).square().sum()

    def step(self):
        """Everything that a step leaves behind, and its peak of memory."""
        self.prepare()
        gc.freeze()  # nothing older than the step is freed in it; looking through all of it takes half a second
        with measure("cpu", timeline=False) as measured:
            loss = self.forward()
            loss.backward()
        gc.unfreeze()
        found = [
            loss.detach(),
            torch.get_rng_state(),
            *self.model.buffers(),
            *(p.grad for p in self.model.parameters()),
        ]
        return [value.clone() for value in found], measured.peak_bytes

    def assert_unharmed(self) -> None:
        found, peak_bytes = self.step()
        wanted, wanted_bytes = self.expected
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert peak_bytes == wanted_bytes
        assert not self.region.tickets.waiting
        assert torch.ones(1, requires_grad=True).mul(2).requires_grad, "autograd is still left out"


@contextmanager
def interrupted(after: int):
    """An interrupt before some instruction of a program, or before some line of what it calls and of what calls it.

    Yields what has happened.
    """
    events = []

    def trace(frame, event, _):
        name = frame.f_code.co_filename
        if not name.endswith(("<elbowroom program>", "drawing.py", "accumulation.py", "region.py", "tickets.py")):
            return None
        frame.f_trace_opcodes = name == "<elbowroom program>"
        if event == ("opcode" if frame.f_trace_opcodes else "line"):
            events.append((name, frame.f_lineno))
            if len(events) > after:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield events
    finally:
        sys.settrace(None)


def ends_before(after: int, run) -> bool:
    """Whether something ends before the interrupt comes."""
    try:
        with interrupted(after) as events:
            run()
    except KeyboardInterrupt:
        return False
    assert len(events) == after
    return True


def test_a_forward_may_be_interrupted_at_any_moment():
    subject = Subject()
    subject.prepare()
    states = [torch.get_rng_state()]
    for _ in range(3):
        torch.native_dropout(torch.ones(ROWS, WIDTH), 0.4, True)
        states.append(torch.get_rng_state())
    subject.prepare()
    reached = set()
    after = 0
    while not ends_before(after, subject.forward):
        now = torch.get_rng_state()
        (drawn,) = [n for n, state in enumerate(states) if torch.equal(state, now)]
        reached.add(drawn)
        if after % 5 == 0:
            subject.assert_unharmed()
        subject.prepare()
        after += 1
    assert reached == {0, 1, 2, 3}


def test_a_backward_may_be_interrupted_at_any_moment():
    """The generators stay where they are, although numbers are drawn again."""
    subject = Subject()
    after, is_over = 0, False
    while not is_over:
        subject.prepare()
        loss = subject.forward()
        now = torch.get_rng_state()
        is_over = ends_before(after, loss.backward)
        assert torch.equal(torch.get_rng_state(), now), after
        del loss
        if after % 7 == 0:
            subject.assert_unharmed()
        after += 1
    assert after > len(subject.region.program.backward)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_interrupt_that_somebody_looks_at_holds_no_values(phase):
    """Where Python is used by hand, the last failure is kept until the next one."""
    subject = Subject()
    subject.prepare()
    loss = subject.forward() if phase == "backward" else None
    gc.collect()
    before = tensors_of(ROWS, WIDTH)
    kept = None
    try:
        with interrupted(150):
            subject.forward() if loss is None else loss.backward()
    except KeyboardInterrupt as failure:
        kept = failure
    assert kept is not None
    gc.collect()
    assert tensors_of(ROWS, WIDTH) <= before
    del kept
    subject.assert_unharmed()


def tensors_of(*shape: int) -> int:
    return sum(type(each) is torch.Tensor and each.shape == shape for each in gc.get_objects())
