"""A captured graph at run time: calls the program in force, and the backward that belongs to each forward.

Programs may be exchanged between steps. A forward hands its program's number along with what it saved, so that a
pending backward always runs the program that its forward prepared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from elbowroom.capture.joint_graph import Captured, made_real
from elbowroom.errors import ElbowroomError
from elbowroom.execute.emit import Emitted, emit, emit_outputs_only
from elbowroom.execute.tickets import Tickets
from elbowroom.program import Program, forward_only


class Looks:
    """Shared by the regions of a session. While `calls` is a list, they compute outputs only and write down calls."""

    def __init__(self) -> None:
        self.calls: list[Region] | None = None


class Region:
    """One graph of the user's model, runnable."""

    def __init__(self, captured: Captured, looks: Looks) -> None:
        self.captured = captured
        self.looks = looks
        self.programs: list[tuple[Program, Emitted]] = []
        self.current = -1
        self.channels_last: bool | None = None  # images of programs to be compiled; None: as Inductor would decide
        self.runs = 0
        self.tickets = Tickets()  # one for each forward
        self.watch: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered around every program run
        self.at_first: Callable[[Region], None] | None = None  # installs a program before the first run, if none is
        self.example: list[Callable[[], torch.Tensor | None]] = []  # what it was called with when looked at
        self._look: Callable[[list[Any]], list[Any]] | None = None

    def install(self, program: Program, *, recorded: bool = False) -> None:
        """From the next forward on, run this program; a fused one may be recorded and replayed."""
        self.release()
        self.current = self.add(program, recorded=recorded)

    def release(self) -> None:
        """Give back the memory that recordings hold."""
        for _, ready in self.programs:
            if ready.recorder is not None:
                ready.recorder.release()

    def add(self, program: Program, *, recorded: bool = False) -> int:
        """Make a program ready to run, if it is not yet; its number."""
        for number, (known, ready) in enumerate(self.programs):
            same_layout = ready.fused is None or ready.fused.channels_last == self.channels_last
            if known == program and same_layout and recorded == (ready.recorder is not None):
                return number
        if recorded:
            from elbowroom.execute.recorder import Recorder

            recorder = Recorder(self.programs[self.add(program)][1].fused)
            emitted = Emitted(recorder.forward, recorder.backward, "", recorder.fused, recorder)
        elif self.captured.cones is None:
            emitted = emit(self.captured, program)
        else:
            from elbowroom.execute.fused import Fused  # the compiler takes seconds to import
            from elbowroom.measuring.fused import inductors_layout

            if self.channels_last is None:  # nothing was measured
                self.channels_last = inductors_layout(self.captured)
            fused = Fused(self.captured, program, self.channels_last)
            emitted = Emitted(fused.forward, fused.backward, "", fused)
        self.programs.append((program, emitted))
        return len(self.programs) - 1

    @property
    def program(self) -> Program:
        return self.programs[self.current][0]

    @property
    def source(self) -> str:
        emitted = self.programs[self.current][1]
        return emitted.source if emitted.fused is None else str(emitted.fused.source)

    def forward(self, arguments: list[Any]) -> list[Any]:
        if self.looks.calls is not None:
            self.looks.calls.append(self)
            return self._outputs_only(arguments)
        if self.current < 0 and self.at_first is not None:
            self.example = [_remembered(argument) for argument in arguments]
            self.at_first(self)
        self.runs += 1
        with self.watch():
            outputs = self.programs[self.current][1].forward(arguments)
        outputs.append(self.tickets.issue(self.runs, self.current))
        return outputs

    def backward(self, arguments: list[Any]) -> list[Any]:
        at = len(arguments) - len(self.captured.joint.arriving) - 1
        run, number = arguments.pop(at).tolist()
        if number < 0:
            raise ElbowroomError("this forward ran only to look at the model; call the fitted model again")
        self.tickets.collect(run)
        with self.watch():
            gradients: list[Any] = self.programs[number][1].backward(arguments)
        return gradients

    def _outputs_only(self, arguments: list[Any]) -> list[Any]:
        self.example = [_remembered(argument) for argument in arguments]
        if self._look is None:
            plain = self.captured.unfused or self.captured
            self._look = emit_outputs_only(plain, forward_only(plain.joint))
        given = list(arguments)
        try:
            outputs = self._look(arguments)
        except torch.OutOfMemoryError:
            outputs = self._zeros(given)
        return [*outputs, torch.tensor((0, -1))]

    def _zeros(self, given: list[Any]) -> list[Any]:
        """Outputs that only look right. Unfused, a forward may take more memory than the step that is to be planned;
        and which graphs come next rarely depends on values."""
        torch.cuda.empty_cache()
        outputs: list[Any] = []
        for op, overwritten in zip(self.captured.forward_outputs, self.captured.overwrites, strict=True):
            if overwritten is not None:
                outputs.append(given[overwritten])
            else:
                outputs.append(None if op is None else made_real(self.captured.nodes[op].meta["val"]).zero_())
        return outputs


def _remembered(argument: Any) -> Callable[[], torch.Tensor | None]:
    """A reference that keeps nothing alive: a batch may die, parameters stay."""
    return weakref.ref(argument) if isinstance(argument, torch.Tensor) else lambda: None
