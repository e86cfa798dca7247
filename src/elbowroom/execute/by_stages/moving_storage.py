"""One storage of values that may leave the device, with all tensors in it that stages and autograd keep.

Who keeps such a tensor has it by a number (`Packed`) and asks for it when it is read. So the storage leaves whole,
and once; when it is back, its tensors lie in other memory, with the same bytes at the same places.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from elbowroom.execute.by_stages.host_space import HostSpace
from elbowroom.execute.by_stages.waiting import Key
from elbowroom.execute.to_host.lanes import Lanes, Wait
from elbowroom.execute.to_host.lease import Form, begun, bytes_behind, wait_for


@dataclass(frozen=True)
class Host:
    """Where values go, and how."""

    space: HostSpace
    lanes: Lanes


class HostCopy:
    """A storage's bytes on the host. Their room is free again when nobody refers to this."""

    def __init__(self, host: Host, stretches: tuple[range, ...]) -> None:
        self._host, self._stretches = host, stretches
        weakref.finalize(self, host.space.give, stretches).atexit = False

    def fill(self, memory: Tensor) -> list[Wait]:
        """Begin to copy memory there."""
        return [begun(self._host.lanes.to_host, there, here) for there, here in self._pieces(memory)]

    def read(self, memory: Tensor) -> list[Wait]:
        """Begin to copy from there."""
        return [begun(self._host.lanes.from_host, here, there) for there, here in self._pieces(memory)]

    def _pieces(self, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        done = 0
        for stretch in self._stretches:
            yield self._host.space.at(stretch), memory[done : done + len(stretch)]
            done += len(stretch)


class MovingStorage:
    """A storage on the device, on the host, or on its way. `users` are the values that it is a part of, wherever they
    are; `present` those of them that are on the device, and `leaving` those of these that are to leave it."""

    def __init__(self) -> None:
        self.users: set[Key] = set()
        self.present: set[Key] = set()
        self.leaving: set[Key] = set()
        self.stays = False  # somebody else has it, too
        self.copy: HostCopy | None = None
        self._tensors: list[Tensor] | None = []
        self._versions: list[int] = []
        self._forms: list[Form] = []
        self._changed: set[int] = set()  # tensors that somebody wrote to after they were kept

    @property
    def is_here(self) -> bool:
        return self._tensors is not None

    @property
    def address(self) -> int:
        """Tells storages on the device apart."""
        assert self._tensors
        return address(self._tensors[0])

    def add(self, tensor: Tensor) -> Packed:
        """Keep a tensor that lies in this storage."""
        assert self._tensors is not None
        self._tensors.append(tensor.detach())  # an output of autograd's would keep its graph, and with it itself
        self._versions.append(tensor._version)
        return Packed(self, len(self._versions) - 1)

    def tensor(self, number: int) -> Tensor:
        if self._tensors is None:  # no plan has it read while it is away; if it is, its bits still count
            for wait in self.come():
                wait_for(wait)
        assert self._tensors is not None
        tensor = self._tensors[number]
        if number in self._changed or tensor._version != self._versions[number]:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {list(tensor.shape)}, written to after a stage saved it"
            )
        return tensor

    def leave(self, host: Host) -> list[Wait]:
        """Begin to copy it to the host, if there is room; its memory here goes with `forget`."""
        assert self._tensors
        stretches = host.space.take(self._tensors[0].untyped_storage().nbytes())
        if stretches is None:
            return []
        self.copy = HostCopy(host, stretches)
        return self.copy.fill(bytes_behind(self._tensors[0]))

    def forget(self) -> None:
        """Keep what the tensors look like, and nothing of what is in them."""
        assert self._tensors is not None
        pairs = enumerate(zip(self._tensors, self._versions, strict=True))
        self._changed |= {number for number, (tensor, version) in pairs if tensor._version != version}
        self._forms = [Form.of(tensor) for tensor in self._tensors]
        self._tensors = None

    def come(self) -> list[Wait]:
        """Take memory and begin to copy it back."""
        assert self.copy is not None
        form = self._forms[0]
        memory = torch.empty(form.bytes, dtype=torch.uint8, device=form.device)
        waits = self.copy.read(memory)
        self._tensors = [each.over(memory) for each in self._forms]
        self._versions = [tensor._version for tensor in self._tensors]
        return waits


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor that may be away."""

    storage: MovingStorage
    number: int

    @property
    def tensor(self) -> Tensor:
        return self.storage.tensor(self.number)


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that stays where it is: a parameter, or something of the caller's."""

    kept: Tensor
    version: int

    @property
    def tensor(self) -> Tensor:
        if self.kept._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {list(self.kept.shape)} is at version {self.kept._version}, and {self.version} "
                "is needed"
            )
        return self.kept


def address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
