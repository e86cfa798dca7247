"""Stands for an emitted program whose values move: gives each forward its part of the host's memory.

Among what a forward saves goes a ticket with which its part is held: autograd keeps both as long as a backward may
come, and the backward finds the part by the ticket's number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch

from elbowroom.errors import ElbowroomError
from elbowroom.execute.accumulation import saved_tensors_are_packed
from elbowroom.execute.tickets import Tickets
from elbowroom.execute.to_host.host_room import HostRoom
from elbowroom.execute.to_host.lease import Lease
from elbowroom.step.slab import Slab


class MovingProgram:
    """Its functions take what an emitted program's take, and hand it the part as last argument."""

    def __init__(
        self,
        forward: Callable[[list[Any]], list[Any]],
        slab: Slab,
        room: HostRoom,
        device: torch.device,
        results: int,
    ) -> None:
        self._forward, self._slab, self._room = forward, slab, room
        self._device, self._results = device, results
        self._runs = 0
        self._tickets = Tickets()
        self._leases: WeakValueDictionary[int, Lease] = WeakValueDictionary()
        self._packed: dict[int, Lease] = {}  # whose tickets somebody's hooks have put away as something else

    @property
    def host_bytes(self) -> int:
        """What the values of one forward take on the host."""
        return self._slab.bytes

    def forward(self, arguments: list[Any]) -> list[Any]:
        lease = self._room.lease(self._slab, self._device)
        arguments.append(lease)
        outputs = _run(self._forward, arguments, lease)
        self._runs += 1
        self._leases[self._runs] = lease
        if saved_tensors_are_packed():
            self._packed[self._runs] = lease
        ticket = self._tickets.issue(self._runs, held=lease)
        return [*outputs[: self._results], ticket, *outputs[self._results :]]

    def backward(self, arguments: list[Any], run: Callable[[list[Any]], list[Any]]) -> list[Any]:
        number = int(arguments[0])
        lease = self._leases.get(number)  # before the ticket goes, and with it what is held
        del arguments[0]
        if lease is None:
            raise ElbowroomError("what this backward has on the host is gone; call the fitted model again")
        self._packed.pop(number, None)
        arguments.append(lease)
        return _run(run, arguments, lease)


def _run(function: Callable[[list[Any]], list[Any]], arguments: list[Any], lease: Lease) -> list[Any]:
    try:
        return function(arguments)
    except BaseException:
        lease.abandon()
        raise
