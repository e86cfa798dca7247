"""A graph: computations with dependencies, and the bytes that each leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from elbowroom.errors import InputError
from elbowroom.problem.validation import (
    Json,
    Prefix,
    as_count,
    as_list,
    as_object,
    as_size,
    as_text,
    as_time,
    assign,
)
from elbowroom.units import MAX_BYTES


@dataclass(frozen=True, slots=True)
class Node:
    """One computation of a graph and the value it leaves."""

    name: str
    time: float
    bytes: int

    def __post_init__(self) -> None:
        assign(self, "name", as_text(self.name, "name"))
        assign(self, "time", as_time(self.time, "time"))
        assign(self, "bytes", as_size(self.bytes, "bytes"))


@dataclass(frozen=True)
class Graph:
    """Computations with dependencies: `edges` holds (producer, consumer) pairs of node positions from 0."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        assign(self, "nodes", tuple(self.nodes))
        if not self.nodes:
            raise InputError("nodes", "is empty")
        edges = tuple(self._edge(pair, f"edges[{i}]") for i, pair in enumerate(as_list(self.edges, "edges")))
        assign(self, "edges", edges)
        if len(set(edges)) != len(edges):
            seen: set[tuple[int, int]] = set()
            twice = next(i for i, edge in enumerate(edges) if edge in seen or seen.add(edge))  # type: ignore[func-returns-value]
            raise InputError(f"edges[{twice}]", f"{list(edges[twice])} is given twice")
        if sum(node.bytes for node in self.nodes) * 4 > MAX_BYTES:
            raise InputError("nodes", "sizes add up to more than a plan can hold (2^58 bytes)")
        if len(self.order) < len(self.nodes):
            stuck = min(set(range(len(self.nodes))) - set(self.order))
            raise InputError("edges", f"form a cycle through node {stuck}")

    def _edge(self, pair: Any, field: str) -> tuple[int, int]:
        pair = as_list(pair, field)
        if len(pair) != 2:
            raise InputError(field, f"must be a [producer, consumer] pair, got {len(pair)} entries")
        source, target = (as_count(end, f"{field}[{i}]") for i, end in enumerate(pair))
        for i, end in enumerate((source, target)):
            if end >= len(self.nodes):
                raise InputError(f"{field}[{i}]", f"names node {end}, but there are {len(self.nodes)} nodes")
        if source == target:
            raise InputError(field, f"joins node {source} to itself")
        return source, target

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.nodes]
        for source, target in self.edges:
            found[target].append(source)
        return tuple(map(tuple, found))

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.nodes]
        for source, target in self.edges:
            found[source].append(target)
        return tuple(map(tuple, found))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The nodes in a topological order (shorter than `nodes` only while a cycle is being refused)."""
        waiting = [len(p) for p in self.predecessors]
        ready = [v for v in range(len(self.nodes) - 1, -1, -1) if waiting[v] == 0]
        order = []
        while ready:
            v = ready.pop()
            order.append(v)
            for w in reversed(self.successors[v]):
                waiting[w] -= 1
                if waiting[w] == 0:
                    ready.append(w)
        return tuple(order)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Graph:
        data = as_object(data, allowed=("kind", "nodes", "edges"), required=("nodes", "edges"))
        nodes = []
        for i, item in enumerate(as_list(data["nodes"], "nodes")):
            with Prefix(f"nodes[{i}]"):
                item = as_object(item, allowed=("name", "time", "bytes"), required=("time", "bytes"))
                nodes.append(Node(item.get("name", ""), item["time"], item["bytes"]))
        return cls(tuple(nodes), data["edges"])

    def to_json(self) -> Json:
        nodes = [{"name": v.name, "time": v.time, "bytes": v.bytes} for v in self.nodes]
        return {"kind": "graph", "nodes": nodes, "edges": [list(edge) for edge in self.edges]}
