"""The referee of training steps: plays a program storage by storage, counts bytes, and refuses what cannot be right.

It knows nothing of planners. A program that it lets pass computes what the step computes when every operator runs
once, in order: every result and every gradient is made, nothing is read, freed or written over that is not there,
random operators draw the same numbers, what changes an input happens once. A value that moves to the host is not read
before it is back, and its memory is not given away while it is being copied. A refusal names the operation and the
reason.

Memory follows from the order of operations alone, because every wait has its place among them. Time does not: see
`step/timeline.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from elbowroom.errors import InvalidProgram
from elbowroom.problem.platform import Platform
from elbowroom.step.graph import StepGraph
from elbowroom.step.host import Host
from elbowroom.step.operations import Move, Operation, Run
from elbowroom.step.program import Program, reads_of
from elbowroom.step.storages import Memory


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What happens around a program, as far as its memory goes.

    `outside_bytes` is reserved between forward and backward for a loss computed elsewhere. `keeps_arriving` says
    that the caller holds the arriving gradients until the backward ends. `state_bytes` is the size of a random
    generator's state where it counts against the same memory. `late` are gradients of parameters, and their bytes,
    that count as resident and are not there before the backward makes them; those in `copied` do not become `.grad`
    themselves, but are copied there.
    """

    outside_bytes: int = 0
    keeps_arriving: bool = False
    state_bytes: int = 0
    late: Mapping[int, int] = field(default_factory=dict)
    copied: frozenset[int] = frozenset()

    @property
    def late_bytes(self) -> int:
        return sum(self.late.values())


@dataclass(frozen=True)
class Prediction:
    """What a program takes above what is resident. One entry per operation: bytes while it is performed.

    Less than nothing where gradients that count as resident are not there yet. `time_s` is the operators' time; where
    values move, computing may also wait for the link, and the time line says how long.
    """

    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    between_bytes: int  # between forward and backward, what happens outside included
    saved_bytes: int
    time_s: float
    host_bytes: int = 0  # of all values that go to the host, each of which has a place there

    @property
    def peak_bytes(self) -> int:
        return max(self.between_bytes, *self.forward_bytes, *self.backward_bytes, 0)


_ALONE = Surroundings()


def predict(
    graph: StepGraph,
    program: Program,
    around: Surroundings = _ALONE,
    platform: Platform | None = None,
    memory: Memory | None = None,
) -> Prediction:
    """Play a program in an empty memory; `InvalidProgram` says which operation cannot be performed and why."""
    return _Referee(graph, program, around, platform, memory or Memory(graph, around.state_bytes)).play()


def bytes_between(graph: StepGraph, around: Surroundings) -> int:
    """Bytes between forward and backward in any program: results, what arrives, what happens outside."""
    there = {storage for op in (*graph.results, *graph.arriving) for storage in graph.storages(op)}
    return around.outside_bytes + graph.bytes_of(there)


def peak_in_a_row(programs: Iterable[tuple[int, int]]) -> int:
    """The peak of programs in a row, given the peak of each and what it saves, which stays while the next run."""
    held = top = 0
    for peak, saved in programs:
        top = max(top, held + peak)
        held += saved
    return top


