"""The vocabulary of schedules: six operations, read and written as short JSON lists.

A schedule is a plain sequence of these. The simulator, the executor and the printer are three interpreters of
the same list, and none of them knows which solver wrote it.

A position is a stage number from 1 in a chain, a `(branch, step)` pair from 1 in a join, a node number from 0
(as in its `edges`) in a graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from elbowroom.errors import InputError
from elbowroom.problem.validation import Prefix, as_object, kind_of_value

Position: TypeAlias = int | tuple[int, int]
Save: TypeAlias = Literal["nothing", "input", "all"]
What: TypeAlias = Literal["input", "all"]


@dataclass(frozen=True, slots=True)
class Forward:
    """`["forward", 3, "input"]`: run stage 3's forward and keep its input.

    `"nothing"` lets go of the input once the output is there; `"input"` keeps it; `"all"` also keeps
    everything the backward needs, saved in way number `way` (`["forward", 3, "all", 1]`).
    """

    at: Position
    save: Save = "nothing"
    way: int = 0

    def to_json(self) -> list[Any]:
        return ["forward", _position_json(self.at), self.save, *([self.way] if self.way else [])]


@dataclass(frozen=True, slots=True)
class Backward:
    """`["backward", 3]`: turn the gradient of stage 3's output into that of its input."""

    at: Position

    def to_json(self) -> list[Any]:
        return ["backward", _position_json(self.at)]


@dataclass(frozen=True, slots=True)
class Loss:
    """`["loss"]`: where the branches of a join meet; every branch's output becomes its gradient."""

    def to_json(self) -> list[Any]:
        return ["loss"]


@dataclass(frozen=True, slots=True)
class Offload:
    """`["offload", 3, "all"]`: start copying stage 3's saved set (or its input) to the host.

    Where a copy of it is there already (see `keep` below), nothing is copied: its memory is given back.
    """

    at: Position
    what: What

    def to_json(self) -> list[Any]:
        return ["offload", _position_json(self.at), self.what]


@dataclass(frozen=True, slots=True)
class Prefetch:
    """`["prefetch", 3, "all"]`: start bringing an offloaded saved set (or input) back.

    `["prefetch", 3, "all", {"keep": true, "start": 17}]`: the copy on the host stays, and the transfer is asked for
    only when operation 17 of the schedule, a later one, begins.
    """

    at: Position
    what: What
    keep: bool = False
    start: int | None = None

    def to_json(self) -> list[Any]:
        how: dict[str, Any] = {"keep": True} if self.keep else {}
        if self.start is not None:
            how["start"] = self.start
        return ["prefetch", _position_json(self.at), self.what, *([how] if how else [])]


@dataclass(frozen=True, slots=True)
class Discard:
    """`["discard", 3, "input"]`: drop stage 3's input (or its saved set) from memory."""

    at: Position
    what: What = "input"

    def to_json(self) -> list[Any]:
        return ["discard", _position_json(self.at), self.what]


Operation: TypeAlias = Forward | Backward | Loss | Offload | Prefetch | Discard
Schedule: TypeAlias = Sequence[Operation]

_MOVES: dict[str, type[Offload] | type[Prefetch] | type[Discard]] = {
    "offload": Offload,
    "prefetch": Prefetch,
    "discard": Discard,
}


def schedule_to_json(schedule: Schedule) -> list[list[Any]]:
    return [operation.to_json() for operation in schedule]


def schedule_from_json(data: Any, field: str = "schedule") -> tuple[Operation, ...]:
    """The operations written in decoded JSON; an `InputError` names the entry that is malformed."""
    if not isinstance(data, list | tuple):
        raise InputError(field, "must be a list of operations")
    return tuple(_operation(item, f"{field}[{i}]") for i, item in enumerate(data))


def show(operation: Operation) -> str:
    """`forward 3 all`, for messages and tables."""
    return " ".join(_flat(operation.to_json()))


def _operation(item: Any, field: str) -> Operation:
    if not isinstance(item, list | tuple) or not item or not isinstance(item[0], str):
        raise InputError(field, 'must be a list such as ["forward", 3, "all"]')
    name, rest = item[0], list(item[1:])
    if name == "loss":
        _expect_length(rest, 0, 0, name, field)
        return Loss()
    if name == "backward":
        _expect_length(rest, 1, 1, name, field)
        return Backward(_position(rest[0], f"{field}[1]"))
    if name == "forward":
        _expect_length(rest, 2, 3, name, field)
        way = rest[2] if len(rest) == 3 else 0
        if isinstance(way, bool) or not isinstance(way, int) or way < 0:
            raise InputError(f"{field}[3]", "must be the number of an alternative, from 0")
        save = _word(rest[1], ("nothing", "input", "all"), f"{field}[2]")
        if way and save != "all":
            raise InputError(f"{field}[3]", "names a way to save, but this forward does not save all")
        return Forward(_position(rest[0], f"{field}[1]"), save, way)  # type: ignore[arg-type]
    if name in _MOVES:
        _expect_length(rest, 2, 3 if name == "prefetch" else 2, name, field)
        at, what = _position(rest[0], f"{field}[1]"), _word(rest[1], ("input", "all"), f"{field}[2]")
        if len(rest) == 3:
            with Prefix(f"{field}[3]"):
                return Prefetch(at, what, *_how(rest[2]))  # type: ignore[arg-type]
        return _MOVES[name](at, what)  # type: ignore[arg-type]
    raise InputError(f"{field}[0]", f"{name!r:.40} is not one of forward, backward, loss, {', '.join(_MOVES)}")


def _how(data: Any) -> tuple[bool, int | None]:
    """Whether a prefetch keeps the copy on the host, and the operation with which it starts."""
    data = as_object(data, allowed=("keep", "start"))
    keep, start = data.get("keep", False), data.get("start")
    if not isinstance(keep, bool):
        raise InputError("keep", f"must be true or false, not {kind_of_value(keep)}")
    if start is not None and (isinstance(start, bool) or not isinstance(start, int) or start < 0):
        raise InputError("start", "must be the number of an operation, from 0")
    return keep, start


def _position(value: Any, field: str) -> Position:
    pair = isinstance(value, list | tuple)
    numbers: Iterable[Any] = value if pair else (value,)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            raise InputError(field, "must be a stage number, or [chain, step] in a join")
    if not pair:
        return value  # type: ignore[no-any-return]
    if len(value) != 2:
        raise InputError(field, f"must be [chain, step], got {len(value)} numbers")
    return value[0], value[1]


def _word(value: Any, allowed: tuple[str, ...], field: str) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise InputError(field, f"must be one of {', '.join(allowed)}")
    return value


def _expect_length(rest: list[Any], least: int, most: int, name: str, field: str) -> None:
    if not least <= len(rest) <= most:
        raise InputError(field, f"{name} takes {least if least == most else f'{least} or {most}'} arguments")


def _position_json(at: Position) -> int | list[int]:
    return list(at) if isinstance(at, tuple) else at


def _flat(item: Any) -> Iterable[str]:
    for part in item:
        if isinstance(part, dict):
            yield from (f"{key} {value}" if value is not True else key for key, value in part.items())
        else:
            yield str(part)
