"""Solving many problems for figures, each once: answers are kept in a file and read again the next time.

A `Question` is one chain, method, budget and link. Answers belong to a file of chains: if the chains are others, as
when measured ones replace estimated ones, all are asked again. A method that is better than it was when it answered
needs `--again`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import astuple, dataclass, field
from functools import cache
from pathlib import Path

from chain_files import ESTIMATED, MEASURED, ChainFile
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from elbowroom.problem import Chain, Platform
from elbowroom.solve import METHODS, solve

SAVE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Question:
    """`link` are the rates to the host, from it, and of each if both are used: 0 where they take turns; none at all
    for methods that do not move values. `segments` is for `sequential`, `slots` for the dynamic programs."""

    chain: str
    method: str
    budget: int | None
    link: tuple[float, float, float] | None = None
    segments: int | None = None
    slots: int | None = None

    @property
    def key(self) -> str:
        more = [f"{rate:.6g}" for rate in self.link or ()]
        more += [f"{name}={value}" for name, value in (("k", self.segments), ("slots", self.slots)) if value]
        return "|".join([self.chain, self.method, str(self.budget), *more])

    @property
    def platform(self) -> Platform | None:
        if self.link is None:
            return None
        to_host, from_host, duplex = self.link
        return Platform(to_host=to_host, from_host=from_host, duplex=duplex)


@dataclass(frozen=True, slots=True)
class Answer:
    """`time` is None if nothing fits the budget. `moved_bytes` are those that went to the host."""

    time: float | None
    peak_bytes: int
    moved_bytes: int
    seconds: float


def turns(rate: float) -> tuple[float, float, float]:
    """The thesis' link: one transfer at a time."""
    return rate, rate, 0.0


@dataclass
class Answers:
    """All answers there are, in the file where they are kept."""

    path: Path
    chains: Path
    known: dict[str, Answer] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)

    @classmethod
    def load(cls, path: Path, chains: Path) -> Answers:
        found = cls(path, chains)
        if path.exists():
            data = json.loads(path.read_text())
            if data["chains"] == digest(chains):
                found.known = {key: Answer(*value) for key, value in data["answers"].items()}
        return found

    def save(self) -> None:
        lines = [f"{json.dumps(key)}: {json.dumps(astuple(self.known[key]))}" for key in sorted(self.known)]
        head = json.dumps({"kind": chain_file(self.chains).kind, "chains": digest(self.chains)})
        written = f'{head[:-1]}, "answers": {{\n' + ",\n".join(lines) + "\n}}\n"
        partial = self.path.with_suffix(".part")  # an interrupt must not leave half a file
        partial.write_text(written)
        partial.replace(self.path)

    def __getitem__(self, question: Question) -> Answer | None:
        """None if the question has not been answered, as of a method that is not there yet."""
        return self.known.get(question.key)

    def forget_others(self) -> None:
        """Keep only what was asked since the answers were loaded, after a run that asked everything."""
        self.known = {key: answer for key, answer in self.known.items() if key in self.asked}
        self.save()

    def ask(self, questions: Iterable[Question], what: str, jobs: int, again: Sequence[str] = ()) -> None:
        """Answer what is not known yet, or all that goes to the methods that are to be asked again."""
        questions = list(questions)
        self.asked |= {q.key for q in questions}
        open_ones = {q.key: q for q in questions if q.key not in self.known or q.method in again}
        missing = sorted({q.method for q in open_ones.values()} - set(METHODS))
        if missing:
            print(f"{what}: left out, because there is no such method yet: {', '.join(missing)}", file=sys.stderr)
        todo = [q for q in open_ones.values() if q.method in METHODS]
        if not todo:
            return
        shown = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        saved = time.monotonic()
        with Progress(*shown) as progress, ProcessPoolExecutor(jobs) as pool:
            bar = progress.add_task(what, total=len(todo))
            try:
                waiting = {pool.submit(answered, str(self.chains), q): q for q in todo}
                for done in as_completed(waiting):
                    self.known[waiting[done].key] = done.result()
                    progress.advance(bar)
                    if time.monotonic() - saved > SAVE_EVERY_S:
                        self.save()
                        saved = time.monotonic()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                self.save()


def answered(chains: str, question: Question) -> Answer:
    chain = chain_of(chains, question.chain)
    result = solve(
        chain,
        question.budget,
        question.method,
        platform=question.platform,
        segments=question.segments,
        slots=question.slots,
    )
    seconds = float(f"{result.seconds:.3g}")
    if result.simulation is None:
        return Answer(None, result.least_budget or 0, 0, seconds)
    moved = sum(span.moved_bytes for span in result.simulation.transfers if span.resource == "to host")
    return Answer(float(f"{result.time:.6g}"), result.peak_bytes, moved, seconds)


@cache
def chain_of(chains: str, name: str) -> Chain:
    return chain_file(Path(chains)).chain(name)


@cache
def chain_file(path: Path) -> ChainFile:
    return ChainFile.load(path)


@cache
def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def path_there() -> Path:
    """The measured chains, or else the estimated ones."""
    return MEASURED if MEASURED.exists() else ESTIMATED


def jobs_there() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
