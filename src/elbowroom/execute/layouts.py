"""How saved tensors lie in memory, for when somebody's hooks put them away and bring them back.

Hooks keep values and shapes, but not always strides: `save_on_cpu` returns a slice of a tensor without its gaps.
Compiled kernels read memory by the strides that they were made for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch


def strides_in(values: Sequence[Any]) -> list[int]:
    """The strides of all tensors among some values, in a row."""
    return [stride for value in values if isinstance(value, torch.Tensor) for stride in value.stride()]


def with_strides(values: Sequence[Any], strides: Sequence[int]) -> list[Any]:
    """The same values with the strides that were theirs; those that have them still are not copied."""
    ahead = iter(strides)
    return [_laid_out(value, ahead) if isinstance(value, torch.Tensor) else value for value in values]


def _laid_out(value: torch.Tensor, ahead: Iterator[int]) -> torch.Tensor:
    strides = tuple(islice(ahead, value.dim()))
    if value.stride() == strides:
        return value
    made = torch.empty_strided(value.size(), strides, dtype=value.dtype, device=value.device)
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)  # nothing is written twice
    made[once].copy_(value[once])
    return made
