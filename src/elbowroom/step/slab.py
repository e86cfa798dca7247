"""Where on the host the values of a program lie: one piece of memory, cut once for all steps.

Every value that moves has a place of its own. What goes in the forward comes back in the backward, so that all of
them are on the host at the moment between the two, and sharing places would save nothing. A place that nobody else
writes to also keeps its value for a second backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elbowroom.step.graph import StepGraph
from elbowroom.step.operations import Offload
from elbowroom.step.program import Program


@dataclass(frozen=True)
class Slab:
    """For each value that moves its first byte and how many it has; `bytes` in all."""

    places: Mapping[int, tuple[int, int]]
    bytes: int


def slab_of(graph: StepGraph, program: Program) -> Slab:
    """The places of a program's values, in the order in which they first leave."""
    places: dict[int, tuple[int, int]] = {}
    end = 0
    for move in program.moves:
        if isinstance(move, Offload) and move.value not in places:
            size = graph.value_bytes(move.value)
            places[move.value] = end, size
            end += size
    return Slab(places, end)
