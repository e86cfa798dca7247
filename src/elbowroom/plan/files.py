"""Plan files: a graph's plan as JSON, written in one format and read in two.

Format 2 holds the operations of the program, whether it is replayed as CUDA graphs, and what was predicted apart from
what was measured. Format 1 held an order of operators, and one peak, whichever it was. Nothing that a file says of
memory is believed when it is loaded: the referee plays the program again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from elbowroom.errors import InputError
from elbowroom.plan.moved import MovedValue, MoveSpan, Traffic
from elbowroom.plan.regions import ModulePlan, Order, RegionPlan
from elbowroom.plan.stages.structure import Structure
from elbowroom.problem.platform import Platform
from elbowroom.problem.validation import Prefix, as_object
from elbowroom.step.operations import operations_from_json
from elbowroom.step.program import Program
from elbowroom.units import MAX_BYTES

FORMAT = 2
READABLE = (1, 2)

_LINK = ("bandwidth", "to_host", "from_host", "duplex", "seconds_per_copy")


def shown_formats() -> str:
    return " and ".join(map(str, READABLE))


def region_to_json(region: RegionPlan) -> dict[str, Any]:
    data = {name: getattr(region, name) for name in region.__dataclass_fields__}
    data["program"] = _program_to_json(region.program)
    data["modules"] = [asdict(module) for module in region.modules]
    data["structure"] = region.structure and asdict(region.structure)
    data["traffic"] = region.traffic and _traffic_to_json(region.traffic)
    return data


def region_from_json(data: Any, written_format: int, field: str) -> RegionPlan:
    fields = Fields(data, field)
    if written_format == 1:
        return _first_format(fields)
    forward_levels, backward_levels = fields.levels("forward_levels"), fields.levels("backward_levels")
    return RegionPlan(
        program=_program_from_json(fields.get("program"), f"{field}.program"),
        predicted_peak_bytes=fields.size("predicted_peak_bytes"),
        measured_peak_bytes=fields.size("measured_peak_bytes") if fields.has("measured_peak_bytes") else None,
        recorded=fields.flag("recorded"),
        forward_levels=forward_levels,
        backward_levels=backward_levels,
        traffic=_traffic_from_json(fields, len(forward_levels) + len(backward_levels)),
        modules=tuple(_module(each, f"{field}.modules[{i}]") for i, each in fields.each("modules")),
        **_common(fields),
    )


def _first_format(fields: Fields) -> RegionPlan:
    order = tuple(fields.numbers("order"))
    levels = fields.levels("timeline")
    turn = len(levels) - len(order) - 1
    if turn < 0:
        raise InputError(f"{fields.field}.timeline", f"has {len(levels)} entries for {len(order)} operators")
    copies_parts = fields.flag("apart", True)
    return RegionPlan(
        program=Order(order, copies_parts) if order else None,
        predicted_peak_bytes=fields.size("peak_bytes"),
        forward_levels=levels[:turn],
        backward_levels=levels[turn:],
        modules=tuple(_module(_renamed(each), f"{fields.field}.modules[{i}]") for i, each in fields.each("modules")),
        **_common(fields),
    )


def _common(fields: Fields) -> dict[str, Any]:
    """What both formats have."""
    return {
        "fingerprint": fields.text("fingerprint"),
        "method": fields.text("method"),
        "saved_bytes": fields.size("saved_bytes"),
        "time_s": fields.seconds("time_s"),
        "plain_peak_bytes": fields.size("plain_peak_bytes"),
        "plain_saved_bytes": fields.size("plain_saved_bytes"),
        "plain_time_s": fields.seconds("plain_time_s"),
        "structure": _structure(fields),
        "why": fields.text("why", ""),
    }


def _structure(fields: Fields) -> Structure | None:
    if not fields.has("structure"):
        return None
    inner = Fields(fields.get("structure"), f"{fields.field}.structure")
    return Structure(inner.text("kind"), inner.text("why"))  # type: ignore[arg-type]


def _renamed(module: Any) -> Any:
    if not isinstance(module, Mapping):
        return module
    names = {"replays": "reruns", "replay_time_s": "rerun_time_s"}
    return {names.get(name, name): value for name, value in module.items()}


def _module(data: Any, field: str) -> ModulePlan:
    fields = Fields(data, field)
    return ModulePlan(
        module=fields.text("module"),
        operators=fields.size("operators"),
        saved_bytes=fields.size("saved_bytes"),
        reruns=fields.size("reruns"),
        forward_time_s=fields.seconds("forward_time_s"),
        rerun_time_s=fields.seconds("rerun_time_s"),
        moved_bytes=fields.size("moved_bytes") if fields.has("moved_bytes") else 0,
    )


def _program_to_json(program: Program | Order | None) -> dict[str, Any] | None:
    if program is None:
        return None
    if isinstance(program, Order):
        return {"order": list(program.ops), "copies_parts": program.copies_parts}
    return {
        "forward": [operation.to_json() for operation in program.forward],
        "backward": [operation.to_json() for operation in program.backward],
        "saved": list(program.saved),
        "reseeded": list(program.reseeded),
    }


def _program_from_json(data: Any, field: str) -> Program | Order | None:
    if data is None:
        return None
    fields = Fields(data, field)
    if fields.has("order"):
        return Order(tuple(fields.numbers("order")), fields.flag("copies_parts"))
    return Program(
        operations_from_json(fields.get("forward"), f"{field}.forward"),
        operations_from_json(fields.get("backward"), f"{field}.backward"),
        tuple(fields.numbers("saved")),
        tuple(fields.numbers("reseeded")),
    )


# --- what moves ----------------------------------------------------------------------------------------------


def _traffic_to_json(traffic: Traffic) -> dict[str, Any]:
    data = asdict(traffic)
    data["waits_at"] = list(traffic.waits_at)
    return data


def _traffic_from_json(fields: Fields, count: int) -> Traffic | None:
    """What moves in a graph of so many operations; None if nothing does, and in files that do not tell."""
    if not fields.has("traffic"):
        return None
    inner = Fields(fields.get("traffic"), f"{fields.field}.traffic")
    return Traffic(
        host_bytes=inner.size("host_bytes"),
        copying_s=inner.seconds("copying_s"),
        waits_s=inner.seconds("waits_s"),
        waits_at=inner.numbers("waits_at", below=count),
        values=tuple(_moved_value(Fields(each, f"{inner.field}.values[{i}]")) for i, each in inner.each("values")),
        transfers=tuple(
            _transfer(Fields(each, f"{inner.field}.transfers[{i}]"), count) for i, each in inner.each("transfers")
        ),
    )


def _moved_value(fields: Fields) -> MovedValue:
    return MovedValue(fields.size("value"), fields.text("module"), fields.size("bytes"))


def _transfer(fields: Fields, count: int) -> MoveSpan:
    direction = fields.get("direction")
    if direction not in ("to host", "from host"):
        raise InputError(f"{fields.field}.direction", 'must be "to host" or "from host"')
    begins, ends = fields.size("begins", below=count), fields.size("ends", below=count)
    if ends < begins:
        raise InputError(f"{fields.field}.ends", f"must not be before it begins, at {begins}")
    return MoveSpan(direction, fields.size("value"), fields.size("bytes"), begins, ends)


def platform_to_json(platform: Platform | None) -> dict[str, Any]:
    """The two fields of a plan that say for which link, and for how much of the host's memory, it was made."""
    link = {name: getattr(platform, name) for name in _LINK} if platform is not None else None
    return {"link": link, "host_budget_bytes": None if platform is None else platform.host_bytes}


