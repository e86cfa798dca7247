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


def number_in(value: Any) -> Any:
    """What a number that is an input of the graph was when it was traced, or 1 if it is computed by the graph;
    anything else as it is."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return 1 if value.node.hint is None else value.node.hint
    return value


def known_offset(tensor: torch.Tensor) -> int | None:
    """Where in its storage a tensor begins; None if that depends on a number that may be another in the next step."""
    offset = tensor.storage_offset()
    return None if isinstance(offset, torch.SymInt) else offset


def is_view(node: fx.Node) -> bool:
    """Whether a node shows memory of what it reads, or a part of a tuple. One that writes there shows nothing new."""
    if node.target in (operator.getitem, torch.ops.aten._unsafe_view.default):
        return True
    schema = getattr(node.target, "_schema", None)
    aliases = [] if schema is None else [value.alias_info for value in schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


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
