"""Finds what a trace leaves out: modules it cannot see through, and autograd nodes outside its graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


def hooked_modules(model: nn.Module) -> list[str]:
    """Modules with backward hooks: PyTorch runs those models eagerly, without a word."""
    return [
        name or type(model).__name__
        for name, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    ]


def unplanned_nodes(outputs: Any) -> str:
    """Names and bytes of what eager autograd nodes behind the outputs have saved; empty if there are none."""
    waiting = [leaf.grad_fn for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    seen: set[Any] = set()
    found: dict[str, int] = {}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
        if size := _saved_bytes(node):
            found[node.name()] = found.get(node.name(), 0) + size
    return ", ".join(f"{name} keeps {size} bytes" for name, size in sorted(found.items(), key=lambda i: -i[1])[:3])


def _saved_bytes(node: Any) -> int:
    if "CompiledFunction" in node.name() or "AccumulateGrad" in node.name():
        return 0
    total = 0
    for name in dir(node):
        if name.startswith("_saved_"):
            value = getattr(node, name, None)
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            total += sum(t.numel() * t.element_size() for t in tensors if not isinstance(t, nn.Parameter))
    return total
