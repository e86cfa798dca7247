"""Bytes and seconds, parsed from what people write and printed as people read.

>>> parse_bytes("1.5GiB"), format_bytes(1_610_612_736)
(1610612736, '1.5 GiB')
"""

from __future__ import annotations

import math
import re

from elbowroom.errors import InputError

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_AMOUNT = re.compile(r"\s*([0-9][0-9_]*\.?[0-9]*(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-z%]*)\s*", re.ASCII)

MAX_BYTES = 2**60


def parse_bytes(amount: int | str, *, field: str = "budget", device_bytes: int | None = None) -> int:
    """Whole bytes from `8589934592`, `"8GiB"`, `"6.5 GB"`, or `"90%"` where the device's size is known.

    Fractions of a byte are dropped: a budget is an upper bound.
    """
    if isinstance(amount, bool) or not isinstance(amount, int | str):
        raise InputError(field, f"must be bytes such as 8589934592 or '8GiB', not {amount!r:.40}")
    if isinstance(amount, str):
        amount = _parse_text(amount, field, device_bytes)
    if amount < 0:
        raise InputError(field, f"must not be negative, got {amount}")
    if amount > MAX_BYTES:
        raise InputError(field, f"is larger than {format_bytes(MAX_BYTES)}, the most a plan can address")
    return amount


def parse_rate(rate: float | str, *, field: str = "link") -> float:
    """Bytes per second from `12e9` or `"12GB/s"`."""
    nonsense = InputError(field, f"must be bytes per second such as '12GB/s', not {rate!r:.40}")
    if isinstance(rate, str):
        amount, slash, unit = rate.partition("/")
        if not slash or unit.strip() != "s":
            raise nonsense
        try:
            rate = float(parse_bytes(amount, field=field))
        except InputError:
            raise nonsense from None
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 1 <= rate < math.inf:
        raise nonsense
    return float(rate)


def _parse_text(text: str, field: str, device_bytes: int | None) -> int:
    match = _AMOUNT.fullmatch(text) if len(text) < 64 else None
    if match is None:
        raise InputError(field, f"must be bytes such as 8589934592 or '8GiB', not {text!r:.40}")
    number, unit = match.groups()
    if unit == "%":
        if device_bytes is None:
            raise InputError(field, f"{text.strip()!r} is a share of a device, and no device is known here")
        return int(float(number) / 100 * device_bytes)
    scale = _UNITS.get(unit.upper())
    if scale is None:
        raise InputError(field, f"unknown unit {unit!r:.20}; use B, KiB, MiB, GiB, TiB, KB, MB, GB or TB")
    if re.fullmatch(r"[0-9_]+", number):  # whole numbers stay exact, whatever their size
        return int(number.replace("_", "")) * scale
    value = float(number.replace("_", "")) * scale
    if not math.isfinite(value):
        raise InputError(field, "is too large")
    return int(value)


def format_bytes(count: float) -> str:
    """`1536` → `'1.5 KiB'`: at most four significant digits, binary units."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    text = f"{value:.0f}" if unit == "B" or abs(value) >= 1000 else f"{value:.3g}"
    return f"{text} {unit}"


def format_rate(rate: float) -> str:
    """`12e9` → `'12 GB/s'`: bytes per second in the decimal units in which links are sold."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if rate >= scale:
            return f"{rate / scale:.3g} {unit}/s"
    return f"{rate:.3g} B/s"


def format_seconds(seconds: float) -> str:
    """`0.0123` → `'12.3 ms'`."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
