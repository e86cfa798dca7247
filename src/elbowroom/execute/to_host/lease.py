"""The values that one forward has sent to the host, until nobody can run its backward any more.

A program asks for the four operations of `step/operations.py` by the number of a value. What is copied is the storage
behind the value, byte by byte, and what comes back lies in a storage just as large: strides, gaps and all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from elbowroom.errors import CopyFailed, ElbowroomError, first_line
from elbowroom.execute.to_host.lanes import Lane, Lanes, Wait
from elbowroom.step.slab import Slab


@dataclass(frozen=True)
class Form:
    """How a tensor lies in its storage, and where that is."""

    device: torch.device
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    bytes: int
    is_conjugated: bool
    is_negated: bool

    @classmethod
    def of(cls, value: torch.Tensor) -> Form:
        return cls(
            value.device,
            value.dtype,
            value.size(),
            value.stride(),
            int(value.storage_offset()),
            value.untyped_storage().nbytes(),
            value.is_conj(),
            value.is_neg(),
        )

    @classmethod
    def of_elements(cls, value: torch.Tensor) -> Form:
        """Of a tensor without gaps, in a storage of its own."""
        size = value.numel() * value.element_size()
        return cls(value.device, value.dtype, value.size(), value.stride(), 0, size, False, False)

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """A tensor of this form in other memory."""
        tensor = torch.empty(0, dtype=self.dtype, device=self.device)
        tensor.set_(memory.untyped_storage(), self.offset, self.size, self.stride)  # type: ignore[call-overload]
        if self.is_conjugated:
            torch._C._set_conj(tensor, True)  # type: ignore[attr-defined]
        if self.is_negated:
            torch._C._set_neg(tensor, True)  # type: ignore[attr-defined]
        return tensor


Forms: TypeAlias = dict[int, Form]  # by value


class Lease:
    """A part of the host's memory, cut for one program, and what has been copied there.

    `owner` is what the memory belongs to, kept for as long as this. `forms` are of values that lie there already.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        slab: Slab,
        lanes: Lanes,
        owner: object = None,
        forms: Forms | None = None,
    ) -> None:
        self.memory: torch.Tensor = memory
        self._forms: Forms = dict(forms or {})
        self._slab, self._lanes, self._owner = slab, lanes, owner
        self._leaving: dict[int, Wait] = {}
        self._coming: dict[int, Wait] = {}
        self._sources: dict[int, torch.Tensor] = {}  # memory that a copy reads, and the program does not know of
        self._targets: dict[int, torch.Tensor] = {}  # memory that a copy writes to: nobody else may get it before
        self._unseen: dict[int, torch.Tensor] = {}  # on their way back, and not handed over yet

    @property
    def forms(self) -> Forms:
        """Of all values that have been sent to the host."""
        return self._forms

    def offload(self, number: int, value: torch.Tensor) -> None:
        """Begin to copy a value to the host."""
        self._forms[number] = form = Form.of(value)
        place = self._place(number, form.bytes)
        self._leaving[number] = begun(self._lanes.to_host, place, bytes_behind(value))

    def offload_elements(self, number: int, value: torch.Tensor, stride: Sequence[int]) -> None:
        """Begin to copy the elements of a value to the host, laid out with these strides, which leave no gaps."""
        if value.stride() != tuple(stride):
            value = torch.empty_strided(value.size(), stride, dtype=value.dtype, device=value.device).copy_(value)
        elements = value.as_strided((value.numel(),), (1,)).view(torch.uint8)
        self._forms[number] = Form.of_elements(value)
        place = self._place(number, elements.numel())
        self._sources[number] = elements
        self._leaving[number] = begun(self._lanes.to_host, place, elements)

    def release(self, number: int) -> None:
        """Wait until a value is on the host; from then on its memory on the device may go."""
        if number in self._leaving:
            wait_for(self._leaving[number])
            del self._leaving[number]
            self._sources.pop(number, None)

    def prefetch(self, number: int) -> torch.Tensor:
        """Take memory for a value and begin to copy it back; what is returned may be read after `arrive`."""
        form = self._forms[number]
        memory = torch.empty(form.bytes, dtype=torch.uint8, device=form.device)
        self._targets[number] = memory
        self._coming[number] = begun(self._lanes.from_host, memory, self._place(number, form.bytes))
        return form.over(memory)

    def arrive(self, number: int) -> None:
        """Wait until a value is back."""
        wait_for(self._coming[number])
        del self._coming[number], self._targets[number]

    def prefetch_unseen(self, number: int) -> None:
        """Take memory for a value and begin to copy it back; `arrived` hands it over."""
        self._unseen[number] = self.prefetch(number)

    def arrived(self, number: int) -> torch.Tensor:
        """Wait until a value is back, and hand it over."""
        self.arrive(number)
        return self._unseen.pop(number)

    def finish(self) -> None:
        """Wait for all that is on its way. After a failure, the memory that it comes from or goes to is free then.

        Directions are asked and not single copies: an interrupt may have come before a copy was noted here.
        """
        for lane in self._lanes:
            lane.finish()
        for noted in (self._leaving, self._coming, self._sources, self._targets, self._unseen):
            noted.clear()

    def _place(self, number: int, size: int) -> torch.Tensor:
        start, room = self._slab.places[number]
        if size > room:
            raise ElbowroomError(f"value {number} has {size} bytes to move and was planned with {room}; plan again")
        return self.memory[start : start + size]


def begun(lane: Lane, target: torch.Tensor, source: torch.Tensor) -> Wait:
    """A copy that has begun; `wait_for` waits for it."""
    try:
        return lane.copy(target, source)
    except RuntimeError as failure:
        raise _failed(failure) from failure


def wait_for(wait: Wait) -> None:
    """Have computing wait for a copy, and say it if that fails."""
    try:
        wait()
    except RuntimeError as failure:
        raise _failed(failure) from failure


def _failed(failure: RuntimeError) -> CopyFailed:
    return CopyFailed(
        f"a copy between the device and the host failed ({first_line(failure)}), and with it this step; "
        'run it again, or pass offload="never"'
    )


def bytes_behind(value: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(0, dtype=torch.uint8, device=value.device)
    return memory.set_(value.untyped_storage())  # type: ignore[call-overload, no-any-return]
