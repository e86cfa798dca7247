"""Programs: which operators the forward and the backward run, in order; and exactly how much memory that takes.

A backward program may run a forward operator any number of times. Every reader takes the latest copy, and a copy is
freed after its last reader. So an order of operators says everything: what must be handed from forward to backward,
when each storage is freed, and the peak. `predict` plays a program storage by storage; the emitted source does the
same with real tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elbowroom.joint import Joint


@dataclass(frozen=True, slots=True)
class Instruction:
    """Run an operator, add its value to the gradients of some inputs, then free values nobody reads again.

    `replay`: a forward operator run in the backward. `reuses`: the output is written over this value, which nobody
    reads again. `last_draw`: a random one that does not run again, so that
    the generator's state kept for it goes too. `shows`: a copy that is not made, its value is in this one.
    """

    op: int
    replay: bool = False
    frees: tuple[int, ...] = ()
    reuses: int | None = None
    accumulates: tuple[int, ...] = ()
    last_draw: bool = False
    shows: int | None = None


@dataclass(frozen=True)
class Program:
    """One step. `saved` is handed from forward to backward; `reseeded` are random operators that draw again."""

    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]
    saved: tuple[int, ...]
    reseeded: tuple[int, ...]

    @property
    def apart(self) -> bool:
        """Whether all parts of gradients that may be copied are: none is shown in the whole."""
        return all(instruction.shows is None for instruction in self.backward)

    @property
    def replays(self) -> dict[int, int]:
        """How often each forward operator runs again."""
        counts: dict[int, int] = {}
        for instruction in self.backward:
            if instruction.replay:
                counts[instruction.op] = counts.get(instruction.op, 0) + 1
        return counts


def make_program(joint: Joint, order: Sequence[int], *, apart: bool = True) -> Program:
    """The program whose backward runs `order`, less what nobody reads; its forward runs what is needed once."""
    accumulated: dict[int, list[int]] = {}
    for i, gradient in joint.gradients:
        if i in joint.parameters and joint.ops[gradient].kind == "backward":
            accumulated.setdefault(gradient, []).append(i)
    returned = [gradient for i, gradient in joint.gradients if i not in accumulated.get(gradient, ())]
    backward, needed = _listing(joint, order, returned, accumulated, again=True)
    if not apart:
        backward = tuple(_shown(joint, instruction) for instruction in backward)
    arriving = set(joint.arriving)
    saved = tuple(sorted(op for op in needed if op not in arriving))
    kept = (*joint.results, *joint.updates, *saved)
    # Random operators draw in the forward even if only the backward reads them: the stream goes on as it would.
    drawing = [op for op in joint.forward if joint.ops[op].random]
    effects: dict[int, list[int]] = {op: [] for op in (*joint.effects, *drawing)}
    forward, _ = _listing(joint, joint.forward, kept, effects, again=False)
    memory = Memory(joint, 0)
    for op in joint.inputs:
        memory.bring(op)
    forward = memory.reusing(forward)
    for op in (*saved, *joint.arriving):
        memory.bring(op)
    backward = memory.reusing(backward)
    replayed = {i.op for i in backward if i.replay}
    reseeded = tuple(op for op in joint.forward if op in replayed and joint.ops[op].random)
    return Program(forward, backward, saved, reseeded)


def _shown(joint: Joint, instruction: Instruction) -> Instruction:
    """A copy of a part is not made; but what becomes a parameter's gradient is alone in its storage."""
    if instruction.op not in joint.apart or instruction.accumulates:
        return instruction
    return replace(instruction, shows=joint.ops[instruction.op].reads[0])


def forward_only(joint: Joint) -> Program:
    """Computes the results and saves nothing; inputs stay as they are, because everything runs as a replay."""
    forward, _ = _listing(joint, joint.forward, joint.results, {}, again=True)
    return Program(forward, (), (), ())


