"""What a traced node's value is: its tensors and their bytes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    return tensors_in(node.meta.get("val"))


def is_view(node: fx.Node) -> bool:
    """Whether a node shows memory of what it reads, or a part of a tuple."""
    if node.target in (operator.getitem, torch.ops.aten._unsafe_view.default):
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(value.alias_info is not None for value in schema.returns)


def evaluated(
    target: Any, args: Any, kwargs: Any, mode: Any, value_of: Callable[[fx.Node], Any] = lambda read: read.meta["val"]
) -> Any:
    """What an operator makes of the traced values that it reads."""
    args, kwargs = fx.map_arg((args, kwargs), value_of)
    with mode, torch.no_grad():
        return target(*args, **kwargs)


def tensor_bytes(node: fx.Node) -> int:
    """Bytes of a node's elements, which a kernel reads or writes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(node))
