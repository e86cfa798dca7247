"""Values on the host and on their way, as the referee sees them: what may move, and how many bytes lie there.

A copy on the host takes room from the moment at which it is begun until the value is back, or longer where it stays.
"""

from __future__ import annotations

from elbowroom.problem.platform import Platform
from elbowroom.step.graph import StepGraph
from elbowroom.step.operations import Await, Move, Offload, Prefetch, Release
from elbowroom.step.storages import Memory


class Host:
    """Values on the host, and on their way."""

    def __init__(self, graph: StepGraph, memory: Memory, platform: Platform | None) -> None:
        self.graph, self.memory, self.platform = graph, memory, platform
        self.now = self.peak = 0
        self.there: set[int] = set()  # a copy of these values is on the host, or will be once it has left the device
        self.leaving: set[int] = set()  # being copied to the host; still on the device
        self.staying: set[int] = set()  # coming back, and their copy on the host stays

    def where(self, value: int) -> str:
        """Where a value is that is not on the device, in words."""
        if ~value in self.memory.values:
            return "which is still on its way from the host: await it first"
        if value in self.there:
            return "which is on the host only"
        return "which is not there"

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
        if value in self.there:
            return "it is on the host already"
        self.there.add(value)
        self.leaving.add(value)
        self.now += self.graph.value_bytes(value)
        self.peak = max(self.peak, self.now)
        limit = None if self.platform is None else self.platform.host_bytes
        if limit is not None and self.now > limit:
            return f"the host would need {self.now - limit} bytes more than its {limit}"
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
            self.now -= self.graph.value_bytes(value)
        return ""
