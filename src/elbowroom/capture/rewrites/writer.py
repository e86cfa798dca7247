"""Adds operators to a traced graph."""

from __future__ import annotations

from typing import Any

from torch import fx

from elbowroom.capture.traced_values import evaluated


class Writer:
    """Adds operators as if they had been traced with a given one, where the graph is written to."""

    def __init__(self, graph: fx.Graph, like: fx.Node) -> None:
        self.graph = graph
        self.like = like

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        value = evaluated(target, args, kwargs, self.like.meta["val"].fake_mode)
        node.meta = {**self.like.meta, "val": value}
        return node
