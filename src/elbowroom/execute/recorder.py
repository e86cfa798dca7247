"""Decides, step by step, whether a recording may be replayed, and launches the program where it may not.

A recording holds the values of one forward at a time, reads parameters at fixed addresses and leaves gradients at
fixed addresses, some where its next forward needs the memory. So it serves the ordinary step, which begins without
gradients and in which one backward follows one forward; or one that adds to gradients that stay; and nothing else
that PyTorch allows: those steps are launched, with the same results.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from elbowroom.execute.accumulation import engine_accumulates, is_autograds, saved_tensors_are_packed
from elbowroom.execute.fused import Fused, mode_for
from elbowroom.execute.fused_graphs import Mode
from elbowroom.execute.recording import LOG, Recording
from elbowroom.execute.tickets import ALONE, Tickets, holders
from elbowroom.execute.to_host.moving_program import MovingProgram, with_lease

_MOVES = 2  # recordings made again because parameters were elsewhere, or gradients kept: after that it is expected
_PATIENCE = 8  # steps launched before a recording that was given up is made again: it takes as long as some of them


class Recorder:
    """Stands for a fused program. What its forward saves begins with a ticket that tells its backward how it ran.

    Where the program moves values, `moving` launches it.
    """

    def __init__(self, fused: Fused, makes: Mode, moving: MovingProgram | None = None) -> None:
        self.fused = fused
        self.moving = moving
        self.makes = makes  # how gradients are made where there are none
        self.recording: Recording | None = None
        self._mode: Mode = "return"
        self._buffers: list[torch.Tensor] = []  # for gradients that are not made in the pool
        self._runs = 0
        self._tickets = Tickets()
        self._moves_left = _MOVES
        self._to_wait = 0  # steps
        fixed = [i for i in fused.handed if i in fused.fixed]
        self._handed = [fused.captured.graph.inputs.index(i) for i in fixed]
        self._trained = [fixed.index(i) for i in fused.parameters]

    # --- forward ---

    def forward(self, arguments: list[Any]) -> list[Any]:
        count = len(self.fused.captured.forward_outputs)
        recording = self._ready(arguments)
        if recording is None:
            outputs = (self.fused if self.moving is None else self.moving).forward(arguments)
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
        if saved_tensors_are_packed():  # whoever keeps the values elsewhere keeps no ticket
            return None
        parameters = self.fused.parameters_among(arguments)
        if any(map(is_autograds, parameters)):
            self.release()
            return None
        if self._mode != "add":  # where gradients were there once, to be added to, they will be again
            self._mode = mode_for(parameters, self.makes)
        if self.recording is not None and self.recording.mode != self._mode:
            self.recording = None
        recording = self.recording
        if recording is not None and not (recording.reads(arguments) and self._may_forget(recording)):
            self._moves_left -= 1
            self.recording = recording = None
        if recording is None and self._to_wait:
            self._to_wait -= 1
        elif recording is None and self._moves_left and self._mode in self.fused.has_run:
            self.recording = recording = self._record(arguments, parameters)
        return recording

    def _may_forget(self, recording: Recording) -> bool:
        """Whether nobody looks at gradients of an earlier step, where the next forward needs the memory."""
        return recording.mode != "return" or all(_held(gradient) == ALONE for gradient in recording.gradients)

    def _record(self, arguments: Sequence[Any], parameters: Sequence[torch.Tensor]) -> Recording | None:
        if self._mode == "return":
            self._buffers = []
        else:
            self._buffers = self._buffers or [_buffer(parameter) for parameter in parameters]
        try:
            lease = None if self.moving is None else self.moving.lease()
            return Recording(self.fused, arguments, self._buffers, self._mode, lease)
        except Exception as failure:  # something that no recording can hold; launching goes on working
            LOG.info("not recorded: %s", failure)
            self._moves_left, self._buffers = 0, []
            return None

    # --- backward ---

    def backward(self, arguments: list[Any], without: frozenset[int] = frozenset()) -> list[Any]:
        """No gradient reaches inputs in `without`, which is nothing that was recorded."""
        run = int(arguments.pop(0))
        launched = partial(self.fused.backward, makes=self.makes, without=without)
        if run < 0:
            return launched(arguments) if self.moving is None else self.moving.backward(arguments, launched)
        recording = self.recording
        assert recording is not None
        assert run == self._runs
        handed, arriving = arguments[: len(self._handed)], arguments[len(self._handed) :]
        arguments.clear()
        parameters = [handed[place] for place in self._trained]
        again = torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
        if again or without or not self._may_replay(recording, parameters):
            # Launched on the recorded values, with memory of its own: rare enough to take more than was planned.
            values = [*recording.handed(handed), *arriving]
            gradients = launched(values) if recording.lease is None else with_lease(launched, values, recording.lease)
            if not again:
                self._tickets.collect(run)
                self._moves_left = 0
                self.release()
            return gradients
        self._tickets.collect(run)
        return self._replay(recording, parameters, arriving)

    def _may_replay(self, recording: Recording, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether gradients go to `.grad`, and nobody else looks at those that would be overwritten."""
        if not engine_accumulates() or any(map(is_autograds, parameters)):
            return False
        pairs = zip(recording.gradients, parameters, strict=True)
        return recording.mode == "return" or all(_held(g) == ALONE + _is_gradient(g, p) for g, p in pairs)

    def _replay(
        self, recording: Recording, parameters: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor]
    ) -> list[Any]:
        pairs = list(zip(recording.gradients, parameters, strict=True))
        ours = [_is_gradient(gradient, parameter) for gradient, parameter in pairs]
        earlier: dict[int, torch.Tensor] = {}
        if recording.mode == "write":
            earlier = {n: gradient.clone() for n, (gradient, _) in enumerate(pairs) if ours[n]}
        elif recording.mode == "add" and not all(ours):
            torch._foreach_zero_(
                [gradient for (gradient, _), is_ours in zip(pairs, ours, strict=True) if not is_ours]
            )
        returned = recording.backward(arriving)
        for n, (gradient, parameter) in enumerate(pairs):
            if n in earlier:
                gradient.add_(earlier[n])
            elif parameter.grad is None:
                parameter.grad = gradient.detach()
            elif not ours[n]:
                parameter.grad.add_(gradient)
        return returned


def _held(gradient: torch.Tensor) -> int:
    return holders(gradient.untyped_storage())


def _is_gradient(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    return parameter.grad is not None and parameter.grad.data_ptr() == gradient.data_ptr()


def _buffer(parameter: torch.Tensor) -> torch.Tensor:
    """Memory for a gradient: that of the one that is there, if nobody else holds it."""
    gradient = parameter.grad
    if gradient is None or gradient.stride() != parameter.stride() or _held(gradient) > ALONE:
        return torch.empty_like(parameter).detach()
    return gradient.detach()
