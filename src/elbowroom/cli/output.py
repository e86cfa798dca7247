"""What the command line prints: answers on standard output, complaints in one line on standard error."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from elbowroom.errors import BudgetTooSmall, InputError
from elbowroom.report.picture import import_pyplot
from elbowroom.report.plan_table import WIDTH

INFEASIBLE = 3  # exit status: nothing fits the budget

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Budget = Annotated[str | None, typer.Option(help="Memory to stay within: 8589934592, 8GiB, 6.5GB.")]
Plot = Annotated[Path | None, typer.Option(help="Also save the picture as an image.")]


@contextmanager
def answering(as_json: bool) -> Iterator[None]:
    """Our warnings in one line each, unless a complaint says more; for machines, too small a budget is an answer."""
    said: list[str] = []
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_others(message: Warning | str, *rest: Any, **more: Any) -> None:
            if str(message).startswith("elbowroom: "):
                said.append(one_line(str(message)))
            else:
                show(message, *rest, **more)

        warnings.showwarning = show_others
        try:
            yield
        except InputError:
            said.clear()
            raise
        except BudgetTooSmall as refusal:
            if not as_json:
                raise
            largest = [{"what": what, "bytes": size} for what, size in refusal.largest]
            print_json({"feasible": False, "least_budget": refusal.least_budget, "largest": largest})
            raise typer.Exit(INFEASIBLE) from None
        finally:
            for line in said:
                print(line, file=sys.stderr)


def console() -> Console:
    """As wide as the terminal; wide enough for module paths where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def check_folder(option: str, path: Path | None) -> None:
    """Say before the work, not after it, that its result cannot be saved."""
    if path is not None and not path.parent.is_dir():
        raise InputError(option, f"{path} cannot be written: there is no folder {path.parent}")


def check_plot(path: Path | None) -> None:
    check_folder("--plot", path)
    if path is not None:
        import_pyplot()


def save_picture(write: Callable[[Path], None], path: Path) -> None:
    save("--plot", write, path)
    print(f"picture: {path}", file=sys.stderr)


def save(option: str, write: Callable[[Path], None], path: Path) -> None:
    try:
        write(path)
    except OSError as failure:
        raise InputError(option, f"{path} cannot be written: {failure.strerror or failure}") from None


def print_json(report: dict[str, Any], identifier: Any = None) -> None:
    if identifier is not None:
        report = {"id": identifier, **report}
    print(json.dumps(report, allow_nan=False), flush=True)


def first(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def complain(message: str, status: int) -> int:
    print(f"elbowroom: {one_line(message)}", file=sys.stderr)
    return status


def one_line(message: str) -> str:
    return "".join(c if c.isprintable() else " " for c in message)
