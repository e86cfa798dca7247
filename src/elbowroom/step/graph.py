"""One captured training step: the operators of forward and backward, what each reads, and the bytes it makes.

A `StepGraph` is what capture hands to the planner. It knows operators by number and storages by number, and nothing
of PyTorch: cutting it into stages, choosing what to save and predicting memory are plain arithmetic on it. It never
changes: measuring the operators gives another graph, with their times in it.

Operators are numbered in an order in which they can run: inputs first (parameters, buffers, the batch, then the
gradients that arrive from outside), then the forward, then the backward. A *storage* is one allocation; views
share it. Running an operator again makes new storages. A *value* is what an operator computes, and has its number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

Kind = Literal["input", "gradient", "forward", "backward"]


class Cost(NamedTuple):
    """What was measured of an operator. `makes` are its storages with their real bytes, if tracing was wrong."""

    time: float
    workspace: int
    makes: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of a step.

    `rerun_reads` is what it reads when it runs again: BatchNorm, for one, leaves its running statistics alone then.
    `makes` lists the storages it allocates with their bytes, `shares` those of its inputs that its outputs view.
    `storages` is all that its value keeps alive: both together.
    """

    index: int
    name: str
    target: str
    kind: Kind
    reads: tuple[int, ...]
    rerun_reads: tuple[int, ...]
    makes: tuple[tuple[int, int], ...]
    shares: tuple[int, ...]
    module: str = ""
    sequence: int | None = None  # autograd's number of the forward operator that a backward one belongs to
    fused_sequences: tuple[int, ...] = ()  # those of operators that run inside it
    random: bool = False
    draws_privately: bool = False  # whether it can draw again from a generator that nobody else draws from
    reusable: tuple[int, ...] = ()  # what it reads that it could write its output over
    storable: bool = True  # whether its value is a tensor that can be kept for the backward
    time: float = 0.0
    workspace: int = 0
    key: str = ""  # equal keys: the same operator on the same shapes
    storages: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "storages", (*(storage for storage, _ in self.makes), *self.shares))

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.makes)

    @property
    def is_view(self) -> bool:
        """Whether running it costs next to nothing and allocates nothing."""
        return not self.makes and bool(self.shares)


@dataclass(frozen=True)
class StepGraph:
    """A step's operators, and which of their values leave it.

    `results` are the values the forward program returns to the caller, `updates` those among its outputs that
    only overwrite inputs and die at once; `effects` run because they change an input themselves, or check something.
    `gradients` pairs each differentiated input with the value of its gradient; `parameters` are the inputs whose
    gradient is accumulated inside the program. `kept` are forward operators that never run a second time.
    `part_copies` are copies of parts of values, made so that the rest can go; a program may do without them.
    """

    ops: tuple[Operator, ...]
    inputs: tuple[int, ...]
    arriving: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    results: tuple[int, ...]
    updates: tuple[int, ...]
    gradients: tuple[tuple[int, int], ...]
    parameters: frozenset[int]
    effects: tuple[int, ...] = ()
    overwritten: Mapping[int, int] = field(default_factory=dict)  # inputs the step mutates, with their bytes
    storage_bytes: Mapping[int, int] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    part_copies: frozenset[int] = frozenset()

    def with_costs(self, costs: Mapping[int, Cost]) -> StepGraph:
        """The same step with measured times and workspaces, by operator; others keep what they had."""
        ops = list(self.ops)
        sizes = dict(self.storage_bytes)
        for index, cost in costs.items():
            makes = ops[index].makes if cost.makes is None else cost.makes
            ops[index] = replace(ops[index], time=cost.time, workspace=cost.workspace, makes=makes)
            if cost.makes is not None:
                sizes.update(cost.makes)
        return replace(self, ops=tuple(ops), storage_bytes=sizes)

    def with_parts_viewed(self) -> StepGraph:
        """The same without the copies in `part_copies`: each is a view of what it would be a copy of."""
        whole: dict[int, int] = {}
        ops: list[Operator] = []
        for op in self.ops:
            shares = tuple(dict.fromkeys(whole.get(storage, storage) for storage in op.shares))
            if op.index in self.part_copies:
                (base,) = ops[op.reads[0]].storages
                whole[op.makes[0][0]] = base
                ops.append(replace(op, makes=(), shares=(base,), time=0.0))
            else:
                reusable = tuple(read for read in op.reusable if read not in self.part_copies)
                ops.append(replace(op, shares=shares, reusable=reusable))
        return replace(self, ops=tuple(ops), part_copies=frozenset())

    @cached_property
    def runs_made(self) -> dict[object, object]:
        """Runs that were made for programs of this graph, so that equal ones are one object: programs that are
        planned have most of theirs in common."""
        return {}

    @cached_property
    def input_storages(self) -> Mapping[int, int]:
        """A number for each storage of the inputs, in order; inputs that view one another share some."""
        storages = dict.fromkeys(storage for op in self.inputs for storage in self.ops[op].storages)
        return {storage: number for number, storage in enumerate(storages)}

    def unreached(self, absent: set[int]) -> frozenset[int]:
        """Inputs that have a gradient, and none if only the arriving gradients in `absent` are missing."""
        return frozenset(i for i, sources in self._gradient_sources.items() if sources and sources <= absent)

    @cached_property
    def _gradient_sources(self) -> Mapping[int, frozenset[int]]:
        """For each input that has a gradient: the arriving gradients that it is computed from."""
        sources = {op: frozenset((op,)) for op in self.arriving}
        for op in self.backward:
            sources[op] = frozenset().union(*(sources.get(read, ()) for read in self.ops[op].reads))
        return {i: sources.get(gradient, frozenset()) for i, gradient in self.gradients}

    def bytes_of(self, storages: Iterable[int]) -> int:
        sizes = self.storage_bytes
        return sum(sizes.get(storage, 0) for storage in storages)

    def value_bytes(self, op: int) -> int:
        """Bytes of all storages that a value keeps alive."""
        return self.bytes_of(set(self.ops[op].storages))

    def storages(self, op: int) -> tuple[int, ...]:
        """Every storage that the value of an operator keeps alive."""
        return self.ops[op].storages

    def copied_bytes(self, op: int) -> int:
        """What a copy takes, as which a value is saved that shows an input which the step overwrites; else 0."""
        shown = self.ops[op].storages
        return sum(size for i, size in self.overwritten.items() if not set(shown).isdisjoint(self.ops[i].storages))
