"""The vocabulary of programs: five operations, read and written as short JSON lists.

A program is a plain sequence of these. The referee, the pool, the emitter and the writer of fused graphs are
interpreters of the same list, and none of them knows which planner wrote it. A value is named by the number of the
operator that computes it.

Moving a value to the host and back takes four operations, so that every wait has a place in the program:

    offload   a copy to the host begins; the value is still on the device
    release   computing waits until that copy is there, then the device's memory is given back
    prefetch  the value's memory is taken on the device, and the copy back begins
    await     computing waits until that copy is there; from here on the value can be read
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from elbowroom.errors import InputError


@dataclass(frozen=True, slots=True)
class Run:
    """`["run", 7, {"again": true, "frees": [5]}]`: run operator 7 a second time, then free value 5.

    `again`: a forward operator that runs in the backward. `frees`: values that nobody reads afterwards. `reuses`: the
    output is written over this value. `accumulates`: its value is added to the gradients of these inputs.
    `last_draw`: a random operator that does not run again, so that the generator's state kept for it goes, too.
    `viewed_in`: a copy of a part that is not made; it stays a view of this value.
    """

    op: int
    again: bool = False
    frees: tuple[int, ...] = ()
    reuses: int | None = None
    accumulates: tuple[int, ...] = ()
    last_draw: bool = False
    viewed_in: int | None = None

    def to_json(self) -> list[Any]:
        given: dict[str, Any] = {}
        if self.again:
            given["again"] = True
        if self.frees:
            given["frees"] = list(self.frees)
        if self.reuses is not None:
            given["reuses"] = self.reuses
        if self.accumulates:
            given["accumulates"] = list(self.accumulates)
        if self.last_draw:
            given["last_draw"] = True
        if self.viewed_in is not None:
            given["viewed_in"] = self.viewed_in
        return ["run", self.op, given] if given else ["run", self.op]


@dataclass(frozen=True, slots=True)
class Offload:
    """`["offload", 7]`: begin to copy value 7 to the host."""

    value: int

    def to_json(self) -> list[Any]:
        return ["offload", self.value]


@dataclass(frozen=True, slots=True)
class Release:
    """`["release", 7]`: once value 7 is on the host, give its memory on the device back."""

    value: int

    def to_json(self) -> list[Any]:
        return ["release", self.value]


@dataclass(frozen=True, slots=True)
class Prefetch:
    """`["prefetch", 7]`: take memory for value 7 on the device and begin to copy it back.

    `["prefetch", 7, "keep"]`: its copy on the host stays, so that it can be released again without another copy.
    """

    value: int
    keeps: bool = False

    def to_json(self) -> list[Any]:
        return ["prefetch", self.value, *(["keep"] if self.keeps else [])]


@dataclass(frozen=True, slots=True)
class Await:
    """`["await", 7]`: wait until value 7 is back on the device."""

    value: int

    def to_json(self) -> list[Any]:
        return ["await", self.value]


Move: TypeAlias = Offload | Release | Prefetch | Await
Operation: TypeAlias = Run | Move

_MOVES: dict[str, type[Offload] | type[Release] | type[Prefetch] | type[Await]] = {
    "offload": Offload,
    "release": Release,
    "prefetch": Prefetch,
    "await": Await,
}
_RUN_FIELDS = ("again", "frees", "reuses", "accumulates", "last_draw", "viewed_in")


# --- reading -------------------------------------------------------------------------------------------------


def operations_from_json(data: Any, field: str) -> tuple[Operation, ...]:
    """The operations written in decoded JSON; an `InputError` names the entry that is malformed."""
    if not isinstance(data, list):
        raise InputError(field, "must be a list of operations")
    return tuple(_operation(item, f"{field}[{i}]") for i, item in enumerate(data))


def _operation(item: Any, field: str) -> Operation:
    if not isinstance(item, list) or len(item) < 2 or not isinstance(item[0], str):
        raise InputError(field, 'must be a list such as ["run", 7]')
    name, value, *rest = item
    number = _number(value, f"{field}[1]")
    if name == "run":
        if len(rest) > 1 or (rest and not isinstance(rest[0], dict)):
            raise InputError(f"{field}[2]", "must be an object, and the last entry")
        return _run(number, rest[0] if rest else {}, f"{field}[2]")
    if name == "prefetch" and rest == ["keep"]:
        return Prefetch(number, keeps=True)
    if name not in _MOVES:
        raise InputError(f"{field}[0]", f"{name!r:.40} is not one of run, {', '.join(_MOVES)}")
    if rest:
        raise InputError(field, f"{name} takes one value")
    return _MOVES[name](number)


def _run(op: int, given: dict[str, Any], field: str) -> Run:
    unknown = [name for name in given if name not in _RUN_FIELDS]
    if unknown:
        raise InputError(field, f"has no {unknown[0]!r:.40}; it takes {', '.join(_RUN_FIELDS)}")
    return Run(
        op,
        again=_flag(given.get("again", False), f"{field}.again"),
        frees=_numbers(given.get("frees", []), f"{field}.frees"),
        reuses=_number_or_none(given.get("reuses"), f"{field}.reuses"),
        accumulates=_numbers(given.get("accumulates", []), f"{field}.accumulates"),
        last_draw=_flag(given.get("last_draw", False), f"{field}.last_draw"),
        viewed_in=_number_or_none(given.get("viewed_in"), f"{field}.viewed_in"),
    )


def _number(value: Any, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(field, "must be the number of an operator, from 0")
    return value


def _number_or_none(value: Any, field: str) -> int | None:
    return None if value is None else _number(value, field)


def _numbers(value: Any, field: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise InputError(field, "must be a list of operators' numbers")
    return tuple(_number(each, f"{field}[{i}]") for i, each in enumerate(value))


def _flag(value: Any, field: str) -> bool:
    if not isinstance(value, bool):
        raise InputError(field, "must be true or false")
    return value
