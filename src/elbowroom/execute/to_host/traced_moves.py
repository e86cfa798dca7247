"""The four moves as PyTorch operators, so that a compiler can have them among its kernels.

What they act on is the lease in force (`lease.py`). All of them write to a *clock*, a tensor that nobody reads: so
the compiler keeps their order, and leaves out none. `release` reads the value, which therefore is there until then.
`prefetch` takes memory that only the lease knows, and `arrive` hands it over: nothing can be read before it is there.

A compiler lays out values as it likes. So these copy elements, in the layout that the graph was written for, and not
whatever storage they lie in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from elbowroom.errors import ElbowroomError
from elbowroom.execute.to_host.lease import Lease

_in_force: ContextVar[Lease | None] = ContextVar("_in_force", default=None)

_LIBRARY = torch.library.Library("elbowroom", "DEF")
_LIBRARY.define("offload(Tensor value, Tensor(a!) clock, int number, int[] stride) -> ()")
_LIBRARY.define("release(Tensor value, Tensor(a!) clock, int number) -> ()")
_LIBRARY.define("prefetch(Tensor(a!) clock, int number) -> ()")
_LIBRARY.define(
    "arrive(Tensor(a!) clock, int number, int[] size, int[] stride, ScalarType dtype, Device device) -> Tensor"
)

offload = torch.ops.elbowroom.offload.default
release = torch.ops.elbowroom.release.default
prefetch = torch.ops.elbowroom.prefetch.default
arrive = torch.ops.elbowroom.arrive.default


@contextmanager
def in_force(lease: Lease) -> Iterator[None]:
    """Inside, the operators act on this lease."""
    token = _in_force.set(lease)
    try:
        yield
    finally:
        _in_force.reset(token)


def _lease() -> Lease:
    lease = _in_force.get()
    if lease is None:
        raise ElbowroomError("a compiled program moves values, and nobody has given it memory on the host")
    return lease


def _offload(value: torch.Tensor, clock: torch.Tensor, number: int, stride: Sequence[int]) -> None:
    _lease().offload_elements(number, value, stride)


def _release(value: torch.Tensor, clock: torch.Tensor, number: int) -> None:
    _lease().release(number)


def _prefetch(clock: torch.Tensor, number: int) -> None:
    _lease().prefetch_unseen(number)


def _arrive(clock: torch.Tensor, number: int, *form: object) -> torch.Tensor:
    """`form` is what a trace makes of it; the lease knows what it has."""
    return _lease().arrived(number)


def _traced_arrive(
    clock: torch.Tensor,
    number: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _traced_as_nothing(*arguments: object) -> None:
    """While a graph is traced, nothing is copied."""


for _name, _moves, _is_traced_as in (
    ("offload", _offload, _traced_as_nothing),
    ("release", _release, _traced_as_nothing),
    ("prefetch", _prefetch, _traced_as_nothing),
    ("arrive", _arrive, _traced_arrive),
):
    _LIBRARY.impl(_name, _moves, "CompositeExplicitAutograd")
    torch.library.register_fake(f"elbowroom::{_name}", _is_traced_as, lib=_LIBRARY)
