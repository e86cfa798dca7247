"""What a traced node's value is: its tensors and their bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    return tensors_in(node.meta.get("val"))


def tensor_bytes(node: fx.Node) -> int:
    """Bytes of a node's elements, which a kernel reads or writes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(node))
