"""Finds what a trace leaves out: modules it cannot see through, and autograd nodes outside its graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


class UnseenHooks:
    """Looks for hooks that tracing does not see, again only when some hook was registered somewhere since."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._registered, self._found = -1, ""

    def found(self) -> str:
        """A backward hook, with which PyTorch runs models as they are without a word, or one of all modules."""
        if self._found or RemovableHandle.next_id != self._registered:
            self._registered = RemovableHandle.next_id
            hooked = backward_hook_in(self._model)
            self._found = f"{hooked}; remove it, or pass stages=[…]" if hooked else hook_of_all_modules()
        return self._found


def hooked_modules(model: nn.Module) -> list[str]:
    """Modules with backward hooks: PyTorch runs those models eagerly, without a word."""
    return [
        name or type(model).__name__
        for name, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    ]


def backward_hook_in(model: nn.Module) -> str:
    """Which module has a backward hook, in words; empty if none has."""
    hooked = hooked_modules(model)
    return f"module {hooked[0]!r} has a backward hook, which tracing does not see" if hooked else ""


def hook_of_all_modules() -> str:
    """Whether something is to happen whenever any module is called, in words; empty if not."""
    everywhere = torch.nn.modules.module
    hooks: tuple[Any, ...] = (
        everywhere._global_forward_hooks,
        everywhere._global_forward_pre_hooks,
        everywhere._global_backward_hooks,
        everywhere._global_backward_pre_hooks,
    )
    return "a hook is registered for all modules, which tracing does not see; remove it" if any(hooks) else ""


def unplanned_nodes(model: nn.Module, outputs: Any) -> str:
    """What eager autograd nodes behind the outputs keep, and of which modules; empty if they keep nothing."""
    waiting = [leaf.grad_fn for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    names: dict[Any, str] = {parameter: name.rpartition(".")[0] for name, parameter in model.named_parameters()}
    seen: set[Any] = set()
    kept: dict[str, int] = {}
    modules: dict[str, None] = {}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = [after for after, _ in node.next_functions if after is not None]
        waiting.extend(following)
        if size := _saved_bytes(node):
            kept[node.name()] = kept.get(node.name(), 0) + size
            leaves = [getattr(after, "variable", None) for after in following]
            modules.update(dict.fromkeys(names[leaf] for leaf in leaves if leaf in names))
    if not kept:
        return ""
    largest = sorted(kept.items(), key=lambda entry: -entry[1])[:3]
    what = ", ".join(f"{name} keeps {size} bytes" for name, size in largest)
    return f"{what}; of modules {', '.join(list(modules)[:3])}" if modules else what


def _saved_bytes(node: Any) -> int:
    if "CompiledFunction" in node.name() or "AccumulateGrad" in node.name():
        return 0
    total = 0
    for name in dir(node):
        if name.startswith("_saved_"):
            tensors = [leaf for leaf in tree_leaves(getattr(node, name, None)) if isinstance(leaf, torch.Tensor)]
            total += sum(t.numel() * t.element_size() for t in tensors if not isinstance(t, nn.Parameter))
    return total
