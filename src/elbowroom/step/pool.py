"""Plays PyTorch's allocator for a program that is recorded: how large its pool would be, gaps and all.

A recording's memory is a segment that grows; a request takes the smallest gap that it fits in, and what is freed is
joined with the gaps beside it. A program's peak is up to 30 % below: where memory is short, small values that live
long lie between large ones that do not.

How large the gaps are is a matter of chance: what is made a moment later, or beside a value instead of over it, comes
to lie elsewhere. Of fifty recordings on an H200, seven models, most took what was played within 3 %; but one that was
chosen because its play came out small took 15 % more. So a program is played twice, and the larger pool counts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection
from dataclasses import replace

from elbowroom.problem.platform import Platform
from elbowroom.step.allocator import LARGE_GROWTH, MIB, SMALL, SMALL_GROWTH, whole_blocks
from elbowroom.step.graph import StepGraph
from elbowroom.step.operations import Operation, Run
from elbowroom.step.program import Program
from elbowroom.step.referee import Surroundings, predict
from elbowroom.step.storages import Memory

WORKSPACES = 64 * MIB  # of matrix products, from the first one on
PRODUCTS = "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"


def pool_bytes(
    graph: StepGraph,
    program: Program,
    around: Surroundings,
    fixed: Collection[int],
    platform: Platform | None = None,
) -> int:
    """Of a recording that makes the gradients which come late; inputs in `fixed` are outside."""
    return max(_played(graph, each, around, fixed, platform) for each in (program, _without_reuse(program)))


def _played(
    graph: StepGraph, program: Program, around: Surroundings, fixed: Collection[int], platform: Platform | None
) -> int:
    memory = Pooled(graph, around, fixed)
    predict(graph, program, around, platform, memory)
    return sum(segment.size for segment in memory.segments.values())


def _without_reuse(program: Program) -> Program:
    """As a compiler may run it: values lie beside those that they were planned to be written over."""

    def beside(operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
        return tuple(
            replace(each, reuses=None) if isinstance(each, Run) and each.reuses is not None else each
            for each in operations
        )

    return replace(program, forward=beside(program.forward), backward=beside(program.backward))


class Pooled(Memory):
    """Live storages, and where they are."""

    def __init__(self, graph: StepGraph, around: Surroundings, fixed: Collection[int]) -> None:
        super().__init__(graph, 0)
        self.segments = {True: Segment(SMALL_GROWTH), False: Segment(LARGE_GROWTH)}  # by whether requests are small
        self._around = around
        self._fixed = fixed
        self._inside = True
        self._places: dict[int, tuple[Segment, int]] = {}
        self._workspace = 0
        self._multiplies = False

    def bring_inputs(self) -> None:
        for op in self.graph.inputs:
            self.bring(op)

    def bring(self, op: int) -> None:
        self._inside = op not in self._fixed
        super().bring(op)
        self._inside = True

    def run(self, run: Run, keeps_state: bool = False) -> int:
        entry = self.graph.ops[run.op]
        self._workspace = entry.workspace
        if entry.target.startswith(PRODUCTS) and not self._multiplies:
            self._multiplies = True
            self.place(WORKSPACES)
        during = super().run(run, keeps_state)
        self._use_workspace()
        for parameter in run.accumulates:
            if size := self._around.late.get(parameter, 0):
                self.place(size)
        return during

    def pin(self, op: int) -> None:
        """Results are copied out, and what arrives is copied in: nobody outside holds these."""

    def place(self, size: int) -> tuple[Segment, int]:
        segment = self.segments[size <= SMALL]
        return segment, segment.take(size)

    def drop(self, op: int) -> None:
        self._use_workspace()  # after its output has a place, and before what it reads is gone
        gone = [copy for copy in self.values.get(op, {}).values() if self._holders[copy] == 1]
        for copy in gone:
            if copy in self._places:
                segment, start = self._places.pop(copy)
                segment.give(start)
        super().drop(op)

    def _use_workspace(self) -> None:
        size, self._workspace = self._workspace, 0
        if size:
            segment, start = self.place(size)
            segment.give(start)

    def _new(self, size: int) -> int:
        copy = super()._new(size)
        if size and self._inside:
            self._places[copy] = self.place(size)
        return copy


class Segment:
    """Memory in one piece that grows at its end."""

    def __init__(self, growth: int) -> None:
        self.size = 0
        self._growth = growth
        self._gaps: list[tuple[int, int]] = []  # size and start, the last one aside
        self._starts: dict[int, int] = {}  # of gaps: their sizes
        self._ends: dict[int, int] = {}  # of gaps: their starts
        self._used: dict[int, int] = {}
        self._tail = 0  # where the last gap starts

    def take(self, size: int) -> int:
        size = whole_blocks(size)
        at = bisect_left(self._gaps, (size, 0))
        if at < len(self._gaps):
            gap, start = self._gaps[at]
            self._forget(start)
            if gap > size:
                self._remember(start + size, gap - size)
        else:
            start = self._tail
            self._tail += size
            missing = max(0, self._tail - self.size)
            self.size += -(-missing // self._growth) * self._growth
        self._used[start] = size
        return start

    def give(self, start: int) -> None:
        size = self._used.pop(start)
        if start in self._ends:
            before = self._ends[start]
            size += self._starts[before]
            self._forget(before)
            start = before
        if start + size == self._tail:
            self._tail = start
            return
        if start + size in self._starts:
            after = start + size
            size += self._starts[after]
            self._forget(after)
        self._remember(start, size)

    def _remember(self, start: int, size: int) -> None:
        insort(self._gaps, (size, start))
        self._starts[start], self._ends[start + size] = size, start

    def _forget(self, start: int) -> None:
        size = self._starts.pop(start)
        del self._ends[start + size]
        self._gaps.remove((size, start))
