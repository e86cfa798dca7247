"""The values of one run that may be on the host: saved sets, and activations on their own.

A saved set lies in autograd's graph. While a stage saves, every tensor that autograd would keep is packed: instead of
it the graph holds a number, and whoever reads it asks here. So a tensor that nobody else holds can leave.

What never leaves: parameters, buffers, tensors that modules keep, the caller's input and output, and whatever shares
a storage with one of these. A storage that several values have a part in leaves with the last of them. What hooks of
saved tensors do not see, such as attributes that an `autograd.Function` sets on its context, stays (`staying.py`
counts it).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from elbowroom.execute.by_stages.moving_storage import Held, Host, MovingStorage, Packed, address
from elbowroom.execute.by_stages.stage_step import Activation
from elbowroom.execute.by_stages.waiting import Key
from elbowroom.execute.to_host.lanes import Wait
from elbowroom.execute.to_host.lease import wait_for

# A copy of fewer bytes on a GPU's link takes as long as its beginning, and the values are many: statistics of batch
# normalization, seeds. They stay.
_LEAST_BYTES = {"cuda": 64 << 10}


class MovingValues:
    """Moves values by key. `fixed` are tensors that stay; nothing moves without a `host`."""

    def __init__(self, device: torch.device, fixed: Iterable[Tensor], host: Host | None = None) -> None:
        self._device, self._host = device, host
        self._fixed = {address(tensor) for tensor in fixed if _is_plain(tensor)}
        self._here: WeakValueDictionary[int, MovingStorage] = WeakValueDictionary()  # by address
        self._parts: dict[Key, list[MovingStorage]] = {}
        self._activations: dict[Key, tuple[Activation, list[Any]]] = {}  # without its tensors, and these
        self._new: list[MovingStorage] = []  # packed, and a part of no value yet
        self._leaving: set[Key] = set()
        self._kept: set[Key] = set()  # values whose copy on the host stays when they come back
        # Whatever is on its way is held here: no memory goes while a copy reads or writes it.
        self._under_way: dict[MovingStorage, list[Wait]] = {}
        weakref.finalize(self, _finish, self._under_way).atexit = False

    # --- what there is ---

    @contextmanager
    def packing(self) -> Iterator[None]:
        """Pack what autograd saves; the next value that is held has a part in it."""
        self._new = []
        with saved_tensors_hooks(self._pack, _unpacked):  # autograd keeps both functions, so they refer to no tensor
            yield

    def hold(self, key: Key, activation: Activation) -> None:
        """A value that has been made: an activation, and with it what has just been packed."""
        leaves = [self._packed(leaf) or leaf for leaf in activation.leaves]
        saved, self._new = self._new, []
        parts = dict.fromkeys([*saved, *(leaf.storage for leaf in leaves if isinstance(leaf, Packed))])
        self._parts[key] = list(parts)
        self._activations[key] = _without_tensors(activation), leaves
        for storage in parts:
            storage.users.add(key)
            storage.present.add(key)

    def stay(self, key: Key) -> None:
        """The activation of a value is the caller's, too."""
        for leaf in self._activations[key][1]:
            if isinstance(leaf, Packed):
                leaf.storage.stays = True

    def drop(self, key: Key) -> None:
        """Nobody needs a value any more, except for what autograd's graph has of it."""
        self._activations.pop(key, None)
        self._leaving.discard(key)
        for storage in self._parts.pop(key, ()):
            storage.users.discard(key)
            storage.present.discard(key)
            storage.leaving.discard(key)
            if storage.users and not storage.present and storage.is_here and storage.copy is not None:
                self._forget(storage)

    def is_leaving(self, key: Key) -> bool:
        return key in self._leaving

    def activation(self, key: Key) -> Activation:
        """Of a value that is back."""
        activation, leaves = self._activations[key]
        tensors = tuple(leaf.tensor if isinstance(leaf, Packed) else leaf for leaf in leaves)
        return Activation(tensors, activation.spec, activation.needs)

    # --- the four operations ---

    def offload(self, key: Key) -> None:
        self._leaving.add(key)
        for storage in self._parts[key]:
            storage.leaving.add(key)
            free = storage.is_here and not storage.stays and storage.copy is None
            if free and storage.present <= storage.leaving and self._host is not None:
                self._under_way[storage] = storage.leave(self._host)

    def release(self, key: Key) -> None:
        self._leaving.discard(key)
        for storage in self._parts[key]:
            self._wait(storage)
            storage.leaving.discard(key)
            storage.present.discard(key)
            if not storage.present and storage.is_here and storage.copy is not None:
                self._forget(storage)

    def prefetch(self, key: Key, *, keep: bool) -> None:
        """`keep`: the copy on the host stays."""
        self._kept = self._kept | {key} if keep else self._kept - {key}
        for storage in self._parts[key]:
            storage.present.add(key)
            if not storage.is_here:
                self._under_way[storage] = storage.come()
                self._here[storage.address] = storage

    def arrive(self, key: Key) -> None:
        for storage in self._parts[key]:
            self._wait(storage)
            if key not in self._kept and storage.users <= storage.present:
                storage.copy = None

    def forget(self, key: Key) -> None:
        """Let a value go that nobody will read, to see what stays of it."""
        for storage in self._parts[key]:
            if storage.is_here:
                self._forget(storage)
        self.drop(key)

    def abandon(self) -> None:
        """The run has failed. Directions are asked and not single copies: an interrupt may have come before a copy
        was noted here."""
        for lane in self._host.lanes if self._host is not None else ():
            lane.finish()
        self.finish()

    def finish(self) -> None:
        """Nothing moves any more: wait for what is on its way, and let go of everything."""
        _finish(self._under_way)
        self._parts.clear()
        self._activations.clear()
        self._host = None

    # --- helpers ---

    def _pack(self, tensor: Tensor) -> Packed | Held:
        packed = self._packed(tensor)
        if packed is None:
            return Held(tensor.detach(), tensor._version)
        if not packed.storage.users:
            self._new.append(packed.storage)
        return packed

    def _packed(self, value: Any) -> Packed | None:
        """In place of a tensor that may move."""
        if not _is_plain(value) or value.device != self._device or address(value) in self._fixed:
            return None
        if value.untyped_storage().nbytes() < _LEAST_BYTES.get(value.device.type, 0):
            return None
        storage = self._here.get(address(value)) or MovingStorage()
        packed = storage.add(value)
        self._here[storage.address] = storage
        return packed

    def _forget(self, storage: MovingStorage) -> None:
        self._here.pop(storage.address, None)
        storage.forget()

    def _wait(self, storage: MovingStorage) -> None:
        for wait in self._under_way.get(storage, ()):
            wait_for(wait)
        self._under_way.pop(storage, None)


def _unpacked(packed: Packed | Held) -> Tensor:
    return packed.tensor


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor, and nothing but bytes in a storage."""
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.is_quantized:
        return False
    return not value.is_inference() and value.untyped_storage().nbytes() > 0


def _without_tensors(activation: Activation) -> Activation:
    leaves: Sequence[Any] = [None if isinstance(leaf, Tensor) else leaf for leaf in activation.leaves]
    return Activation(tuple(leaves), activation.spec, activation.needs)


def _finish(under_way: dict[MovingStorage, list[Wait]]) -> None:
    """Wait for every copy, whatever became of it, before its memory goes."""
    while under_way:
        storage = next(iter(under_way))
        for wait in under_way[storage]:
            with suppress(Exception):
                wait()
        del under_way[storage]
