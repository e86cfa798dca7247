"""The two directions between a device and the host: each carries one copy at a time, beside computing.

On a GPU a direction is a stream of its own. A copy begins when all that computing was asked for before has been done,
so that its source is complete and nobody still uses its target. Whoever needs it there waits for its mark, on the
GPU and not on the host. Without a GPU there is nothing to copy beside: a copy is done when it is asked for.

Why nothing races is in `docs/design/moving-values.md`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple, TypeAlias

import torch

Wait: TypeAlias = Callable[[], None]  # computing waits until a copy is there; it may be asked to several times


class Lane(ABC):
    """One direction of a device's link."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        """Begin to copy bytes; what is returned waits for them."""

    @abstractmethod
    def finish(self) -> None:
        """Computing waits for all copies that were asked for so far, whoever did."""

    @abstractmethod
    def follow(self, other: Lane) -> None:
        """Copies that are asked for from now on begin after those that another direction was asked for so far."""


class Lanes(NamedTuple):
    to_host: Lane
    from_host: Lane


class AtOnce(Lane):
    """Copies before anything else happens."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        target.copy_(source)
        return _nothing

    def finish(self) -> None:
        pass

    def follow(self, other: Lane) -> None:
        pass


class OnStream(Lane):
    """Copies on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        there = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(there)

    def finish(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def follow(self, other: Lane) -> None:
        assert isinstance(other, OnStream)
        self._stream.wait_stream(other._stream)


_known: dict[torch.device, Lanes] = {}
_making = Lock()


def lanes_of(device: torch.device) -> Lanes:
    """Those of a device, which all of its programs share."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    known = _known.get(device)
    if known is None:
        kind: type[Lane] = OnStream if device.type == "cuda" else AtOnce
        with _making:  # two pairs for one device would not keep the order in which copies were asked for
            known = _known.setdefault(device, Lanes(kind(device), kind(device)))
    return known


def _nothing() -> None:
    pass
