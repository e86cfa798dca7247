"""What tests ask of a fitted model: the peak of a step, and the least budget that it can do with."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from elbowroom.errors import BudgetTooSmall
from elbowroom.execute.to_host.host_room import HostRoom
from elbowroom.measure.memory import measure


def set_gradients(model, *, there: bool) -> None:
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if there and p.requires_grad else None


def step_peak(model, batch, *, kept: bool = False) -> int:
    """Peak of one step above the resident state, which has gradients: they come in the step, or were kept."""
    set_gradients(model, there=kept)
    gc.freeze()  # nothing older than the step is freed in it; looking through all of it takes half a second
    with measure("cpu", timeline=False) as measured:
        model(*batch).backward()
    gc.unfreeze()
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in model.parameters() if p.grad is not None)
    return measured.peak_bytes - (0 if kept else gradients)


def least_budget(fitted) -> int:
    with pytest.raises(BudgetTooSmall) as too_small:
        fitted.elbowroom.set_budget(1024)
    return too_small.value.least_budget


@contextmanager
def host_memory_given_back() -> Iterator[None]:
    """Models may live on after the tests inside, in what PyTorch has traced; their memory on the host does not."""
    rooms: list[weakref.ref[HostRoom]] = []
    made = HostRoom.__init__

    def remembered(room: HostRoom) -> None:
        made(room)
        rooms.append(weakref.ref(room))

    HostRoom.__init__ = remembered
    try:
        yield
    finally:
        HostRoom.__init__ = made
        for room in [there for known in rooms if (there := known()) is not None]:
            room.reserve(0, torch.device("cpu"))


def host_room(fitted):
    """Where the values of a fitted model are on the host."""
    return fitted.elbowroom._looker.looks.host_room
