"""Tables on the terminal: any lines of text, and the lines of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rows import Row, mib

HEADINGS = "model", "how", "budget MiB", "ms", "peak MiB", "predicted MiB", "error %", "within", "vs best peer"


def row_cells(row: Row) -> list[str]:
    """A row as a line of the table with `HEADINGS`."""
    if row.error is not None:
        return [row.model, row.how, number(mib(row.room_bytes)), "failed", "–", "–", "–", "–", "–"]
    within = {None: "–", True: "yes", False: "NO"}[row.within_budget]
    error = row.prediction_error
    return [
        row.model,
        row.how,
        number(mib(row.room_bytes)),
        number(row.ms),
        number(mib(row.peak_bytes)),
        number(mib(row.predicted_bytes)),
        "–" if error is None else f"{error:+.2%}".rstrip("%"),
        within,
        "–" if row.vs_peer is None else f"{row.vs_peer:.3f}",
    ]


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def listed(rows: Sequence[Row], say: Callable[[Row], str]) -> str:
    """One indented line for each row, to follow a line that counts them."""
    return "".join(f"\n  {row.model}, {row.how}: {say(row)}" for row in rows)


def show(lines: Sequence[Sequence[str]], headings: Sequence[str] = HEADINGS) -> None:
    """Print a table. The first two columns are names; where the first one changes, a new section begins."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return show_plainly(lines, headings)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column, heading in enumerate(headings):
        table.add_column(heading, justify="left" if column < 2 else "right", no_wrap=True)
    for before, line in zip([None, *lines], lines, strict=False):
        if before is not None and before[0] != line[0]:
            table.add_section()
        table.add_row(*line)
    Console(highlight=False, markup=False, width=150).print("\n", table, "\n", sep="")


def show_plainly(lines: Sequence[Sequence[str]], headings: Sequence[str]) -> None:
    """The same where `rich` is not installed."""
    widths = [max(map(len, column)) for column in zip(headings, *lines, strict=True)]
    for line in (headings, *lines):
        names = [text.ljust(width) for text, width in zip(line[:2], widths[:2], strict=True)]
        print(*names, *(text.rjust(width) for text, width in zip(line[2:], widths[2:], strict=True)), sep="  ")
