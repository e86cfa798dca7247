"""What the user asked for, and what both roads make of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils._triton import has_triton

from elbowroom.errors import InputError, Unplanned, first_line
from elbowroom.plans import Plan
from elbowroom.units import format_bytes

MARGIN = 1024  # bytes left free: scalars that autograd and Python make around a step
# The CUDA allocator does not split off the last MiB of a block it reuses: on the H200 up to 0.6 % of the activations.
CUDA_MARGIN, CUDA_MARGIN_SHARE = 8 * 2**20, 0.0075


@dataclass(frozen=True)
class Settings:
    """What the user asked for. `forwards` is how many forwards wait for one backward.

    `kernels` are PyTorch's own ("torch"), or Inductor's; then at most `compilations` plans are tried for a budget,
    and `cuda_graphs` says whether they may be replayed as such. With `accumulates`, gradients of earlier backwards
    are there when a step begins; else that is found out when it happens.
    """

    budget_bytes: int
    optimizer: torch.optim.Optimizer | None = None
    loss_inside: bool = False
    strict: bool = False
    max_shapes: int = 8
    forwards: int = 1
    estimate: bool = False
    plan: Plan | None = None
    kernels: str = "torch"
    compilations: int = 3
    cuda_graphs: bool = True
    accumulates: bool = False


def choose_kernels(wish: str, tensors: Iterable[Any], field: str = "kernels") -> str:
    """PyTorch's or Inductor's. By default fused ones where they are known to pay: on a GPU with a compiler for it."""
    if wish not in ("auto", "torch", "inductor"):
        raise InputError(field, f'must be "auto", "torch" or "inductor", not {wish!r}')
    if wish != "auto":
        return wish
    on_gpu = any(isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda" for tensor in tensors)
    return "inductor" if on_gpu and has_triton() else "torch"


def room_within(budget: int, resident: Mapping[str, int], device: torch.device, *, is_measured: bool = False) -> int:
    """Bytes that may be planned with. A peak that is measured has the allocator's share in it already."""
    room = budget - sum(resident.values()) - MARGIN
    share = 0 if is_measured else int(room * CUDA_MARGIN_SHARE)
    return room - max(CUDA_MARGIN, share) if device.type == "cuda" else room


def budget_for(peak: int, resident: Mapping[str, int], device: torch.device) -> int:
    """The least budget that leaves so much room."""
    margin = max(CUDA_MARGIN, int(peak * CUDA_MARGIN_SHARE / (1 - CUDA_MARGIN_SHARE)) + 1)
    return sum(resident.values()) + peak + MARGIN + (margin if device.type == "cuda" else 0)


def say_unplanned(model: nn.Module, settings: Settings, why: str, said: set[str]) -> None:
    """Part of a model runs outside the plan: an error if that is forbidden, else a warning, once for each reason."""
    message = (
        f"elbowroom: {type(model).__name__} is not planned, so its budget of "
        f"{format_bytes(settings.budget_bytes)} is not kept: {why}"
    )
    if settings.strict:
        raise Unplanned(message)
    if why not in said:
        said.add(why)
        warnings.warn(message, stacklevel=5)


def say_fallback(what: str, why: str, said: set[str]) -> None:
    """Fused kernels could not serve: say so once for each reason. The budget is kept all the same."""
    if why not in said:
        said.add(why)
        warnings.warn(
            f"elbowroom: {what} runs with PyTorch's own kernels, within its budget but slower: {why}", stacklevel=6
        )


def compiling_failed(failure: Exception) -> str:
    failure = getattr(failure, "inner_exception", failure)  # Dynamo's own report says only which backend it was
    kind = "" if isinstance(failure, RuntimeError) else f"{type(failure).__name__}: "
    return f"compiling it failed: {kind}{first_line(failure)}"


def call_key(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What usually makes a step another one: shapes, other arguments, training mode, autocast."""
    leaves, structure = tree_flatten((args, dict(kwargs)))
    autocast = tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in ("cpu", "cuda")
    )
    return tuple(map(_leaf_key, leaves)), structure, model.training, autocast


def shown(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """`float32[8, 3, 224, 224], int64[8]`."""
    tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return type(leaf), leaf
