"""Processes that judge cases, one after the other, and may die of it."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from dataclasses import dataclass
from typing import Any

CASES_PER_PROCESS = 100  # what one model does must not leak to the next


@dataclass(frozen=True)
class Result:
    """What became of a case: kinds and sentences of what went wrong, first things first."""

    failures: tuple[tuple[str, str], ...]
    rounded: bool = False
    time_s: float = 0.0

    @property
    def kind(self) -> str:
        return self.failures[0][0] if self.failures else ""

    def __str__(self) -> str:
        return ": ".join(self.failures[0]) if self.failures else "nothing is wrong"


class Worker:
    """A process of its own, begun anew after a hundred cases, and after one that it did not survive."""

    def __init__(self, limit_s: float, start_s: float = 60.0) -> None:
        self.limit_s, self.start_s = limit_s, start_s
        self.process: Any = None
        self.count = 0

    def judge(self, case: Any) -> Result:
        if self.process is None or self.count >= CASES_PER_PROCESS:
            self._begin()
        self.count += 1
        began = time.perf_counter()
        try:
            self.connection.send(case)
            # The first case of a process waits for torch to be imported, too.
            if not self.connection.poll(self.limit_s + (self.start_s if self.count == 1 else 0)):
                self.end()
                return Result((("takes too long", f"more than {self.limit_s:.0f} seconds"),), time_s=self.limit_s)
            return self.connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.process.join(10)
            status = self.process.exitcode
            self.process = None
            took = time.perf_counter() - began
            return Result((("crash", f"the process ended with status {status}"),), time_s=took)

    def _begin(self) -> None:
        self.end()
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.count = 0

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join(10)
            self.process = None


def work(connection: Any) -> None:
    """The process: cases come, results go."""
    prepare()
    from campaign.bystander import Bystander
    from campaign.cases import judge_case

    bystander = None
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        began = time.perf_counter()
        try:
            bystander = bystander or Bystander(case.kernels, case.device)
            verdict = judge_case(case, bystander)
            failures = tuple((each.kind, each.text) for each in verdict.failures)
            rounded = verdict.rounded
        except BaseException as failure:  # of the campaign itself, or one that came out of an event
            last = traceback.extract_tb(failure.__traceback__)[-1]
            where = f"{os.path.basename(last.filename)}:{last.lineno}"
            said = (str(failure).splitlines() or [""])[0]
            failures, rounded = ((f"event raised {type(failure).__name__}", f"{said:.200} ({where})"),), False
        if any(kind.startswith("bystander") for kind, _ in failures):
            bystander = None  # the next case begins with a sound one
        connection.send(Result(failures, rounded, time.perf_counter() - began))


def prepare() -> None:
    """One thread, no chatter on the terminal, and measurements in a folder of their own."""
    os.environ.setdefault("ELBOWROOM_CACHE", os.path.join(tempfile.gettempdir(), f"elbowroom-campaign-{os.getuid()}"))
    os.environ.setdefault("KINETO_LOG_LEVEL", "7")
    os.environ["OMP_NUM_THREADS"] = "1"
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)
    import logging

    import torch

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
