"""A model's forward as a graph problem, for the methods that plan graphs: one node per operator, without running it.

`torch.export` traces it. Views are no nodes: who reads one reads what it shows. Nodes that no output needs are left
out. A node's bytes are those of its outputs, its time is estimated from arithmetic and traffic unless told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from elbowroom.capture.traced_values import is_view, tensor_bytes
from elbowroom.errors import ElbowroomError, first_line
from elbowroom.measure.estimate import estimated_time
from elbowroom.problem import Graph, Node


def graph_of(
    model: nn.Module, *example: Any, time: Callable[[str], float] | None = None, device: str = "cuda"
) -> Graph:
    """The graph of `model(*example)`. `time` gives a node's time by the name of its operator (`aten.conv2d.default`);
    without it, it is estimated for a device of that kind."""
    try:
        exported = torch.export.export(model, example, strict=False)
    except Exception as failure:
        raise ElbowroomError(f"model: PyTorch cannot export it: {first_line(failure)}") from failure
    shown: dict[fx.Node, set[fx.Node]] = {}  # for each traced node, the graph's nodes that reading it reads
    needed = _needed(exported.graph.output_node())
    chosen = []
    for node in exported.graph.nodes:
        reads = {shows for read in node.all_input_nodes for shows in shown.get(read, ())}
        if node.op != "call_function" or node not in needed:
            shown[node] = set()
        elif is_view(node):
            shown[node] = reads
        else:
            shown[node] = {node}
            chosen.append((node, reads))
    number = {node: n for n, (node, _) in enumerate(chosen)}
    kind = torch.device(device)
    made = [
        Node(node.name, time(str(node.target)) if time else estimated_time(node, kind), tensor_bytes(node))
        for node, _ in chosen
    ]
    edges = [(number[read], number[node]) for node, reads in chosen for read in reads]
    return Graph(tuple(made), tuple(sorted(edges)))


def _needed(output: fx.Node) -> set[fx.Node]:
    found, waiting = {output}, [output]
    while waiting:
        for read in waiting.pop().all_input_nodes:
            if read not in found:
                found.add(read)
                waiting.append(read)
    return found