class _Referee:
    """Plays one program. Where an operation is refused, `index` and `phase` tell which one it was."""

    def __init__(
        self, graph: StepGraph, program: Program, around: Surroundings, platform: Platform | None, memory: Memory
    ) -> None:
        self.graph, self.program, self.around = graph, program, around
        self.memory = memory
        self.phase = "forward"
        self.index = 0
        self._ops = graph.ops
        self._count = len(graph.ops)
        self._inputs = frozenset(graph.inputs)
        self._ran: set[int] = set()  # forward operators in the forward, backward operators in the backward
        self._last = -1  # the highest number that ran in this phase
        self._in_order = True
        self._states: set[int] = set()  # random operators whose generator's state is put aside
        self._awaited = {
            i: gradient
            for i, gradient in graph.gradients
            if i in graph.parameters and graph.ops[gradient].kind == "backward"
        }
        self._time = 0.0
        self._hidden: set[int] = set()  # results that the caller holds, and the backward makes again for itself
        self._host = Host(graph, memory, platform)

    def play(self) -> Prediction:
        around = self.around
        self.memory.bring_inputs()
        forward = self._forward()
        saved_bytes, between = self._turn()
        backward = self._backward()
        missing = around.late_bytes
        return Prediction(
            tuple([size - missing for size in forward]),
            tuple(backward),
            between,
            saved_bytes,
            self._time,
            self._host.bytes,
        )

    # --- forward ---

    def _forward(self) -> list[int]:
        reseeded = set(self.program.reseeded)
        if len(reseeded) != len(self.program.reseeded):
            raise InvalidProgram("a generator's state is kept twice")
        levels = []
        run_now, ops = self.memory.run, self._ops
        for index, operation in enumerate(self.program.forward):
            self.index = index
            if isinstance(operation, Run):
                self._check_forward(operation)
                self._check_run(operation)
                levels.append(run_now(operation, operation.op in reseeded))
                self._time += ops[operation.op].time
            else:
                levels.append(self._move(operation))
        self._check_forward_done()
        self._states = reseeded
        return levels

    def _check_forward(self, run: Run) -> None:
        op = run.op
        if not 0 <= op < self._count:
            raise self._refuse(f"there is no operator {op} among {self._count}")
        entry = self._ops[op]
        if entry.kind != "forward" or run.again or run.last_draw or run.accumulates or run.viewed_in is not None:
            raise self._refuse("only forward operators run in the forward, each for the first time")
        if op in self._ran:
            raise self._refuse("it has run already")
        self._ran.add(op)
        if op > self._last:
            self._last = op
        else:
            self._in_order = False

    def _check_forward_done(self) -> None:
        graph, program, values = self.graph, self.program, self.memory.values
        self.index = len(program.forward)
        for op in (*graph.effects, *(op for op in graph.forward if self._ops[op].random)):
            if op not in self._ran:
                raise InvalidProgram(f"the forward never runs {self._name(op)}, which draws random numbers or writes")
        if not self._in_order:
            self._check_order(program.forward)
        for what, ops in (("result", graph.results), ("update", graph.updates), ("saved value", program.saved)):
            for op in ops:
                if op < 0 or op not in values:
                    raise InvalidProgram(f"the {what} {self._name(op)} is not there when the forward ends")
        if len(set(program.saved)) != len(program.saved):
            raise InvalidProgram("a value is saved twice")
        for op in program.saved:
            if not self._ops[op].storable:
                raise InvalidProgram(f"{self._name(op)} is saved, but only tensors can be")
        if self._host.leaving and (reason := self._host.under_way(program.saved)):
            raise InvalidProgram(f"when the forward ends, {reason}")
        left = values.keys() - self._inputs - {*graph.results, *graph.updates, *program.saved}
        if left:
            raise InvalidProgram(f"the forward never frees {self._name(min(left))}")

    def _check_order(self, operations: tuple[Operation, ...]) -> None:
        """Random operators draw in the order of the trace, and nothing overtakes what writes to an input it reads."""
        place = {each.op: n for n, each in enumerate(operations) if isinstance(each, Run)}
        kind = self.phase
        random = [op for op in place if self._ops[op].random and self._ops[op].kind == kind]
        if random != sorted(random):
            raise InvalidProgram("random operators must draw in the order in which they were traced")
        written = {s for i in self.graph.overwritten for s in self.graph.storages(i)}
        touches = {op: self._storages_read(op) & written for op in place}
        for effect in self.graph.effects:
            for op in place if effect in place else ():
                if op != effect and touches[op] & touches[effect] and (op < effect) != (place[op] < place[effect]):
                    raise InvalidProgram(f"{self._name(op)} and {self._name(effect)} share an input that is written")

    def _storages_read(self, op: int) -> set[int]:
        return {storage for read in self._ops[op].reads for storage in self.graph.storages(read)}

    # --- between ---

    def _turn(self) -> tuple[int, int]:
        """What is saved, and what there is between forward and backward; then the backward may begin."""
        graph, program, memory = self.graph, self.program, self.memory
        held = {*graph.results, *program.saved}
        for op in graph.updates:
            if op not in held:
                memory.drop(op)
        memory.now += sum(graph.copied_bytes(op) for op in program.saved)
        saved_bytes = memory.now
        for op in program.saved:
            memory.protect(op)
        for op in graph.arriving:
            memory.bring(op)
        for op in (*graph.results, *(graph.arriving if self.around.keeps_arriving else ())):
            memory.pin(op)
        between = memory.now + self.around.outside_bytes - self.around.late_bytes
        read = self._read_in_backward()
        for op in (*graph.arriving, *graph.results):
            if op not in read:
                memory.drop(op)
        self._hidden = {op for op in graph.results if op in read} - set(program.saved)
        return saved_bytes, between

    def _read_in_backward(self) -> set[int]:
        """What the backward reads; refuses a program that reads what was not handed to it."""
        graph, saved = self.graph, set(self.program.saved)
        read: set[int] = set()
        ops, count = self._ops, self._count
        for run in self.program.backward_runs:
            if 0 <= run.op < count:  # others are refused when their turn comes
                entry = ops[run.op]
                read.update(entry.rerun_reads if run.again else entry.reads)
        if (unsaved := (read & self._inputs) - saved) or (unsaved := self._results_unsaved(read, saved)):
            raise InvalidProgram(f"the backward reads {self._name(min(unsaved))}, which is not saved for it")
        read.update(gradient for _, gradient in graph.gradients)  # one that arrives may be returned as it is
        if unread := saved - read:
            raise InvalidProgram(f"{self._name(min(unread))} is saved, and the backward does not read it")
        return read

    def _results_unsaved(self, read: set[int], saved: set[int]) -> set[int]:
        """Results that are read although they are not saved, nor made again before."""
        waiting = {op for op in self.graph.results if op in read and op not in saved}
        found: set[int] = set()
        for run in self.program.backward_runs if waiting else ():
            if 0 <= run.op < self._count:
                found.update(op for op in reads_of(self.graph, run) if op in waiting)
                waiting.discard(run.op)
        return found

    # --- backward ---

    def _backward(self) -> list[int]:
        self.phase, self._last, self._in_order = "backward", -1, True
        self._ran = set()
        levels = []
        run_now, ops = self.memory.run, self._ops
        late, copied = self.around.late, self.around.copied
        missing = self.around.late_bytes
        for index, operation in enumerate(self.program.backward):
            self.index = index
            if not isinstance(operation, Run):
                levels.append(self._move(operation) - missing)
                continue
            self._check_backward(operation)
            self._check_run(operation)
            during = run_now(operation) - missing
            if operation.viewed_in is None:
                self._time += ops[operation.op].time
            for i in operation.accumulates:
                size = late.get(i, 0)
                missing -= size
                during += size if i in copied else 0
            levels.append(during)
        self._check_backward_done()
        return levels

    def _check_backward(self, run: Run) -> None:
        op = run.op
        if not 0 <= op < self._count:
            raise self._refuse(f"there is no operator {op} among {self._count}")
        entry = self._ops[op]
        if entry.kind == "forward":
            if not run.again:
                raise self._refuse("a forward operator runs in the backward, and not as again")
            if op in self.graph.kept:
                raise self._refuse("it must not run a second time")
            if entry.random and op not in self._states:
                raise self._refuse("the generator's state that was kept for it is gone")
            if run.last_draw:
                if not entry.random:
                    raise self._refuse("it draws no random numbers")
                self._states.discard(op)
        elif entry.kind != "backward" or run.again or run.last_draw:
            raise self._refuse("only forward operators can run again")
        elif op in self._ran:
            raise self._refuse("it has run already")
        else:
            self._ran.add(op)
            if op > self._last:
                self._last = op
            elif entry.random:
                self._in_order = False
        for i in run.accumulates:
            if self._awaited.pop(i, None) != op:
                raise self._refuse(f"its value is not the gradient of {self._name(i)}, or was added already")

    def _check_backward_done(self) -> None:
        graph, values = self.graph, self.memory.values
        self.index = len(self.program.backward)
        for i in self._awaited:
            raise InvalidProgram(f"the gradient of {self._name(i)} is never made")
        returned = {
            gradient
            for i, gradient in graph.gradients
            if i not in graph.parameters or graph.ops[gradient].kind != "backward"
        }
        for op in returned:
            if op not in values:
                raise InvalidProgram(f"the gradient {self._name(op)} is not there when the backward ends")
        if not self._in_order:
            self._check_order(self.program.backward)
        for op in graph.backward:
            if self._ops[op].random and op not in self._ran:
                raise InvalidProgram(f"the backward never runs {self._name(op)}, which draws random numbers")
        left = values.keys() - self._inputs - returned
        if left:
            op = min(left, key=abs)
            is_added = any(op == gradient for i, gradient in graph.gradients if i in graph.parameters)
            what = " although it was added to a gradient" if is_added else ""
            raise InvalidProgram(f"the backward never frees {self._name(op)}{what}")
        if self._host.leaving:
            raise InvalidProgram(f"when the backward ends, {self._host.under_way()}")
        for op in self._host.unfetched:
            raise InvalidProgram(f"{self._name(op)} is copied to the host and never comes back")
        for op in self._states:
            raise InvalidProgram(f"the generator's state kept for {self._name(op)} is never let go")

    # --- any operation ---

    def _check_run(self, run: Run) -> None:
        op = run.op
        entry = self._ops[op]
        values = self.memory.values
        reads = entry.rerun_reads if run.again else entry.reads
        for read in reads:
            if read not in values:
                raise self._refuse(f"reads {self._name(read)}, {self._host.where(read)}")
        hidden = self._hidden
        if op in hidden:
            hidden.discard(op)
        elif op in values or (self._host.there and ~op in values):
            raise self._refuse("its value is still there, or on its way from the host")
        frees = run.frees
        if frees:
            inputs, leaving = self._inputs, self._host.leaving
            for freed in frees:
                if freed != op and (freed < 0 or freed not in values or freed in hidden):
                    raise self._refuse(f"frees {self._name(freed)}, {self._host.where(freed)}")
                if freed in inputs:
                    raise self._refuse(f"frees {self._name(freed)}, which comes from outside")
                if leaving and freed in leaving:
                    raise self._refuse(f"frees {self._name(freed)}, which is being copied to the host: release it")
            if len(frees) > 1 and len(set(frees)) != len(frees):
                raise self._refuse("frees a value twice")
        if run.reuses is not None and not (
            run.reuses in entry.reusable
            and run.viewed_in is None
            and run.reuses not in self._host.leaving
            and self.memory.may_write_over(run.reuses, frees, reads)
        ):
            raise self._refuse(f"writes over {self._name(run.reuses)}, which is not its own to write over")
        if run.viewed_in is not None and (
            op not in self.graph.part_copies or run.viewed_in != entry.reads[0] or run.accumulates
        ):
            raise self._refuse("only a copy of a part can be left as a view, and only of what it reads")

    def _move(self, move: Move) -> int:
        """Bytes while a move is performed."""
        if not 0 <= move.value < self._count:
            raise self._refuse(f"there is no operator {move.value} among {self._count}")
        if move.value in self._hidden:
            raise self._refuse("only the caller holds it")
        if reason := self._host.perform(move):
            raise self._refuse(reason)
        return self.memory.now

    def _name(self, op: int) -> str:
        op = ~op if op < 0 else op  # a value on its way from the host is held under another number
        return self._ops[op].name if 0 <= op < self._count else f"operator {op}"

    def _refuse(self, reason: str) -> InvalidProgram:
        operation = (self.program.forward if self.phase == "forward" else self.program.backward)[self.index]
        if isinstance(operation, Run):
            shown = f"run {self._name(operation.op)}{' again' if operation.again else ''}"
        else:
            shown = f"{operation.to_json()[0]} {self._name(operation.value)}"
        return InvalidProgram(f"{self.phase} operation {self.index} ({shown}): {reason}", self.phase, self.index)
