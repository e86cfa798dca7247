"""What plans say of themselves, for people who know their model and not this package.

Plans carry short names of how they were made and why, in the words of the glossary, and files keep them so. Whoever
shows a plan says it with these functions, so that a plan from an older file reads like a new one.
"""

from __future__ import annotations

import re
from functools import partial

from elbowroom.problem.platform import Platform
from elbowroom.units import format_bytes, format_rate, format_seconds

BY_VALUE = ", then value by value"
MOVED = ", with moves"
MOVED_LEAST = "all that is saved moves"
LOWEST = "the lowest peak found"
_STAGES = re.compile(r"persistent, (\d+) stages( where one value crosses)?, \w+ account(, parts of gradients apart)?")
_SLOWER = r"([+-])([\d.]+%)"
# What a plan's reason may say, and what it means. A pattern's two groups, if it has them, are a sign and a share.
_REASONS = (
    (r"the lowest peak found", "of all plans that were found, it takes the least memory"),
    (r"the only way to cut and count that was tried", "no other way was tried"),
    (r"fastest of (\d+) ways to cut", r"the fastest of \1 ways that were tried"),
    (rf"next best {_SLOWER}", "the next best takes {}"),
    (r", as a chain it does not fit", "; cut between layers only, it would not fit"),
    (rf", as a chain {_SLOWER}", "; cut between layers only, it would take {}"),
    (
        r", at most ([\d.]+%) above the least possible",
        r"; this one is at most \1 slower than any plan within this budget can be",
    ),
    (
        r"the fastest found that fits with the gaps in its memory",
        "the fastest whose CUDA graphs fit, whose memory has gaps between values",
    ),
    (rf"without gaps {_SLOWER}", "without gaps, one would take {}"),
    (r", without moves it does not fit", "; with nothing on the host, it would not fit"),
    (rf", without moves {_SLOWER}", "; with nothing on the host, it would take {}"),
)
_RESIDENT = {
    "optimizer": "optimizer state",
    "other": "whatever else is allocated there",
    "between graphs": "tensors made before and between the planned parts",
}


def method_in_words(method: str) -> str:
    """How a plan was made: `persistent, 12 stages, full account` → `computed again stage by stage, 12 stages`."""
    if method.endswith(MOVED):
        return f"{method_in_words(method.removesuffix(MOVED))}, and tensors moved to the host and back"
    if method.endswith(BY_VALUE):
        return f"{method_in_words(method.removesuffix(BY_VALUE))}, then adjusted tensor by tensor"
    if method == MOVED_LEAST:
        return "all that is saved for the backward is moved to the host and back"
    if found := _STAGES.fullmatch(method):
        count = int(found[1])
        return f"computed again stage by stage, {count} stage{'' if count == 1 else 's'}"
    kind, _, solver = method.partition(", ")
    if kind == "stage by stage":  # the road without tracing
        keeps_all = solver in ("store-all", "offload-best")
        return "everything is saved" if keeps_all else "computed again stage by stage, stages as they are"
    return method


def reason_in_words(why: str) -> str:
    """Why a plan was chosen: `next best +6.8%` → `the next best takes 6.8% longer`."""
    for pattern, words in _REASONS:
        why = re.sub(pattern, partial(_filled, words), why)
    return why


def resident_in_words(name: str) -> str:
    """What is in memory during the whole step: `optimizer` → `optimizer state`."""
    return _RESIDENT.get(name, name)


def sizes_in_words(things: list[tuple[str, int]]) -> str:
    """`parameters 3 MiB, batch 1 MiB`."""
    return ", ".join(f"{resident_in_words(name)} {format_bytes(size)}" for name, size in things)


def link_in_words(link: Platform) -> str:
    """`12 GB/s to the host, 12 GB/s back, 10 GB/s each way while both are busy, 10 µs before each copy`."""
    if link.rate_to_host is None or link.rate_from_host is None:
        return "none"
    words = [f"{format_rate(link.rate_to_host)} to the host", f"{format_rate(link.rate_from_host)} back"]
    if link.takes_turns:
        words.append("one copy at a time")
    elif link.duplex is not None:
        words.append(f"{format_rate(link.duplex)} each way while both are busy")
    if link.seconds_per_copy:
        words.append(f"{format_seconds(link.seconds_per_copy)} before each copy")
    return ", ".join(words)


def copying_in_words(copying_s: float, waits_s: float) -> str:
    """`3.2 ms, 85% of it beside computing, which waits for 480 µs`."""
    copying = format_seconds(copying_s)
    if not waits_s:
        return f"{copying}, all of it beside computing"
    hidden = max(0.0, 1 - waits_s / copying_s) if copying_s else 0.0
    return f"{copying}, {hidden:.0%} of it beside computing, which waits for {format_seconds(waits_s)}"


def _filled(words: str, found: re.Match[str]) -> str:
    if "{}" not in words:
        return found.expand(words)
    sign, share = found.groups()
    if not float(share.removesuffix("%")):
        return words.format("just as long")
    return words.format(f"{share} {'longer' if sign == '+' else 'less'}")
