"""Adds operators to a traced graph."""

from __future__ import annotations

from typing import Any

from torch import fx


class Writer:
    """Adds operators as if they had been traced with a given one, where the graph is written to."""

    def __init__(self, graph: fx.Graph, like: fx.Node) -> None:
        self.graph = graph
        self.like = like

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        with self.like.meta["val"].fake_mode:
            given, named = fx.map_arg((args, kwargs), lambda read: read.meta["val"])
            node.meta = {**self.like.meta, "val": target(*given, **named)}
        return node
