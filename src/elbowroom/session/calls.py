"""One call of a model: what makes it another step, and how it is shown to people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves


def call_key(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What usually makes a step another one: shapes, other arguments, training mode, autocast."""
    leaves, structure = tree_flatten((args, dict(kwargs)))
    autocast = tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in ("cpu", "cuda")
    )
    return tuple(map(_leaf_key, leaves)), structure, model.training, autocast


def shown_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """`float32[8, 3, 224, 224], int64[8]`."""
    tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    if type(leaf) in (int, float):
        return type(leaf)  # numbers that change are inputs of the graph
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return type(leaf), leaf