def platform_from_json(fields: Fields) -> Platform | None:
    if not fields.has("link"):
        return None
    link = Fields(fields.get("link"), f"{fields.field}.link")
    host_bytes = fields.size("host_budget_bytes") if fields.has("host_budget_bytes") else None
    with Prefix(link.field):
        as_object(link.data, _LINK)
        return Platform(**{name: link.data[name] for name in _LINK if link.has(name)}, host_bytes=host_bytes)


# --- fields --------------------------------------------------------------------------------------------------

_MISSING = object()


class Fields:
    """The fields of a JSON object, each taken out as what it must be; an `InputError` names the one that is not."""

    def __init__(self, data: Any, field: str) -> None:
        if not isinstance(data, Mapping):
            raise InputError(field, "must be an object")
        self.data = data
        self.field = field

    def has(self, name: str) -> bool:
        return self.data.get(name) is not None

    def get(self, name: str, default: Any = _MISSING) -> Any:
        found = self.data.get(name, default)
        if found is _MISSING:
            raise self._wrong(name, "missing")
        return found

    def size(self, name: str, *, below: int = MAX_BYTES + 1) -> int:
        return _whole(self.get(name), f"{self.field}.{name}", 0, below - 1)

    def seconds(self, name: str) -> float:
        value = self.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise self._wrong(name, "must be a number of seconds")
        return float(value)

    def text(self, name: str, default: Any = _MISSING) -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "must be text")
        return value

    def flag(self, name: str, default: Any = _MISSING) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "must be true or false")
        return value

    def list(self, name: str, default: Any = _MISSING) -> Any:
        value = self.get(name, default)
        if not isinstance(value, list | tuple):
            raise self._wrong(name, "must be a list")
        return value

    def each(self, name: str) -> Iterator[tuple[int, Any]]:
        """The entries of a list, counted."""
        return enumerate(self.list(name))

    def numbers(self, name: str, *, below: int = MAX_BYTES + 1) -> tuple[int, ...]:
        return tuple(_whole(each, f"{self.field}.{name}[{i}]", 0, below - 1) for i, each in self.each(name))

    def levels(self, name: str) -> tuple[int, ...]:
        """Bytes, less than nothing where gradients that count as resident are not there yet."""
        return tuple(_whole(each, f"{self.field}.{name}[{i}]", -MAX_BYTES) for i, each in self.each(name))

    def sizes(self, name: str) -> dict[str, int]:
        inner = Fields(self.get(name), f"{self.field}.{name}")
        return {str(key): inner.size(key) for key in inner.data}

    def texts(self, name: str) -> dict[str, str]:
        inner = Fields(self.get(name), f"{self.field}.{name}")
        return {str(key): inner.text(key) for key in inner.data}

    def _wrong(self, name: str, problem: str) -> InputError:
        return InputError(f"{self.field}.{name}", problem)


def _whole(value: Any, field: str, least: int, most: int = MAX_BYTES) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(field, "must be a whole number")
    if not least <= value <= most:
        raise InputError(field, f"must be between {least} and {'2^60' if most == MAX_BYTES else most}")
    return value
