"""`chen`: segments between nodes that alone join the graph's two sides, cut when they grow too large.

Chen et al.'s planning with a budget, as 002 App. B makes it precise: nodes in depth-first topological order,
candidates for a cut are the articulation points, and a segment ends at the first candidate after it has reached a
certain size. Every size is tried: of the schedules that fit, the fastest is taken.
"""

from __future__ import annotations

from functools import lru_cache
from typing import final

import networkx

from elbowroom.problem import Graph, Problem
from elbowroom.schedule import Simulation, simulate
from elbowroom.solve.lower_set_table import Mask, live_schedule, members
from elbowroom.solve.method import Found, Method, Options, Status


@final
class Chen(Method):
    name = "chen"
    kinds = ("graph",)
    summary = "segments cut at articulation points, all of about one size; a baseline for lower-sets"
    exact = False

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Graph)
        return min(simulation.peak_bytes for _, simulation in _segmentations(problem))

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Graph)
        fitting = [pair for pair in _segmentations(problem) if pair[1].peak_bytes <= budget]
        masks, simulation = min(fitting, key=lambda pair: pair[1].time)
        notes = {"lower_sets": [members(mask) for mask in masks]}
        return Found(tuple(simulation.schedule), Status.HEURISTIC, simulation.time, notes)


@lru_cache(maxsize=2)
def _segmentations(graph: Graph) -> list[tuple[tuple[Mask, ...], Simulation]]:
    """All that differ, from one segment on, with what their schedules take."""
    undirected = networkx.Graph(graph.edges)
    cuts = set(networkx.articulation_points(undirected))
    found: dict[tuple[Mask, ...], Simulation] = {}
    size = sum(node.bytes for node in graph.nodes)
    while True:
        masks, largest = _cut(graph, cuts, size)
        if masks not in found:
            found[masks] = simulate(graph, live_schedule(graph, masks))
        if size == 0:
            return list(found.items())
        size = max(0, min(size, largest) - 1)  # the next smaller one that cuts elsewhere


def _cut(graph: Graph, cuts: set[int], size: int) -> tuple[tuple[Mask, ...], int]:
    """Cut after each candidate that makes a segment larger than `size`; and the largest segment that was left whole.

    With sizes from there down to that segment's, less one, the cuts are the same.
    """
    masks: list[Mask] = []
    mask = held = largest = 0
    for v in graph.order:
        mask |= 1 << v
        held += graph.nodes[v].bytes
        if v not in cuts:
            continue
        if held > size:
            masks.append(mask)
            held = 0
        else:
            largest = max(largest, held)
    if not masks or masks[-1] != mask:
        masks.append(mask)
    return tuple(masks), largest
