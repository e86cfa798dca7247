"""Decides, step by step, whether a recording may be replayed, and launches the program where it may not.

A recording holds the values of one forward at a time, reads parameters at fixed addresses and writes gradients at
fixed addresses. So it serves the ordinary step, in which one backward follows one forward, and nothing else that
PyTorch allows: those steps are launched, with the same results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elbowroom.execute.accumulate import engine_accumulates, is_autograds
from elbowroom.execute.fused import Fused, Mode
from elbowroom.execute.recording import LOG, Recording
from elbowroom.execute.tickets import Tickets, holders

_MOVES = 2  # recordings made again because parameters were elsewhere; after that they are expected to move on
_PATIENCE = 8  # steps launched before a recording that was given up is made again: it takes as long as some of them
_ALONE = 2  # holders of a storage that one tensor has: the tensor, and who asks


class Recorder:
    """Stands for a fused program. What its forward saves begins with a ticket that tells its backward how it ran."""

    def __init__(self, fused: Fused) -> None:
        self.fused = fused
        self.recording: Recording | None = None
        self._mode: Mode = "write"
        self._buffers: list[torch.Tensor] = []  # for gradients
        self._runs = 0
        self._tickets = Tickets()
        self._moves_left = _MOVES
        self._to_wait = 0  # steps
        places = {i: place for place, i in enumerate(fused.captured.joint.inputs)}
        self._parameters = [places[i] for i in fused.parameters]
        self._handed = [places[i] for i in fused.handed if i in fused.fixed]
        self._trained = [self._handed.index(place) for place in self._parameters]

    # --- forward ---

    def forward(self, arguments: list[Any]) -> list[Any]:
        count = len(self.fused.captured.forward_outputs)
        recording = self._ready(arguments)
        if recording is None:
            outputs = self.fused.forward(arguments)
            return [*outputs[:count], torch.tensor((-1,)), *outputs[count:]]
        handed = [arguments[place] for place in self._handed]
        results = recording.forward(arguments)
        arguments.clear()
        self._runs += 1
        return [*results, self._tickets.issue(self._runs), *handed]

    def release(self) -> None:
        """Give the memory back, unless a backward still needs it. Recorded again after some steps in a row."""
        if self._tickets.waiting:
            return
        if self.recording is not None:
            self._to_wait = _PATIENCE
        self.recording = None
        self._buffers = []

    def _ready(self, arguments: Sequence[Any]) -> Recording | None:
        """A recording to replay, made now if the program has run in the mode that is wanted."""
        if not self._moves_left or self._tickets.waiting:  # the pool holds the values of one forward
            return None
        parameters = [arguments[place] for place in self._parameters]
        if any(map(is_autograds, parameters)):
            self.release()
            return None
        recording = self.recording
        if recording is not None and not recording.reads(arguments):
            self._moves_left -= 1
            self.recording = recording = None
        if self._mode == "write" and any(parameter.grad is not None for parameter in parameters):
            # Gradients are there already, to be added to: that takes another backward.
            self._mode = "add"
            self.recording = recording = None
        if recording is None and self._to_wait:
            self._to_wait -= 1
        elif recording is None and self._moves_left and self._mode in self.fused.has_run:
            self.recording = recording = self._record(arguments, parameters)
        return recording

    def _record(self, arguments: Sequence[Any], parameters: Sequence[torch.Tensor]) -> Recording | None:
        self._buffers = self._buffers or [_buffer(parameter) for parameter in parameters]
        try:
            return Recording(self.fused, arguments, self._buffers, self._mode)
        except Exception as failure:  # something that no recording can hold; launching goes on working
            LOG.info("not recorded: %s", failure)
            self._moves_left, self._buffers = 0, []
            return None

    # --- backward ---

    def backward(self, arguments: list[Any]) -> list[Any]:
        run = int(arguments.pop(0))
        if run < 0:
            return self.fused.backward(arguments)
        recording = self.recording
        assert recording is not None
        assert run == self._runs
        handed, arriving = arguments[: len(self._handed)], arguments[len(self._handed) :]
        arguments.clear()
        parameters = [handed[place] for place in self._trained]
        again = torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
        if again or not self._may_write(parameters):
            # Launched on the recorded values, with memory of its own: rare enough to take more than was planned.
            gradients = self.fused.backward([*recording.handed(handed), *arriving])
            if not again:
                self._tickets.collect(run)
                self._moves_left = 0
                self.release()
            return gradients
        self._tickets.collect(run)
        return self._replay(recording, parameters, arriving)

    def _may_write(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether gradients go to `.grad`, and nobody looks at what the buffers still hold of an earlier step."""
        if not engine_accumulates() or any(map(is_autograds, parameters)):
            return False
        return all(
            holders(buffer.untyped_storage()) == _ALONE + self._is_ours(buffer, parameter)
            for buffer, parameter in zip(self._buffers, parameters, strict=True)
        )

    def _replay(
        self, recording: Recording, parameters: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor]
    ) -> list[Any]:
        ours = [self._is_ours(buffer, parameter) for buffer, parameter in zip(self._buffers, parameters, strict=True)]
        earlier: dict[int, torch.Tensor] = {}
        if recording.mode == "write":
            earlier = {n: buffer.clone() for n, buffer in enumerate(self._buffers) if ours[n]}
        elif not all(ours):
            torch._foreach_zero_([buffer for buffer, mine in zip(self._buffers, ours, strict=True) if not mine])
        returned = recording.backward(arriving)
        for n, (buffer, parameter) in enumerate(zip(self._buffers, parameters, strict=True)):
            if n in earlier:
                buffer.add_(earlier[n])
            elif parameter.grad is None:
                parameter.grad = buffer.detach()
            elif not ours[n]:
                parameter.grad.add_(buffer)
        return returned

    @staticmethod
    def _is_ours(buffer: torch.Tensor, parameter: torch.Tensor) -> bool:
        return parameter.grad is not None and parameter.grad.data_ptr() == buffer.data_ptr()


def _buffer(parameter: torch.Tensor) -> torch.Tensor:
    """Memory for a gradient: that of the one that is there, if nobody else holds it."""
    gradient = parameter.grad
    if gradient is None or gradient.stride() != parameter.stride() or holders(gradient.untyped_storage()) > _ALONE:
        return torch.empty_like(parameter).detach()
    return gradient.detach()