def _listing(
    joint: Joint, order: Sequence[int], kept: Iterable[int], accumulated: dict[int, list[int]], *, again: bool
) -> tuple[tuple[Instruction, ...], set[int]]:
    """Instructions for an order, and the values that must exist before the first. Walks back from the end."""
    alive = set(kept)
    wanted = alive | accumulated.keys()
    inputs = set(joint.inputs)
    drawn: set[int] = set()
    listing = []
    for op in reversed(order):
        if op not in wanted:
            continue
        entry = joint.ops[op]
        replay = again and entry.kind == "forward"
        reads = entry.replay_reads if replay else entry.reads
        once = reads if len(reads) < 2 else dict.fromkeys(reads)
        frees = tuple([value for value in (*once, op) if value not in alive and value not in inputs])
        into = tuple(accumulated.get(op, ()))
        last_draw = replay and entry.random and op not in drawn
        listing.append(Instruction(op, replay, frees, None, into, last_draw))
        drawn.add(op)
        alive.discard(op)
        wanted.discard(op)
        alive.update(reads)
        wanted.update(reads)
    listing.reverse()
    return tuple(listing), alive


# --- prediction ----------------------------------------------------------------------------------------------


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
    """What a program will take above what is resident. One entry per instruction: bytes while it runs.

    Less than nothing where gradients that count as resident are not there yet.
    """

    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    between_bytes: int  # between forward and backward, what happens outside included
    saved_bytes: int
    time_s: float

    @property
    def peak_bytes(self) -> int:
        return max(self.between_bytes, *self.forward_bytes, *self.backward_bytes, 0)


_ALONE = Surroundings()


def predict(
    joint: Joint, program: Program, around: Surroundings = _ALONE, memory: Memory | None = None
) -> Prediction:
    """Play a program storage by storage, in an empty memory."""
    memory = memory or Memory(joint, around.state_bytes)
    for op in joint.inputs:
        memory.bring(op)
    missing = around.late_bytes
    forward = [
        memory.run(instruction, op_state=instruction.op in program.reseeded) - missing
        for instruction in program.forward
    ]
    held = {*joint.results, *program.saved}
    for op in joint.updates:
        if op not in held:
            memory.drop(op)
    memory.now += sum(joint.overwritten.get(op, 0) for op in program.saved)  # saved as copies
    saved_bytes = memory.now
    for op in joint.arriving:
        memory.bring(op)
    for op in (*joint.results, *(joint.arriving if around.keeps_arriving else ())):
        memory.pin(op)
    between = memory.now + around.outside_bytes - missing
    read = {read for i in program.backward for read in reads_of(joint, i)}
    read.update(gradient for _, gradient in joint.gradients)  # one that arrives may be returned as it is
    for op in (*joint.arriving, *joint.results):
        if op not in read:
            memory.drop(op)
    backward = []
    for instruction in program.backward:
        during = memory.run(instruction)
        copies = sum(around.late.get(i, 0) for i in instruction.accumulates if i in around.copied)
        backward.append(during + copies - missing)
        missing -= sum(around.late.get(i, 0) for i in instruction.accumulates)
    time = sum(joint.ops[i.op].time for i in (*program.forward, *program.backward) if i.shows is None)
    return Prediction(tuple(forward), tuple(backward), between, saved_bytes, time)


def bytes_between(joint: Joint, around: Surroundings) -> int:
    """Bytes between forward and backward in any program: results, what arrives, what happens outside."""
    there = {storage for op in (*joint.results, *joint.arriving) for storage in joint.storages(op)}
    return around.outside_bytes + joint.bytes_of(there)


def peak_in_a_row(programs: Iterable[tuple[int, int]]) -> int:
    """The peak of programs in a row, given the peak of each and what it saves, which stays while the next run."""
    held = top = 0
    for peak, saved in programs:
        top = max(top, held + peak)
        held += saved
    return top


def reads_of(joint: Joint, instruction: Instruction) -> tuple[int, ...]:
    entry = joint.ops[instruction.op]
    return entry.replay_reads if instruction.replay else entry.reads


def play(joint: Joint, order: Sequence[int], have: Iterable[int], kept: Iterable[int]) -> tuple[int, int]:
    """Peak and final bytes of running some operators again, given values there before, until others are left."""
    accumulated = {gradient: [i] for i, gradient in joint.gradients if i in joint.parameters}
    listing, _ = _listing(joint, order, kept, accumulated, again=True)
    memory = Memory(joint, 0)
    for op in have:
        memory.bring(op)
    peak = memory.now
    for instruction in listing:
        peak = max(peak, memory.run(replace(instruction, reuses=memory.reusable(instruction))))
    return peak, memory.now


