"""How many bytes the allocator takes for a storage.

The CPU's takes what is asked. CUDA's rounds up to 512 bytes; storages of 10 MiB and more get segments of whole 2 MiB,
and a rest of at most 1 MiB is not split off but counts as allocated with the block.
"""

from __future__ import annotations

from collections.abc import Callable

_ROUND, _OWN_SEGMENT, _SEGMENT, _KEPT_REST = 512, 10 * 2**20, 2 * 2**20, 2**20


def allocator_block(cuda: bool) -> Callable[[int], int]:
    """Bytes allocated for bytes asked."""
    return _cuda_block if cuda else _cpu_block


def _cpu_block(size: int) -> int:
    return size


def _cuda_block(size: int) -> int:
    block = -(-size // _ROUND) * _ROUND
    segment = -(-size // _SEGMENT) * _SEGMENT
    return segment if size >= _OWN_SEGMENT and segment - block <= _KEPT_REST else block
