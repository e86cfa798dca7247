"""A machine that runs programs with symbols for values, to hold the referee against.

It shares no code with the package. It knows tensors as PyTorch does: a name holds a value, a value holds storages,
and a storage is there as long as anything holds it. It refuses whatever real tensors would get wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from elbowroom.problem import Platform
from elbowroom.step.graph import StepGraph
from elbowroom.step.operations import Await, Move, Offload, Prefetch, Release, Run
from elbowroom.step.program import Program
from elbowroom.step.referee import Prediction, Surroundings, predict


@dataclass(eq=False)
class Storage:
    size: int
    written: int = 1


@dataclass(frozen=True, eq=False)
class Tensor:
    """A symbol for what was computed, and the storages it lies in as they were written then."""

    symbol: int
    lies_in: dict[int, tuple[Storage, int]]

    @property
    def intact(self) -> bool:
        return all(storage.written == then for storage, then in self.lies_in.values())


@dataclass
class Account:
    """Bytes counted by the machine, as in `elbowroom.step.referee.Prediction`."""

    forward_bytes: list[int] = field(default_factory=list)
    backward_bytes: list[int] = field(default_factory=list)
    between_bytes: int = 0
    saved_bytes: int = 0


NOTHING_AROUND = Surroundings()


def run(graph: StepGraph, program: Program, around: Surroundings = NOTHING_AROUND) -> Account:
    """Execute a program; an AssertionError says what it gets wrong. Counts what is live at every operation."""
    machine = Machine(graph, program, around)
    machine.forward()
    machine.backward()
    return machine.account


def check(
    graph: StepGraph, program: Program, around: Surroundings = NOTHING_AROUND, platform: Platform | None = None
) -> Prediction:
    """The prediction of a program that runs right and takes exactly the bytes predicted, moment by moment."""
    account, prediction = run(graph, program, around), predict(graph, program, around, platform)
    assert list(prediction.forward_bytes) == account.forward_bytes
    assert list(prediction.backward_bytes) == account.backward_bytes
    assert prediction.between_bytes == account.between_bytes
    assert prediction.saved_bytes == account.saved_bytes
    highest = max(*account.forward_bytes, *account.backward_bytes, account.between_bytes, 0)
    assert prediction.peak_bytes == highest
    times = [graph.ops[run.op].time for run in (*program.forward_runs, *program.backward_runs)]
    assert prediction.time_s == sum(times)
    return prediction


class Machine:
    def __init__(self, graph: StepGraph, program: Program, around: Surroundings) -> None:
        self.graph, self.program, self.around = graph, program, around
        self.account = Account()
        self.symbols: dict[object, int] = {}
        self.plain = self.plain_symbols()
        self.names: dict[int, Tensor] = {}
        self.elsewhere: list[Tensor] = []  # held by somebody outside the program
        self.untouchable: list[Tensor] = []  # must be intact at the end
        self.states: dict[int, int] = {}
        self.draws = 0
        self.effects: list[int] = []
        self.gradients: dict[int, Tensor] = {}
        self.awaited = dict(around.late)  # counted as resident, though not there yet
        self.host: dict[int, int] = {}  # values on the host: their symbols
        self.leaving: dict[int, Tensor] = {}  # being copied to the host: must stay as they are
        self.coming: dict[int, Tensor] = {}  # have memory on the device, and nothing in it yet

    def symbol(self, *what: object) -> int:
        return self.symbols.setdefault(what, len(self.symbols))

    def plain_symbols(self) -> dict[int, int]:
        """What every operator computes when each runs once, in order. A norm's buffer does not change its value."""
        plain: dict[int, int] = {}
        draws = count()
        for op in (*self.graph.inputs, *self.graph.arriving, *self.graph.forward, *self.graph.backward):
            entry = self.graph.ops[op]
            drawn = next(draws) if entry.random else None
            plain[op] = self.symbol(op, drawn, *(plain[read] for read in entry.rerun_reads))
        return plain

    def forward(self) -> None:
        graph, program = self.graph, self.program
        together: dict[int, Storage] = {}
        for op in graph.inputs:
            self.names[op] = self.outside(op, together)
        for run in program.forward:
            if not isinstance(run, Run):
                self.account.forward_bytes.append(self.move(run) - sum(self.awaited.values()))
                continue
            assert not run.again
            assert graph.ops[run.op].kind == "forward"
            if run.op in program.reseeded:
                self.states[run.op] = self.draws
            self.account.forward_bytes.append(self.execute(run))
        kept = {*graph.inputs, *graph.results, *graph.updates, *program.saved}
        assert self.names.keys() == kept, "the forward leaves exactly what goes on"
        assert self.draws == sum(graph.ops[op].random for op in graph.forward), "the random stream afterwards"
        assert sorted(self.effects) == sorted(graph.effects)
        assert self.states.keys() == set(program.reseeded)
        assert not self.coming
        assert all(graph.ops[op].storable for op in program.saved), "autograd keeps tensors only"

    def backward(self) -> None:
        graph, program = self.graph, self.program
        forward = self.names
        for op in graph.updates:
            assert forward[op].intact
            assert forward[op].symbol == self.plain[op]
        self.elsewhere = [forward[op] for op in graph.results]
        self.names = {op: forward[op] for op in program.saved}
        wanted = {read for run in program.backward_runs for read in self.reads(run)}
        wanted.update(gradient for _, gradient in graph.gradients)
        assert wanted.issuperset(program.saved), "nothing is saved for nothing"
        for op in program.saved:
            if op in graph.overwritten:
                size = graph.overwritten[op]
                self.names[op] = Tensor(forward[op].symbol, {-1 - op: (Storage(size), 1)})
        self.account.saved_bytes = self.live_bytes()
        for op in graph.overwritten:
            for storage, _ in forward[op].lies_in.values():
                storage.written += 1
        together: dict[int, Storage] = {}
        arriving = {op: self.outside(op, together) for op in graph.arriving}
        self.names |= arriving
        self.untouchable = [*self.names.values(), *self.elsewhere]
        self.account.between_bytes = self.live_bytes() + self.around.outside_bytes - sum(self.awaited.values())
        if self.around.keeps_arriving:
            self.elsewhere += arriving.values()
        accumulated = {i for run in program.backward_runs for i in run.accumulates}
        assert accumulated <= graph.parameters
        returned = {gradient for i, gradient in graph.gradients if i not in accumulated}
        read = {read for run in program.backward_runs for read in self.reads(run)}
        for op in graph.arriving:
            if op not in read | returned:
                del self.names[op]
        for run in program.backward:
            if not isinstance(run, Run):
                self.account.backward_bytes.append(self.move(run) - sum(self.awaited.values()))
                continue
            assert run.again == (graph.ops[run.op].kind == "forward")
            self.account.backward_bytes.append(self.execute(run))
        saved_inputs = {op for op in program.saved if graph.ops[op].kind == "input"}
        assert self.names.keys() == returned | saved_inputs, "the backward leaves exactly its gradients"
        assert not self.states, "every generator state is let go"
        assert not self.coming, "what comes back is awaited"
        assert all(tensor.intact for tensor in self.leaving.values()), "what is copied stays as it is"
        for i, gradient in graph.gradients:
            if i not in accumulated:
                self.gradients[i] = self.names[gradient]
            assert self.gradients[i].symbol == self.plain[gradient], f"gradient of {i}"
            assert self.gradients[i].intact, f"the gradient of {i} was overwritten"
        assert all(tensor.intact for tensor in self.untouchable), "what came from outside was overwritten"
        for op in graph.results:
            assert forward[op].symbol == self.plain[op]

    def execute(self, run: Run) -> int:
        """Run one operator; returns the bytes that are live while it runs."""
        graph, op = self.graph, run.op
        entry = graph.ops[op]
        reads = self.reads(run)
        for read in reads:
            assert read in self.names, f"{op} reads {read}, which is not there"
            assert self.names[read].intact, f"{op} reads {read}, which was overwritten"
        drawn = None
        if entry.random:
            drawn = self.states[op] if run.again else self.draws
            self.draws += not run.again
        if not run.again and entry.reads != entry.rerun_reads:
            self.effects.append(op)
        symbol = self.symbol(op, drawn, *(self.names[read].symbol for read in entry.rerun_reads))
        lies_in: dict[int, tuple[Storage, int]] = {}
        for read in reads:
            for number, (storage, then) in self.names[read].lies_in.items():
                if number in entry.shares:
                    lies_in[number] = storage, then
        assert lies_in.keys() == set(entry.shares)
        if run.viewed_in is not None:
            assert op in graph.part_copies
            assert run.viewed_in == entry.reads[0]
            assert not run.accumulates, "a gradient of a parameter is alone in its storage"
            ((number, _),) = entry.makes
            ((storage, then),) = self.names[run.viewed_in].lies_in.values()
            lies_in[number] = storage, then
        elif run.reuses is None:
            lies_in |= {number: (Storage(size), 1) for number, size in entry.makes}
        else:
            assert run.reuses in entry.reusable
            ((number, size),) = entry.makes
            ((storage, _),) = self.names[run.reuses].lies_in.values()
            assert storage.size == size
            storage.written += 1
            lies_in[number] = storage, storage.written
        assert op not in self.names, f"{op} runs again while its value is still there"
        assert op not in self.coming, f"{op} runs again while its value is on its way"
        self.names[op] = Tensor(symbol, lies_in)
        for i in run.accumulates:
            assert i not in self.gradients, f"{i} gets its gradient twice"
            self.gradients[i] = self.names[op]
        during = self.live_bytes() + self.while_running(run) - sum(self.awaited.values())
        for i in run.accumulates:
            size = self.awaited.pop(i, 0)
            during += size if i in self.around.copied else 0
        for freed in run.frees:
            assert graph.ops[freed].kind != "input"
            assert freed not in self.leaving, f"{freed} is freed while it is being copied"
            del self.names[freed]
        if run.last_draw:
            del self.states[op]
        return during

    def while_running(self, run: Run) -> int:
        """Bytes besides values. A random operator that will run again, or does, has its generator looked at when it
        has drawn; one that cannot have a generator of its own also has the shared one put back."""
        entry, state = self.graph.ops[run.op], self.around.state_bytes
        is_first = run.op in self.program.reseeded and not run.again
        if is_first:
            return max(entry.workspace, state)
        if run.again and entry.random and not entry.draws_privately:
            return state + max(entry.workspace, state)
        return entry.workspace

    def move(self, move: Move) -> int:
        """Take a value to the host or back; returns the bytes that are live then."""
        value = move.value
        if isinstance(move, Offload):
            assert self.names[value].intact
            assert self.graph.ops[value].kind in ("forward", "backward"), "what comes from outside stays"
            assert value not in self.host
            self.host[value] = self.names[value].symbol
            self.leaving[value] = self.names[value]
        elif isinstance(move, Release):
            assert value in self.host
            copied = self.leaving.pop(value, None)
            assert copied is None or (copied is self.names[value] and copied.intact)
            del self.names[value]
        elif isinstance(move, Prefetch):
            assert value not in self.names
            assert value not in self.coming
            assert value not in self.leaving
            sizes = ((number, self.graph.storage_bytes[number]) for number in self.graph.ops[value].storages)
            self.coming[value] = Tensor(self.host[value], {number: (Storage(size), 1) for number, size in sizes})
            if not move.keeps:
                del self.host[value]
        else:
            assert isinstance(move, Await)
            assert value not in self.names
            self.names[value] = self.coming.pop(value)
        return self.live_bytes()

    def live_bytes(self) -> int:
        live = {
            id(storage): storage.size
            for tensor in (*self.names.values(), *self.elsewhere, *self.coming.values())
            for storage, _ in tensor.lies_in.values()
        }
        return sum(live.values()) + len(self.states) * self.around.state_bytes

    def outside(self, op: int, together: dict[int, Storage]) -> Tensor:
        """A value that comes from outside; those that come together may share storages."""
        for number, size in self.graph.ops[op].makes:
            together.setdefault(number, Storage(size))
        return Tensor(self.plain[op], {number: (together[number], 1) for number, _ in self.graph.ops[op].makes})

    def reads(self, run: Run) -> tuple[int, ...]:
        entry = self.graph.ops[run.op]
        return entry.rerun_reads if run.again else entry.reads
