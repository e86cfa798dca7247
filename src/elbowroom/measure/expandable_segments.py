"""How PyTorch takes memory from a GPU: in blocks of fixed sizes, which fall apart, or in segments that expand.

What falls apart is held and serves nobody. In blocks, BERT, GPT-2 and VGG-16 on an H200 kept to budgets of 2 to 6 GiB
and yet ran out of memory in training where the process might take 600 MiB more: up to a third was in pieces.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_NAME = "expandable_segments"
_ROOM_FOR_PIECES = 1.5  # times the budget: a third of what was held was in pieces
_VARIABLES = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"  # where users set it
_switched_on: list[torch.device] = []


@contextmanager
def expandable_segments() -> Iterator[None]:
    """What is allocated inside lies in segments that expand."""
    settings = _settings()
    _set(settings, on=True)
    try:
        yield
    finally:
        _set(settings, on=settings[_NAME])


def expand_where_tight(device: torch.device, budget_bytes: int) -> None:
    """Have everything allocated so from now on, where pieces might not leave room for the budget.

    Not where the user has decided on that setting, or where there is no such thing.
    """
    if device.type != "cuda" or sys.platform != "linux" or torch.cuda.get_allocator_backend() != "native":
        return
    if any(_NAME in os.environ.get(variable, "") for variable in _VARIABLES):
        return
    settings = _settings()
    if not settings[_NAME] and _may_take(device) < _ROOM_FOR_PIECES * budget_bytes:
        _set(settings, on=True)
        _switched_on.append(device)


def was_switched_on() -> bool:
    """Whether that has happened in this process."""
    return bool(_switched_on)


def _may_take(device: torch.device) -> int:
    """Bytes that this process can have of a GPU, with what it has."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total
    return int(min(allowed, free + torch.cuda.memory_reserved(device)))


def _settings() -> dict[str, Any]:
    return dict(torch.cuda.memory._snapshot()["allocator_settings"])


def _set(settings: dict[str, Any], *, on: bool) -> None:
    """What is set replaces all that was set before."""
    others = [part for part in settings["PYTORCH_CUDA_ALLOC_CONF"].split(",") if part and _NAME not in part]
    torch._C._accelerator_setAllocatorSettings(",".join([*others, f"{_NAME}:{on}"]))
