"""Problem files: one JSON document, or JSON Lines with one request per line.

A request is a problem plus what to do with it: `budget`, `slots`, `segments`, `solver`, a `schedule` to simulate,
the link to the host and the memory there, and an `id` that comes back with the answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elbowroom.errors import InputError
from elbowroom.problem import Platform, Problem, problem_from_json
from elbowroom.schedule import Operation, schedule_from_json
from elbowroom.units import parse_bytes

_LINK_FIELDS = ("bandwidth", "to_host", "from_host", "duplex", "seconds_per_copy")
_REQUEST_FIELDS = ("budget", "slots", "segments", "solver", "schedule", *_LINK_FIELDS, "host_budget", "id")


@dataclass(frozen=True)
class Request:
    """One problem and what is asked about it; None where the file does not say."""

    problem: Problem
    budget: int | None = None
    slots: int | None = None
    segments: int | None = None
    solver: str | None = None
    schedule: tuple[Operation, ...] | None = None
    platform: Mapping[str, Any] = field(default_factory=dict)  # those fields of a `Platform` that the file gives
    id: Any = None


def read_text(path: str) -> str:
    """The whole file, or standard input for `-`."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise InputError(path, f"cannot be read: {(error.strerror or str(error)).lower()}") from None
    except ValueError:
        raise InputError("FILE", "is not a usable path") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(path, f"is not UTF-8 text (byte {error.start})") from None
    if not text.strip():
        raise InputError(path, "is empty")
    return text


def split_documents(text: str) -> list[str] | None:
    """The lines of a JSON Lines file; None if the text is one document, good or bad.

    A broken document over several lines is not JSON Lines: there, some line is a request by itself.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < 2 or _decoded(text) is not None:
        return None
    return lines if any(map(_is_request, lines)) else None


def parse_request(text: str, path: str) -> Request:
    """A validated request from the text of one document."""
    data = decode(text, path)
    if not isinstance(data, Mapping):
        raise InputError("problem", "must be a JSON object with a 'kind'")
    asked = {field: data[field] for field in _REQUEST_FIELDS if data.get(field) is not None}
    problem = problem_from_json({key: value for key, value in data.items() if key not in _REQUEST_FIELDS})
    solver = asked.get("solver")
    if solver is not None and not isinstance(solver, str):
        raise InputError("solver", "must be the name of a method")
    return Request(
        problem=problem,
        budget=_budget(asked["budget"]) if "budget" in asked else None,
        slots=_positive(asked["slots"], "slots") if "slots" in asked else None,
        segments=_positive(asked["segments"], "segments") if "segments" in asked else None,
        solver=solver,
        schedule=schedule_from_json(asked["schedule"]) if "schedule" in asked else None,
        platform=_platform_fields(asked),
        id=asked.get("id"),
    )


def platform_of(*given: Mapping[str, Any]) -> Platform:
    """The platform that several places describe together; where two name a field, the first one wins."""
    fields: dict[str, Any] = {}
    for each in reversed(given):
        fields |= each
    return Platform(**fields)


def decode(text: str, path: str) -> Any:
    """Decoded JSON; NaN and Infinity pass here, so that validation can name the field that holds them."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(path, f"line {error.lineno}, column {error.colno}: {error.msg.lower()}") from None
    except RecursionError:
        raise InputError(path, "is nested too deeply to be a problem") from None
    except ValueError:
        raise InputError(path, "holds a number with too many digits") from None


def _is_request(line: str) -> bool:
    return line.lstrip().startswith("{") and "kind" in (_decoded(line) or {})


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _budget(value: Any, field: str = "budget") -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return parse_bytes(value, field=field)


def _platform_fields(asked: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: asked[name] for name in _LINK_FIELDS if name in asked}
    if "host_budget" in asked:
        fields["host_bytes"] = _budget(asked["host_budget"], "host_budget")
    Platform(**fields)  # which refuses what is wrong
    return fields


def _positive(value: Any, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(field, "must be a whole number")
    if not 1 <= value <= 2**60:
        raise InputError(field, "must be between 1 and 2^60")
    return value
