"""Values on the host and on their way, as the referee sees them: what may move, and how many bytes lie there.

A value has a place of its own on the host, from its first copy on until the step ends: see `step/slab.py`.
"""

from __future__ import annotations

from collections.abc import Collection

from elbowroom.problem.platform import Platform
from elbowroom.step.graph import StepGraph
from elbowroom.step.operations import Await, Move, Offload, Prefetch, Release
from elbowroom.step.storages import Memory


class Host:
    """Values on the host, and on their way."""

    def __init__(self, graph: StepGraph, memory: Memory, platform: Platform | None) -> None:
        self.graph, self.memory, self.platform = graph, memory, platform
        self.bytes = 0  # of all places taken so far
        self.there: set[int] = set()  # a copy of these values is on the host, or will be once it has left the device
        self.leaving: set[int] = set()  # being copied to the host; still on the device
        self.staying: set[int] = set()  # coming back, and their copy on the host stays
        self.unfetched: set[int] = set()  # sent to the host, and not asked for since
        self._placed: set[int] = set()
        self._outside = {s for op in (*graph.inputs, *graph.arriving) for s in graph.storages(op)}

    def where(self, value: int) -> str:
        """Where a value is that is not on the device, in words."""
        if ~value in self.memory.values:
            return "which is still on its way from the host: await it first"
        if value in self.there:
            return "which is on the host only"
        return "which is not there"

    def under_way(self, taken_over: Collection[int] = ()) -> str:
        """What is wrong with copies to the host when the forward or the backward ends; nothing if nothing is.

        The backward may wait for a copy that the forward has begun, if it takes the value over and nobody else can
        reach its memory: between the two the caller may write over results, or let go of them.
        """
        outside = {*self.graph.results, *self.graph.updates} & self.memory.values.keys()
        reached = {copy for op in outside for copy in self.memory.values[op].values()}
        for value in sorted(self.leaving):
            if value not in taken_over or not reached.isdisjoint(self.memory.values[value].values()):
                return f"{self.graph.ops[value].name} is being copied to the host, and nobody waits until it is there"
        return ""

    def perform(self, move: Move) -> str:
        """Move a value; returns the reason why that cannot be, or nothing."""
        if self.platform is None or not self.platform.has_link:
            return "there is no link to the host"
        if isinstance(move, Offload):
            return self._offload(move.value)
        if isinstance(move, Release):
            return self._release(move.value)
        if isinstance(move, Prefetch):
            return self._prefetch(move.value, move.keeps)
        return self._await(move)

    def _offload(self, value: int) -> str:
        entry = self.graph.ops[value]
        if value not in self.memory.values:
            return f"it copies a value {self.where(value)}"
        if entry.kind not in ("forward", "backward") or not entry.storable:
            return "only tensors that the step itself makes can move"
        if not self._outside.isdisjoint(entry.storages):
            return "it lies in memory that comes from outside, which others may write to"
        if self.memory.bytes_of(value) != self.graph.value_bytes(value):
            return "it lies in the memory of a larger value"
        if not self.graph.value_bytes(value):
            return "it has no memory of its own that could be given back, like a constant"
        if value in self.there:
            return "it is on the host already"
        self.there.add(value)
        self.leaving.add(value)
        self.unfetched.add(value)
        return self._place(value)

    def _place(self, value: int) -> str:
        if value not in self._placed:
            self._placed.add(value)
            self.bytes += self.graph.value_bytes(value)
        limit = None if self.platform is None else self.platform.host_bytes
        if limit is not None and self.bytes > limit:
            return f"the host would need {self.bytes - limit} bytes more than its {limit}"
        return ""

    def _release(self, value: int) -> str:
        if value not in self.memory.values:
            return f"it gives back a value {self.where(value)}"
        if value not in self.there:
            return "it has no copy on the host"
        self.leaving.discard(value)
        self.memory.drop(value)
        return ""

    def _prefetch(self, value: int, keeps: bool) -> str:
        if value in self.memory.values or ~value in self.memory.values:
            return "it is on the device already, or on its way"
        if value not in self.there:
            return "it is not on the host"
        self.memory.take(value, ~value)
        self.unfetched.discard(value)
        if keeps:
            self.staying.add(value)
        return ""

    def _await(self, move: Await) -> str:
        value = move.value
        if ~value not in self.memory.values:
            return "it is not on its way from the host"
        self.memory.rename(~value, value)
        if value in self.staying:
            self.staying.discard(value)
        else:
            self.there.discard(value)
        return ""
