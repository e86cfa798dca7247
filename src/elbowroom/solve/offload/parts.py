"""Schedules in parts: what each part of a chain does before the loss, and what it does after that.

The input of a part is the last thing saved before it: a_{s-1} on its own or, where the part before saves all, inside
ā_{s-1}. A part saves its first stage, or walks on to a later one and recomputes what it passed after the loss. Its
input stays in memory meanwhile, or goes to the host. The last part reaches the loss and comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elbowroom.problem import Chain
from elbowroom.schedule import Backward, Forward, Operation
from elbowroom.solve.offload.placing import Move


@dataclass(frozen=True, slots=True)
class Part:
    """Stages from `first` on, without those of the next part: `out` runs before the loss and `back` after it."""

    first: int
    out: tuple[Operation, ...]
    back: tuple[Operation, ...]
    moved: bool = False

    @classmethod
    def saving(cls, stage: int, way: int, moved: bool = False) -> Part:
        return cls(stage, (Forward(stage, "all", way),), (Backward(stage),), moved)

    @classmethod
    def walking(cls, first: int, stop: int, again: Sequence[Operation], moved: bool = False) -> Part:
        return cls(first, walk(first, stop), tuple(again), moved)


@dataclass(frozen=True, slots=True)
class Moving:
    """Computing operations, and the values that go to the host meanwhile."""

    computing: tuple[Operation, ...]
    moves: tuple[Move, ...] = ()


def walk(first: int, stop: int) -> tuple[Operation, ...]:
    """Forwards that keep the input of the first stage and the output of the last."""
    return (Forward(first, "input"), *(Forward(at, "nothing") for at in range(first + 1, stop + 1)))


def in_a_row(parts: Sequence[Part]) -> Moving:
    """All parts as one list: out in their order, back in the opposite one."""
    computing: list[Operation] = []
    made = []  # the operation that made each part's input
    for part in parts:
        made.append(len(computing) - 1)
        computing += part.out
    moves = []
    for number in range(len(parts) - 1, -1, -1):
        part = parts[number]
        if part.moved:
            inside = number > 0 and _saves(parts[number - 1])
            at, what = (part.first - 1, "all") if inside else (part.first, "input")
            moves.append(Move(at, what, made[number], len(computing)))  # type: ignore[arg-type]
        computing += part.back
    return Moving(tuple(computing), tuple(moves))


def sub_chain(chain: Chain, input_bytes: int, first: int, last: int) -> Chain:
    """The stages `first` to `last` as a chain of their own, from an input of so many bytes."""
    return Chain(input_bytes, chain.gradient_bytes[first - 1], chain.stages[first - 1 : last])


def shifted(operations: Sequence[Operation], by: int) -> list[Operation]:
    """Operations of a sub-chain as those of the chain in which so many stages come before."""
    found: list[Operation] = []
    for operation in operations:
        assert isinstance(operation, Forward | Backward)
        assert isinstance(operation.at, int)
        at = operation.at + by
        found.append(Forward(at, operation.save, operation.way) if isinstance(operation, Forward) else Backward(at))
    return found


def _saves(part: Part) -> bool:
    last = part.out[-1]
    return isinstance(last, Forward) and last.save == "all"
