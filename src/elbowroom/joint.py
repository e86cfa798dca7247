"""One captured training step: the operators of forward and backward, what each reads, and the bytes it makes.

A `Joint` is what capture hands to the planner. It knows operators by number and storages by number, and nothing
of PyTorch: cutting it into stages, choosing what to save and predicting memory are plain arithmetic on it.

Operators are numbered in an order in which they can run: inputs first (parameters, buffers, the batch, then the
gradients that arrive from outside), then the forward, then the backward. A *storage* is one allocation; views
share it. Running an operator again makes new storages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Kind = Literal["input", "gradient", "forward", "backward"]


@dataclass(slots=True)
class Op:
    """One operator of the joint graph.

    `replay_reads` is what a second run reads: BatchNorm, for one, leaves its running statistics alone then.
    `makes` lists the storages it allocates with their bytes, `shares` those of its inputs that its outputs view.
    """

    index: int
    name: str
    target: str
    kind: Kind
    reads: tuple[int, ...]
    replay_reads: tuple[int, ...]
    makes: tuple[tuple[int, int], ...]
    shares: tuple[int, ...]
    module: str = ""
    sequence: int | None = None  # autograd's number of the forward operator that a backward one belongs to
    fused_sequences: tuple[int, ...] = ()  # those of operators that run inside it
    random: bool = False
    reusable: tuple[int, ...] = ()  # what it reads that it could write its output over
    storable: bool = True  # whether its value is a tensor that can be kept for the backward
    time: float = 0.0
    workspace: int = 0
    key: str = ""  # equal keys: the same operator on the same shapes

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.makes)

    @property
    def storages(self) -> tuple[int, ...]:
        """All that its value keeps alive."""
        return (*(storage for storage, _ in self.makes), *self.shares)

    @property
    def is_view(self) -> bool:
        """Whether running it costs next to nothing and allocates nothing."""
        return not self.makes and bool(self.shares)


@dataclass(slots=True)
class Joint:
    """A step's operators, and which of their values leave it.

    `results` are the values the forward program returns to the caller, `updates` those among its outputs that
    only overwrite inputs and die at once; `effects` run because they change an input themselves. `gradients` pairs
    each differentiated input with the value of its gradient; `parameters` are the inputs whose gradient is
    accumulated inside the program. `kept` are forward operators that never run a second time. `apart` are copies of
    parts of values, made so that the rest can go; a program may do without them.
    """

    ops: list[Op]
    inputs: tuple[int, ...]
    arriving: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    results: tuple[int, ...]
    updates: tuple[int, ...]
    gradients: tuple[tuple[int, int], ...]
    parameters: frozenset[int]
    effects: tuple[int, ...] = ()
    overwritten: dict[int, int] = field(default_factory=dict)  # inputs the step mutates, with their bytes
    storage_bytes: dict[int, int] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    apart: frozenset[int] = frozenset()

    def with_parts_shown(self) -> Joint:
        """The same without the copies in `apart`: each is a view of what it would be a copy of."""
        whole: dict[int, int] = {}
        ops: list[Op] = []
        for op in self.ops:
            shares = tuple(dict.fromkeys(whole.get(storage, storage) for storage in op.shares))
            if op.index in self.apart:
                (base,) = ops[op.reads[0]].storages
                whole[op.makes[0][0]] = base
                ops.append(replace(op, makes=(), shares=(base,), time=0.0))
            else:
                reusable = tuple(read for read in op.reusable if read not in self.apart)
                ops.append(replace(op, shares=shares, reusable=reusable))
        return replace(self, ops=ops, apart=frozenset())

    def bytes_of(self, storages: Sequence[int] | set[int] | frozenset[int]) -> int:
        sizes = self.storage_bytes
        return sum(sizes.get(storage, 0) for storage in storages)

    def storages(self, op: int) -> tuple[int, ...]:
        """Every storage that the value of an operator keeps alive."""
        return self.ops[op].storages
