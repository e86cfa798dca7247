"""Live storages while a program runs: a value holds its storages, and a storage is gone when no value holds it.

Whoever makes programs plays them here to see what may be written over; the referee plays them to count bytes; the
pool plays them to see where in memory values lie.
"""

from __future__ import annotations

from elbowroom.step.graph import StepGraph
from elbowroom.step.operations import Run

_NOTHING: dict[int, int] = {}


class Memory:
    """`now` is the bytes in use, `values` the values that are there: each holds, by storage, its copy of it.

    A storage is allocated anew whenever its operator runs, so *copies* have numbers of their own.
    """

    def __init__(self, graph: StepGraph, state_bytes: int) -> None:
        self.graph = graph
        self.now = 0
        self.values: dict[int, dict[int, int]] = {}
        self._ops = graph.ops
        self._state_bytes = state_bytes
        self._sizes: list[int] = []  # by copy
        self._holders: list[int] = []  # by copy: how many values hold it
        self._brought: dict[int, int] = {}
        self._from_outside: set[int] = set()
        self._lent: set[int] = set()  # copies that have become gradients of parameters, or are viewed in part

    def bring_inputs(self) -> None:
        """All inputs, into an empty memory: what `bring` does with each, in one go, for it happens thousands of
        times."""
        numbers = self.graph.input_storages
        self._brought = dict(numbers)
        self._from_outside = set(numbers.values())
        self._sizes = [self.graph.storage_bytes.get(storage, 0) for storage in numbers]
        self._holders = holders = [0] * len(numbers)
        self.now = sum(self._sizes)
        for op in self.graph.inputs:
            self.values[op] = value = {storage: numbers[storage] for storage in self._ops[op].storages}
            for copy in value.values():
                holders[copy] += 1

    def bring(self, op: int) -> None:
        """A value that exists before the program runs. Inputs that view one another share their storage."""
        value = {}
        for storage in self._ops[op].storages:
            if storage not in self._brought:
                self._brought[storage] = self._new(self.graph.storage_bytes.get(storage, 0))
                self._from_outside.add(self._brought[storage])
            value[storage] = self._brought[storage]
        self._hold(op, value)

    def run(self, run: Run, keeps_state: bool = False) -> int:
        """Bytes while an operator runs; afterwards what it frees is gone.

        `keeps_state`: a random operator's first run, before which its generator's state is put aside.
        """
        entry = self._ops[run.op]
        values = self.values
        value: dict[int, int] = {}
        if entry.shares:
            for read in entry.rerun_reads if run.again else entry.reads:
                for storage, copy in values.get(read, _NOTHING).items():
                    if storage in entry.shares:
                        value[storage] = copy
        within = run.reuses if run.viewed_in is None else run.viewed_in
        if within is not None:
            (value[entry.makes[0][0]],) = values[within].values()
        else:
            for storage, size in entry.makes:
                value[storage] = self._new(size)
        if run.op in values:
            self.drop(run.op)
        sizes, holders = self._sizes, self._holders
        for copy in value.values():
            if not holders[copy]:
                self.now += sizes[copy]
            holders[copy] += 1
        values[run.op] = value
        if run.accumulates or run.viewed_in is not None:
            self._lent.update(value.values())
        during = entry.workspace
        if keeps_state or (run.again and entry.random and not entry.draws_privately):
            # When it has drawn, one state more is looked at: where the generator is then.
            during = max(during, self._state_bytes)
            if keeps_state:
                self.now += self._state_bytes
            else:
                during += self._state_bytes  # to put the generator back
        during += self.now
        for freed in run.frees:
            self.drop(freed)
        if run.last_draw:
            self.now -= self._state_bytes
        return during

    def take(self, value: int, key: int) -> None:
        """Memory for a value that is copied here, held under another key until it has arrived."""
        storages = self._ops[value].storages
        self._hold(key, {storage: self._new(self.graph.storage_bytes.get(storage, 0)) for storage in storages})

    def rename(self, key: int, value: int) -> None:
        """What was held under a key is a value from now on."""
        self.values[value] = self.values.pop(key)

    def may_write_over(self, read: int, run_frees: tuple[int, ...], reads: tuple[int, ...]) -> bool:
        """Whether an output may be written over a value: it dies there, alone holds its storage, and the program made
        it.

        What came from outside stays untouched: autograd may hand it to a second backward. So does what has become
        a parameter's gradient.
        """
        values = self.values
        if read not in run_frees or read not in values:
            return False
        copies = list(values[read].values())
        if len(copies) != 1 or self._holders[copies[0]] != 1:
            return False
        (copy,) = copies
        if copy in self._lent or copy in self._from_outside:
            return False
        return not any(copy in values.get(other, _NOTHING).values() for other in reads if other != read)

    def drop(self, op: int) -> None:
        for copy in self.values.pop(op, _NOTHING).values():
            self._holders[copy] -= 1
            if not self._holders[copy]:
                self.now -= self._sizes[copy]

    def bytes_of(self, op: int) -> int:
        """Of the storages that a value lies in."""
        return sum(self._sizes[copy] for copy in self.values[op].values())

    def protect(self, op: int) -> None:
        """Nothing may be written over this value: autograd may hand it to a second backward."""
        self._from_outside.update(self.values[op].values())

    def pin(self, op: int) -> None:
        """Somebody outside holds this value to the end."""
        for copy in self.values[op].values():
            self._holders[copy] += 1

    def _new(self, size: int) -> int:
        self._sizes.append(size)
        self._holders.append(0)
        return len(self._sizes) - 1

    def _hold(self, op: int, value: dict[int, int]) -> None:
        if op in self.values:
            self.drop(op)
        holders = self._holders
        for copy in value.values():
            if not holders[copy]:
                self.now += self._sizes[copy]
            holders[copy] += 1
        self.values[op] = value
