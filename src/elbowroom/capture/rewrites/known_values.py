"""Values in a traced graph that depend on nothing but shapes: masks, places, shares."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes


def constant_value(node: fx.Node) -> Any:
    """What a node computes, if it follows from no input; else None."""
    needed, waiting = set(), [node]
    while waiting:
        each = waiting.pop()
        if each.op != "call_function":
            return None
        if each not in needed:
            needed.add(each)
            waiting.extend(each.all_input_nodes)
    values: dict[fx.Node, Any] = {}
    with _disable_current_modes(), torch.no_grad():
        for each in node.graph.nodes:
            if each in needed:
                args, kwargs = fx.map_arg((each.args, each.kwargs), values.__getitem__)
                values[each] = each.target(*args, **kwargs)  # type: ignore[operator]
    return values[node]
