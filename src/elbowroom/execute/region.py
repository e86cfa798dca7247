"""A captured graph at run time: calls the program in force, and the backward that belongs to each forward.

Programs may be exchanged between steps. A forward hands its program's number along with what it saved, so that a
pending backward always runs the program that its forward prepared.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from elbowroom.capture.joint_graph import Captured
from elbowroom.errors import ElbowroomError
from elbowroom.execute.emit import Emitted, emit, emit_outputs_only
from elbowroom.program import Program, forward_only


class Region:
    """One graph of the user's model, runnable."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.programs: list[tuple[Program, Emitted, torch.Tensor]] = []
        self.runs = 0
        self.watch: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered around every program run
        self._look: Callable[[list[Any]], list[Any]] | None = None

    def install(self, program: Program) -> None:
        """From the next forward on, run this program."""
        number = torch.tensor(len(self.programs))
        self.programs.append((program, emit(self.captured, program), number))

    @property
    def program(self) -> Program:
        return self.programs[-1][0]

    @property
    def source(self) -> str:
        return self.programs[-1][1].source

    def forward(self, arguments: list[Any]) -> list[Any]:
        if not self.programs:
            return self._outputs_only(arguments)
        self.runs += 1
        _, emitted, number = self.programs[-1]
        with self.watch():
            outputs = emitted.forward(arguments)
        outputs.append(number)
        return outputs

    def backward(self, arguments: list[Any]) -> list[Any]:
        at = len(arguments) - len(self.captured.joint.arriving) - 1
        number = int(arguments.pop(at))
        if number < 0:
            raise ElbowroomError("this forward ran only to look at the model; call the fitted model again")
        with self.watch():
            return self.programs[number][1].backward(arguments)

    def _outputs_only(self, arguments: list[Any]) -> list[Any]:
        if self._look is None:
            self._look = emit_outputs_only(self.captured, forward_only(self.captured.joint))
        return [*self._look(arguments), torch.tensor(-1)]
