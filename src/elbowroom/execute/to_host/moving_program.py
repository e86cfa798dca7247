"""Stands for a program whose values move: gives each forward its part of the host's memory.

Among what a forward saves goes a ticket with which its part is held: autograd keeps both as long as a backward may
come, and the backward finds the part by the ticket's number. Where somebody's hooks put away what is saved, they get
the values on the host like all others, as one tensor of memory that belongs to nobody else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch

from elbowroom.errors import ElbowroomError, let_go_of_values
from elbowroom.execute.accumulation import saved_tensors_are_packed
from elbowroom.execute.tickets import Tickets
from elbowroom.execute.to_host.host_room import HostRoom, is_recorded
from elbowroom.execute.to_host.lanes import lanes_of
from elbowroom.execute.to_host.lease import Forms, Lease
from elbowroom.measure.host_memory import loose_memory
from elbowroom.step.slab import Slab

_HANDED_OUT = -1  # in place of a run's number: the values on the host come along


class MovingProgram:
    """Its functions take what the program's take, and hand it the part as last argument."""

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
        self._forms: list[Forms] = []  # of values that were handed out, each once

    @property
    def host_bytes(self) -> int:
        """What the values of one forward take on the host."""
        return self._slab.bytes

    def lease(self) -> Lease:
        """The host's memory for one forward, or for all forwards of a recording."""
        return self._room.lease(self._slab, self._device)

    def forward(self, arguments: list[Any]) -> list[Any]:
        is_packed = saved_tensors_are_packed()
        lease = None
        try:
            lease = self._own_lease() if is_packed else self.lease()
            outputs = with_lease(self._forward, arguments, lease)
            saved = self._handed_out(lease) if is_packed else [self._ticket(lease)]
        except BaseException as failure:
            let_go_of_values(failure)
            del lease  # whoever looks at the failure must not keep its part from others
            raise
        return [*outputs[: self._results], *saved, *outputs[self._results :]]

    def backward(self, arguments: list[Any], run: Callable[[list[Any]], list[Any]]) -> list[Any]:
        number, forms = arguments[0].tolist()
        if number == _HANDED_OUT:
            lease: Lease | None = Lease(arguments[1], self._slab, lanes_of(self._device), None, self._forms[forms])
            del arguments[:2]
        else:
            lease = self._leases.get(number)  # before the ticket goes, and with it what is held
            del arguments[0]
        if lease is None:
            raise ElbowroomError("what this backward has on the host is gone; call the fitted model again")
        try:
            return with_lease(run, arguments, lease)
        except BaseException as failure:
            let_go_of_values(failure)
            del lease
            raise

    def _ticket(self, lease: Lease) -> torch.Tensor:
        if is_recorded(self._device):
            lease.join()  # forward and backward may be recorded apart, and neither can wait for the other's copies
        self._runs += 1
        self._leases[self._runs] = lease
        return self._tickets.issue(self._runs, 0, held=lease)

    # --- where hooks put away what is saved ---

    def _own_lease(self) -> Lease:
        return Lease(loose_memory(self._slab.bytes), self._slab, lanes_of(self._device), None)

    def _handed_out(self, lease: Lease) -> list[torch.Tensor]:
        """Hooks read it on the host: it has to be there now."""
        lease.join()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if lease.forms not in self._forms:
            self._forms.append(lease.forms)
        return [torch.tensor((_HANDED_OUT, self._forms.index(lease.forms))), lease.memory]


def with_lease(function: Callable[[list[Any]], list[Any]], arguments: list[Any], lease: Lease) -> list[Any]:
    """Run a program that moves values with its part of the host's memory."""
    arguments.append(lease)
    try:
        return function(arguments)
    except BaseException:
        arguments.clear()
        lease.abandon()
        del lease
        raise
