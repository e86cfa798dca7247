"""Tells a graph's backward which gradients do not arrive: those of results that a loss does not use.

AOT autograd makes one node of a graph, and has autograd put zeros where no gradient arrives. A parameter that only
unused results need would get zeros then, where plain execution leaves None. So the node is told to put None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves

# Which of the outputs to begin at, and which way to go from each node of autograd's graph to get to that of AOT.
_Way: TypeAlias = tuple[int, tuple[int, ...]]


def absent_gradients_shown(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A graph compiled by AOT autograd, whose backward gets None for gradients that do not arrive."""
    ways: list[_Way] = []  # one is enough, and as good for every call: it follows from which outputs are views

    @wraps(compiled)
    def run(*args: Any) -> Any:
        if ways:
            outputs = compiled(*args)
        else:
            given = {value.grad_fn for value in tree_leaves(args) if isinstance(value, torch.Tensor)}
            outputs = compiled(*args)
            ways.extend(list(_ways(outputs, given))[:1])
        for place, turns in ways:
            node = outputs[place].grad_fn
            for turn in turns:
                node = node.next_functions[turn][0]
            node.set_materialize_grads(False)
        return outputs

    return run


def _ways(outputs: Sequence[Any], given: set[Any]) -> Iterator[_Way]:
    """Every way from an output to the graph's node, the shortest first. Beyond what was given, other graphs begin."""
    found: list[tuple[Any, _Way]] = [
        (v.grad_fn, (n, ())) for n, v in enumerate(outputs) if isinstance(v, torch.Tensor)
    ]
    seen = {None, *given}
    while found:
        further = []
        for node, (place, turns) in found:
            if node in seen:
                continue
            seen.add(node)
            if hasattr(node, "set_materialize_grads"):
                yield place, turns
            else:
                nexts = enumerate(node.next_functions)
                further += [(next_node, (place, (*turns, n))) for n, (next_node, _) in nexts]
        found = further
