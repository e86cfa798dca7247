"""The machine of `machine.py` with copies that happen when chance says: at once, at the last moment, or in between.

A copy takes what lies in its source at the moment at which it happens, and writes wherever its target was. Each
direction carries one copy after the other. Nothing here asks whether a move makes sense: it does what the executor
does, and what comes of it shows when something is read, or at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from elbowroom.step.graph import StepGraph
from elbowroom.step.operations import Await, Move, Offload, Prefetch, Release, Run
from elbowroom.step.program import Program
from elbowroom.step.referee import Surroundings
from machine import NOTHING_AROUND, Account, Machine, Storage, Tensor

GARBAGE = -1
Timing = Callable[[], bool]  # asked again and again: does the next copy of a direction happen now?


def at_once() -> bool:
    return True


def at_the_last_moment() -> bool:
    return False


def run_asynchronously(
    graph: StepGraph, program: Program, timing: Timing, around: Surroundings = NOTHING_AROUND
) -> Account:
    """Execute a program; an AssertionError says what it gets wrong if copies happen at these moments."""
    machine = AsynchronousMachine(graph, program, around, timing)
    machine.forward()
    machine.between()
    machine.backward()
    machine.end()
    return machine.account


@dataclass(eq=False)
class _Copy:
    """`tensor` is what is read or written on the device, of this value."""

    value: int
    tensor: Tensor
    spoiled: bool = False  # somebody outside the program may have written to its source


class AsynchronousMachine(Machine):
    def __init__(self, graph: StepGraph, program: Program, around: Surroundings, timing: Timing) -> None:
        super().__init__(graph, program, around)
        self.timing = timing
        self.leaving_line: deque[_Copy] = deque()
        self.coming_line: deque[_Copy] = deque()
        self.sent: dict[int, int] = {}  # by value: the symbol that was last sent to the host

    def execute(self, run: Run) -> int:
        self._let_some_happen()
        for freed in run.frees:
            assert freed in self.names or freed == run.op
        return super().execute(run)

    def move(self, move: Move) -> int:
        self._let_some_happen()
        value = move.value
        if isinstance(move, Offload):
            tensor = self.names[value]
            assert tensor.intact
            assert self.graph.ops[value].storable
            self.sent[value] = tensor.symbol
            self.leaving_line.append(_Copy(value, tensor))
        elif isinstance(move, Release):
            self._wait(self.leaving_line, value, self._copy_out)
            self.names.pop(value)
        elif isinstance(move, Prefetch):
            assert value not in self.names
            storages = ((number, self.graph.storage_bytes[number]) for number in self.graph.ops[value].storages)
            # Nothing has been written there yet, so that whoever reads it now does not find it intact.
            lies_in = {number: (Storage(size, 0), 1) for number, size in storages}
            self.names[value] = Tensor(self.sent[value], lies_in)
            self.coming_line.append(_Copy(value, self.names[value]))
        else:
            assert isinstance(move, Await)
            assert value in self.names
            self._wait(self.coming_line, value, self._copy_back)
        return self.live_bytes()

    def between(self) -> None:
        """The caller may write over results, unless the backward needs them, and lets go of what only overwrites."""
        saved = {id(s) for op in self.program.saved for s, _ in self.names[op].lies_in.values()}
        outside = {id(s) for op in self.graph.results for s, _ in self.names[op].lies_in.values()}
        outside |= {id(s) for op in self.graph.overwritten for s, _ in self.names[op].lies_in.values()}
        for copy in self.leaving_line:
            storages = {id(storage) for storage, _ in copy.tensor.lies_in.values()}
            copy.spoiled = bool(storages & outside) or not storages <= saved

    def end(self) -> None:
        assert not self.leaving_line, "a copy to the host is never waited for"
        assert not self.coming_line, "a copy from the host is never waited for"

    # --- copies ---

    def _let_some_happen(self) -> None:
        while self.leaving_line and self.timing():
            self._copy_out(self.leaving_line.popleft())
        while self.coming_line and self.timing():
            self._copy_back(self.coming_line.popleft())

    def _wait(self, line: deque[_Copy], value: int, perform: Callable[[_Copy], None]) -> None:
        while any(copy.value == value for copy in line):
            perform(line.popleft())

    def _copy_out(self, copy: _Copy) -> None:
        is_there = self._is_held(copy.tensor) and copy.tensor.intact and not copy.spoiled
        self.host[copy.value] = copy.tensor.symbol if is_there else GARBAGE

    def _copy_back(self, copy: _Copy) -> None:
        assert self._is_held(copy.tensor), f"{copy.value} arrives in memory that is given away"
        arrives = self.host.get(copy.value, GARBAGE)
        for storage, _ in copy.tensor.lies_in.values():
            assert not storage.written, f"{copy.value} arrives over something else"
            storage.written = 1 if arrives == copy.tensor.symbol else GARBAGE

    def _is_held(self, tensor: Tensor) -> bool:
        held = {id(s) for each in (*self.names.values(), *self.elsewhere) for s, _ in each.lies_in.values()}
        return all(id(storage) in held for storage, _ in tensor.lies_in.values())
