"""Tables as Markdown, for the terminal and for docs/papers.md alike, and plots saved alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Columns as wide as what is in them. The first is aligned to the left, the others to the right."""
    cells = [list(map(str, header)), *([str(cell) for cell in row] for row in rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    lines = [_line(row, widths) for row in cells]
    rule = [("-" * width if not column else "-" * (width - 1) + ":") for column, width in enumerate(widths)]
    return "\n".join([lines[0], _line(rule, widths), *lines[1:]])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.ljust(width) if not column else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "| " + " | ".join([first, *rest]) + " |"


def percent(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def save(figure: Any, path: Path) -> None:
    """A small picture: few colours are enough for lines and bars."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80, bbox_inches="tight", metadata={"Software": None})
    pyplot.close(figure)
    fewer_colours(path)
    print(f"saved {path}")


def fewer_colours(path: Path) -> None:
    """Make the file smaller. The reader sees no difference."""
    try:
        from PIL import Image
    except ImportError:
        return
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
