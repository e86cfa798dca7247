"""Turning what people and files give into sound values, or an `InputError` that names the field."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from elbowroom.errors import InputError
from elbowroom.units import MAX_BYTES

Json: TypeAlias = dict[str, Any]

MAX_TIME = 1e18
MAX_ITEMS = 10_000_000


class Prefix:
    """Puts where we are in front of the field that an InputError names."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, InputError):
            problem = str(error).removeprefix(f"{error.field}: ")
            field = f"{self.prefix}.{error.field}" if error.field else self.prefix
            raise InputError(field, problem) from None


def assign(target: object, field: str, value: Any) -> None:
    """Store a normalized value in a frozen dataclass while it is being made."""
    object.__setattr__(target, field, value)


def as_object(data: Any, allowed: Iterable[str], required: Iterable[str] = ()) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise InputError("", f"must be an object, not {kind_of_value(data)}")
    allowed = tuple(allowed)
    for key in data:
        if key not in allowed:
            close = difflib.get_close_matches(str(key)[:80], allowed, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known fields: {', '.join(allowed)}"
            raise InputError(f"{str(key)[:80]}", f"is not a field here; {hint}")
    for key in required:
        if key not in data:
            raise InputError(key, "missing")
    return data


def as_list(data: Any, field: str) -> list[Any] | tuple[Any, ...]:
    if not isinstance(data, list | tuple):
        raise InputError(field, f"must be a list, not {kind_of_value(data)}")
    if len(data) > MAX_ITEMS:
        raise InputError(field, f"has {len(data)} entries; the most is {MAX_ITEMS}")
    return data


def as_amount(value: Any, field: str) -> Any:
    return as_size(value, field) if field.endswith("_bytes") else as_time(value, field)


def as_time(value: Any, field: str) -> float:
    """A finite, non-negative number. Whole numbers stay integers, so that sums of them are exact."""
    if type(value) is not int and type(value) is not float:
        if isinstance(value, bool) or not hasattr(value, "__float__"):
            raise InputError(field, f"must be a number, not {kind_of_value(value)}")
        value = float(value)
    if not 0 <= value <= MAX_TIME:
        raise InputError(field, _out_of_range(value, "1e18"))
    return value  # type: ignore[no-any-return]


def as_size(value: Any, field: str) -> int:
    """A whole, non-negative number of bytes; 5.0 counts as whole, because some writers know only floats."""
    if type(value) is not int:
        value = _whole(value, field, "number of bytes")
    if not 0 <= value <= MAX_BYTES:
        raise InputError(field, _out_of_range(value, "2^60"))
    return value  # type: ignore[no-any-return]


def as_count(value: Any, field: str) -> int:
    value = _whole(value, field, "number")
    if not 0 <= value <= MAX_ITEMS:
        raise InputError(field, _out_of_range(value, str(MAX_ITEMS)))
    return int(value)


def as_flag(value: Any, field: str) -> int:
    if isinstance(value, int) and value in (0, 1):  # true and false are 1 and 0
        return int(value)
    raise InputError(field, f"must be 0 or 1, not {kind_of_value(value)}")


def _whole(value: Any, field: str, what: str) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    try:
        if isinstance(value, bool):
            raise TypeError
        return int(operator.index(value))
    except TypeError:
        raise InputError(field, f"must be a whole {what}, not {kind_of_value(value)}") from None


def as_text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise InputError(field, f"must be text, not {kind_of_value(value)}")
    return value


def _out_of_range(value: float, largest: str) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"must be finite, not {value}"
    if value < 0:
        return "must not be negative"
    return f"is too large; the most is {largest}"


def kind_of_value(value: Any) -> str:
    names = {type(None): "null", bool: "true or false", str: "text", list: "a list", dict: "an object"}
    if isinstance(value, float):
        return f"{value!r}"
    return names.get(type(value), f"{value!r:.40}")


def check_holds_output(saved_bytes: int, output_bytes: int, field: str) -> None:
    if saved_bytes < output_bytes:
        raise InputError(field, f"{saved_bytes} is less than output_bytes ({output_bytes}), which it includes")
