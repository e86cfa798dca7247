"""An interrupt at any moment of a step whose values are on their way to the host or back: nothing is lost of the
host's memory, nothing arrives in memory that is somebody else's by then, and the next step is right."""

from __future__ import annotations

import gc
import linecache
import sys
from contextlib import contextmanager
from random import Random

import pytest

torch = pytest.importorskip("torch")

from test_interrupts import Subject  # noqa: E402

from delayed import delay_copies  # noqa: E402
from elbowroom.execute.region import Build  # noqa: E402
from elbowroom.measure import host_memory  # noqa: E402
from elbowroom.measure.measured import Measured  # noqa: E402
from elbowroom.step.program import make_program  # noqa: E402
from moving import may_move, moved  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")
WATCHED = "lease.py", "host_room.py", "moving_program.py", "lanes.py", "delayed.py", "tickets.py", "host_memory.py"
EVERY = 3  # moments apart


class MovingSubject(Subject):
    """The same with values that move in between."""

    def __init__(self) -> None:
        super().__init__()
        graph, chance = self.region.traced.graph, Random(1)
        program = make_program(graph, graph.backward)
        for value in may_move(graph, program):
            program = moved(graph, program, value, chance.randint)
        assert program.moves
        self.region.install(Build(Measured(self.region.traced), program))
        self.room = self.region.looks.host_room
        self.step()
        self.expected = self.step()
        self.held = host_memory.held_bytes()

    def assert_unharmed(self) -> None:
        assert not self.room.taken_bytes
        assert host_memory.held_bytes() == self.held
        super().assert_unharmed()
        assert not self.room.taken_bytes


@contextmanager
def interrupted(after: int):
    """An interrupt before some line of a program or of what moves its values. Yields what has happened."""
    events = []

    def trace(frame, event, _):
        name = frame.f_code.co_filename
        if not name.endswith(("<elbowroom program>", *WATCHED)):
            return None
        # At the end of a `with`, tracing can interrupt where no signal does: before the lock is given back.
        if event == "line" and not linecache.getline(name, frame.f_lineno).strip().startswith("with "):
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
        with interrupted(after):
            run()
    except KeyboardInterrupt:
        return False
    return True


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_step_that_moves_values_may_be_interrupted_at_any_moment(phase, monkeypatch):
    delay_copies(monkeypatch, 0.002)
    subject = MovingSubject()
    after, is_over = 0, False
    while not is_over:
        subject.prepare()
        if phase == "forward":
            is_over = ends_before(after, subject.forward)
        else:
            loss = subject.forward()
            is_over = ends_before(after, loss.backward)
            del loss
        subject.assert_unharmed()
        after += EVERY
    assert after > len(subject.region.program.forward)


def test_an_interrupt_that_somebody_looks_at_holds_nothing_of_the_host(monkeypatch):
    delay_copies(monkeypatch, 0.002)
    subject = MovingSubject()
    kept = []
    for phase, after in (("forward", 40), ("backward", 90), ("forward", 90)):
        subject.prepare()
        loss = subject.forward() if phase == "backward" else None
        try:
            with interrupted(after):
                subject.forward() if loss is None else loss.backward()
        except KeyboardInterrupt as failure:
            kept.append(failure)
        del loss
        gc.collect()
        subject.assert_unharmed()
    assert len(kept) == 3