_NOTHING: dict[int, int] = {}


class Memory:
    """Live storages: a value holds its storages, and a storage is gone when no value holds it."""

    def __init__(self, joint: Joint, state_bytes: int) -> None:
        self.joint = joint
        self.now = 0
        self._state_bytes = state_bytes
        self._sizes: list[int] = []
        self._holders: list[int] = []
        self._values: dict[int, dict[int, int]] = {}  # operator → storage → the copy of it that its value holds
        self._brought: dict[int, int] = {}
        self._from_outside: set[int] = set()
        self._lent: set[int] = set()  # storages that have become gradients of parameters, or are shown in part

    def bring(self, op: int) -> None:
        """A value that exists before the program runs. Inputs that view one another share their storage."""
        value = {}
        for storage in self.joint.storages(op):
            if storage not in self._brought:
                self._brought[storage] = self._new(self.joint.storage_bytes.get(storage, 0))
                self._from_outside.add(self._brought[storage])
            value[storage] = self._brought[storage]
        self._hold(op, value)

    def run(self, instruction: Instruction, op_state: bool = False) -> int:
        """Bytes while the instruction runs; afterwards its frees are gone."""
        entry = self.joint.ops[instruction.op]
        values = self._values
        value = {}
        if entry.shares:
            for read in reads_of(self.joint, instruction):
                for storage, copy in values.get(read, _NOTHING).items():
                    if storage in entry.shares:
                        value[storage] = copy
        if (within := instruction.reuses if instruction.shows is None else instruction.shows) is not None:
            (value[entry.makes[0][0]],) = values[within].values()
        else:
            for storage, size in entry.makes:
                value[storage] = self._new(size)
        self._hold(instruction.op, value)
        if instruction.accumulates or instruction.shows is not None:
            self._lent.update(value.values())
        draws_again = instruction.replay and entry.random
        if op_state:
            self.now += self._state_bytes
        during = self.now + entry.workspace + (self._state_bytes if draws_again else 0)
        for freed in instruction.frees:
            self.drop(freed)
        if instruction.last_draw:
            self.now -= self._state_bytes
        return during

    def reusing(self, listing: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
        """The same instructions, writing outputs over values that die, where that is safe."""
        chosen = []
        for instruction in listing:
            reuses = None if instruction.shows is not None else self.reusable(instruction)
            chosen.append(instruction if reuses is None else replace(instruction, reuses=reuses))
            self.run(chosen[-1])
        return tuple(chosen)

    def reusable(self, instruction: Instruction) -> int | None:
        """A value the operator may write over: it dies here, alone holds its storage, and the program made it.

        What came from outside stays untouched: autograd may hand it to a second backward. So does what has become
        a parameter's gradient.
        """
        entry = self.joint.ops[instruction.op]
        for read in entry.reusable:
            if read not in instruction.frees or read not in self._values:
                continue
            copies = list(self._values[read].values())
            others = (self._values.get(r, _NOTHING) for r in reads_of(self.joint, instruction) if r != read)
            if len(copies) != 1 or self._holders[copies[0]] != 1:
                continue
            untouchable = copies[0] in self._lent or copies[0] in self._from_outside
            if not untouchable and not any(copies[0] in value.values() for value in others):
                return read
        return None

    def drop(self, op: int) -> None:
        for copy in self._values.pop(op, {}).values():
            self._holders[copy] -= 1
            if not self._holders[copy]:
                self.now -= self._sizes[copy]

    def pin(self, op: int) -> None:
        """Somebody outside holds this value to the end."""
        for copy in self._values[op].values():
            self._holders[copy] += 1

    def _new(self, size: int) -> int:
        self._sizes.append(size)
        self._holders.append(0)
        return len(self._sizes) - 1

    def _hold(self, op: int, value: dict[int, int]) -> None:
        if op in self._values:
            self.drop(op)
        for copy in value.values():
            if not self._holders[copy]:
                self.now += self._sizes[copy]
            self._holders[copy] += 1
        self._values[op] = value
