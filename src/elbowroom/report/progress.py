"""A progress bar for whatever takes longer than two seconds, on standard error and only for people."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from elbowroom.solve.method import Progress as Report

PATIENCE = 2.0
_drawn: list[Progress] = []


@contextmanager
def progress_bar(what: str, *, patience: float = PATIENCE) -> Iterator[Report]:
    """Yields the function to call with the part done. The bar appears once patience runs out.

    Work that is part of a larger one draws nothing: the bar around it stays.
    """
    console = Console(stderr=True)
    if _drawn or not console.is_terminal:
        yield lambda part: None
        return
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True
    )
    task = bar.add_task(what, total=1.0)
    timer = Timer(patience, bar.start)
    timer.daemon = True
    timer.start()
    _drawn.append(bar)
    try:
        yield lambda part: bar.update(task, completed=part)
    finally:
        _drawn.remove(bar)
        timer.cancel()
        bar.stop()
