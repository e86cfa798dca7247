"""The two directions between a device and the host: each carries one copy at a time, beside computing.

On a GPU a direction is a stream of its own. A copy begins when all that computing was asked for before has been done,
so that its source is complete and nobody still uses its target. Whoever needs it there waits for its mark, on the
GPU and not on the host. Without a GPU there is nothing to copy beside: a copy is done when it is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, TypeAlias

import torch

Wait: TypeAlias = Callable[[], None]  # computing waits until a copy is there


class Lane(ABC):
    """One direction."""

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        """Begin to copy bytes; what is returned waits for them."""


class Lanes(NamedTuple):
    to_host: Lane
    from_host: Lane


class AtOnce(Lane):
    """Copies before anything else happens."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        target.copy_(source)
        return _nothing


class OnStream(Lane):
    """Copies on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        there = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(there)


def lanes_of(device: torch.device) -> Lanes:
    """Those of a device, which all of its programs share."""
    return _lanes(device.type, device.index)


@cache
def _lanes(kind: str, index: int | None) -> Lanes:
    if kind != "cuda":
        return Lanes(AtOnce(), AtOnce())
    device = torch.device(kind, torch.cuda.current_device() if index is None else index)
    return Lanes(OnStream(device), OnStream(device))


def _nothing() -> None:
    pass
