"""The rows that the GPU benchmarks measure: one per way to take a training step of a model.

This is the place for what the GPU benchmarks share besides models (cases.py), measuring (step_costs.py) and printing
(row_tables.py). Every script makes the same kind of row, so a `Row` has fields for all of them. A `Book` prints the
rows as they come and writes them to the file of `--json`; `rows_of` reads such files again.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from step_costs import Device, device_for

MIB = 2**20
NO_LIMIT = 2**50  # bytes: a budget that everything fits into
TOLERANCE = 0.005  # the share by which a peer may exceed a budget and still be compared with ours at that budget


@dataclass(frozen=True)
class Row:
    """One way to take a step of a model, and what was measured of it.

    `how` names the way, and `kind` groups ways; each script says which kinds it has. `room_bytes` is the budget less
    what is resident; where no plan fits into that, `least_bytes` is the room that was used instead. `seconds` were
    spent in `fit` or `set_budget`, or in the first step of `torch.compile`. `vs_peer`, `vs_chain` and `vs_eager` are
    the other's time divided by ours: above 1, ours is faster.
    """

    model: str
    how: str
    kind: str
    room_bytes: int | None = None
    budget_bytes: int | None = None
    least_bytes: int | None = None
    ms: float | None = None  # the median step
    fastest_ms: float | None = None  # the fastest step: other work of the host, if it sets the pace, moves the median
    peak_bytes: int | None = None  # above what is resident
    resident_bytes: int | None = None
    predicted_bytes: int | None = None  # the plan's peak, above what is resident
    predicted_resident_bytes: int | None = None
    within_budget: bool | None = None
    best_peer: str | None = None  # the fastest peer that needs no more than the room
    vs_peer: float | None = None
    vs_chain: float | None = None
    vs_eager: float | None = None
    seconds: float | None = None
    note: str = ""
    tried: list[dict[str, Any]] = field(default_factory=list)  # every program that was compiled and measured for it
    error: str | None = None

    @property
    def over_bytes(self) -> int:
        """Bytes above the budget; negative where there was room left."""
        return self.resident_bytes + self.peak_bytes - self.budget_bytes

    @property
    def prediction_error(self) -> float | None:
        """As a share of the measured peak; positive where more was predicted than measured."""
        if not self.predicted_bytes or not self.peak_bytes:
            return None
        return self.predicted_bytes / self.peak_bytes - 1


@dataclass
class Book:
    """Takes rows down: each is printed at once, and the file is written anew with every row."""

    facts: dict[str, str]
    path: Path | None
    rows: list[Row] = field(default_factory=list)
    began_s: float = field(default_factory=time.perf_counter)

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        print(f"{time.perf_counter() - self.began_s:7.1f} s  {row.model:12} {row.how:42} {in_words(row)}", flush=True)
        if self.path is not None:
            written = {"machine": self.facts, "command": shlex.join(["python", *sys.argv])}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({**written, "rows": [asdict(row) for row in self.rows]}, indent=1) + "\n")
        return row


def open_book(script: str, options: argparse.Namespace) -> Book | None:
    """An empty book with the facts of this machine; None where there is no device to measure on."""
    device = device_for(script, tiny=options.tiny)
    if device is None:
        return None
    book = Book(facts(device), options.json)
    print(", ".join(f"{name} {value}" for name, value in book.facts.items()), flush=True)
    return book


def facts(device: Device) -> dict[str, str]:
    where = torch.cuda.get_device_name() if device.kind == "cuda" else "CPU"
    return {"device": where, "torch": torch.__version__, "Python": platform.python_version()}


def rows_of(*paths: Path) -> list[Row]:
    """The rows of files that books wrote, as one list."""
    return [Row(**row) for path in paths for row in json.loads(path.read_text())["rows"]]


def in_words(row: Row) -> str:
    if row.error is not None:
        return f"failed: {row.error}"
    parts = [
        (row.ms, "{:.1f} ms"),
        (mib(row.peak_bytes), "peak {:,.1f} MiB"),
        (mib(row.room_bytes), "room {:,.1f} MiB"),
        (mib(row.predicted_bytes), "predicted {:,.1f} MiB"),
        (row.vs_peer, "{:.2f}× the best peer's speed"),
        (row.seconds, "planned in {:.1f} s"),
        (row.note or None, "({})"),
    ]
    over = ["OVER BUDGET"] if row.within_budget is False else []
    return ", ".join(over + [form.format(value) for value, form in parts if value is not None])


def mib(count: int | None) -> float | None:
    return None if count is None else count / MIB


def said(failure: Exception) -> str:
    """An exception as the text of a row's `error`: its kind and the first line of its message."""
    lines = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {lines[0]}"[:300]


def fastest(peers: Sequence[Row], room: int) -> Row | None:
    """The fastest peer that needs no more than `room` bytes, give or take the tolerance."""
    fitting = [peer for peer in peers if peer.peak_bytes <= room * (1 + TOLERANCE)]
    return min(fitting, key=lambda peer: peer.ms, default=None)


def check_models(parser: argparse.ArgumentParser, chosen: Collection[str], known: Collection[str]) -> None:
    """Stop the script if `--models` names one that it does not know."""
    if unknown := set(chosen) - set(known):
        parser.error(f"--models: no model {min(unknown)!r}; known: {', '.join(known)}")
