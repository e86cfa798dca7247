"""What PyTorch's allocators do with a request: the one place that knows their sizes.

The CPU's takes what is asked. CUDA's rounds up to blocks of 512 bytes; storages of 10 MiB and more get segments of
whole 2 MiB, and a rest of at most 1 MiB is not split off but counts as allocated with the block. Requests of at most
1 MiB live in segments of their own. A recording's memory grows by 2 MiB for small requests and by 20 MiB for others.
"""

from __future__ import annotations

from collections.abc import Callable

MIB = 2**20
BLOCK = 512  # bytes: sizes are rounded up to whole blocks
SMALL = MIB  # requests of at most this many bytes have segments of their own
SMALL_GROWTH, LARGE_GROWTH = 2 * MIB, 20 * MIB  # by how much memory in one piece grows, for small requests and others
_OWN_SEGMENT, _SEGMENT, _KEPT_REST = 10 * MIB, 2 * MIB, MIB

MARGIN = 1024  # bytes left free in any budget: scalars that autograd and Python make around a step
# What CUDA's allocator does not split off of blocks that it uses again: on an H200 up to 0.6 % of the activations.
CUDA_MARGIN, CUDA_MARGIN_SHARE = 8 * MIB, 0.0075


def allocator_block(cuda: bool) -> Callable[[int], int]:
    """Bytes allocated for bytes asked."""
    return _cuda_block if cuda else _cpu_block


def whole_blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def room_within(budget: int, resident_bytes: int, *, cuda: bool, is_measured: bool = False) -> int:
    """Bytes that may be planned with. A peak that is measured has the allocator's share in it already."""
    room = budget - resident_bytes - MARGIN
    share = 0 if is_measured else int(room * CUDA_MARGIN_SHARE)
    return room - max(CUDA_MARGIN, share) if cuda else room


def budget_for(peak: int, resident_bytes: int, *, cuda: bool) -> int:
    """The least budget that leaves so much room."""
    margin = max(CUDA_MARGIN, int(peak * CUDA_MARGIN_SHARE / (1 - CUDA_MARGIN_SHARE)) + 1)
    return resident_bytes + peak + MARGIN + (margin if cuda else 0)


def _cpu_block(size: int) -> int:
    return size


def _cuda_block(size: int) -> int:
    block = whole_blocks(size)
    segment = -(-size // _SEGMENT) * _SEGMENT
    return segment if size >= _OWN_SEGMENT and segment - block <= _KEPT_REST else block
