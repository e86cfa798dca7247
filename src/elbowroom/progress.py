"""Progress: how work tells how far it is, and a bar for whatever takes longer than two seconds.

The bar is on standard error, and only for people.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any, TypeAlias

Progress: TypeAlias = Callable[[float], None]  # called with the part done, from 0 to 1

PATIENCE = 2.0  # seconds
_drawn: list[Any] = []


@contextmanager
def progress_bar(what: str, *, patience: float = PATIENCE) -> Iterator[Progress]:
    """Yields the function to call with the part done. The bar appears once patience runs out.

    Work that is part of a larger one draws nothing: the bar around it stays.
    """
    from rich import progress  # takes a while to import, and solving a small problem does not
    from rich.console import Console

    console = Console(stderr=True)
    if _drawn or not console.is_terminal:
        yield lambda part: None
        return
    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TimeElapsedColumn(),
        console=console,
        transient=True,
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
