"""Memory over the step, drawn with characters or saved as an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from elbowroom.errors import InputError
from elbowroom.schedule.timeline import Span, TimeLine
from elbowroom.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from elbowroom.measure.memory import Measurement

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_SHADES = " ░▒▓█"
_TIME_MS = "time in the step (ms, estimated)"


def memory_picture(
    line: TimeLine,
    *,
    budget: int | None = None,
    width: int = 72,
    height: int = 8,
    unit: str = "bytes",
) -> str:
    """The time line as a block chart: each column shows the highest memory during its share of the step.

    Where values move, there are three lanes beneath, darker the more of a column's time they are busy.
    """
    levels = columns(line.computing, width)
    top = max([*levels, budget or 0, 1])
    rows = []
    for row in range(height, 0, -1):
        cells = "".join(_cell(level, top, row, height) for level in levels)
        label = _amount(top * row / height, unit) if row in (height, height // 2) else ""
        rows.append(f"{label:>10} ┤{cells}")
    rows.append(f"{'0':>10} ┼{'─' * width}")
    for name, spans in lanes(line).items():
        rows.append(f"{name:>10} │{''.join(map(_shade, busy(spans, line.time, width)))}")
    peak = f"peak {_amount(line.peak_bytes, unit)}"
    limit = "" if budget is None else f" of {_amount(budget, unit)}"
    rows.append(f"{'':>12}forward → backward, {peak}{limit}")
    return "\n".join(rows)


def measurement_picture(measured: Measurement, width: int, height: int) -> str:
    """Memory that a block of code took above what was there before, as a block chart."""
    assert measured.timeline is not None
    rows = memory_picture(measured.timeline, width=width, height=height).splitlines()[:-1]
    peak, end = format_bytes(measured.peak_bytes), format_bytes(measured.end_bytes)  # the last row is about a step
    rows.append(f"{'':>12}{format_seconds(measured.time_s)} on {measured.device}, peak {peak}, {end} at the end")
    return "\n".join(rows)


def print_picture(console: Console, line: TimeLine, budget: int | None, unit: str = "bytes") -> None:
    """The chart, as wide as the terminal allows."""
    width = max(20, min(100, console.width - 14))
    picture = memory_picture(line, budget=budget, width=width, unit=unit)
    console.print(picture, markup=False, highlight=False)


def columns(spans: Sequence[Span], width: int) -> list[int]:
    """The highest memory in each of `width` equal parts of the step; by operation count if no time passes."""
    end = max((span.end for span in spans), default=0)
    levels = [0] * width
    for order, span in enumerate(spans):
        if end > 0:
            low, high = span.start / end, span.end / end
        else:
            low, high = order / len(spans), (order + 1) / len(spans)
        first = min(int(low * width), width - 1)
        last = min(max(first, int(high * width - 1e-9)), width - 1)
        for column in range(first, last + 1):
            levels[column] = max(levels[column], span.bytes)
    return levels


def lanes(line: TimeLine) -> dict[str, list[Span]]:
    """What is done beside what, if values move: computing, as far as it does not wait, and both directions."""
    if not line.transfers:
        return {}
    return {
        "computing": [span for span in line.computing if not span.waits],
        "to host": [span for span in line.transfers if span.resource == "to host"],
        "from host": [span for span in line.transfers if span.resource == "from host"],
    }


def busy(spans: Sequence[Span], time: float, width: int) -> list[float]:
    """Which share of each of `width` equal parts of the step some span takes."""
    shares = [0.0] * width
    for span in spans:
        low, high = (width * moment / time for moment in (span.start, span.end))
        for column in range(int(low), min(width, int(high) + 1)):
            shares[column] += max(0.0, min(high, column + 1) - max(low, column))
    return [min(1.0, share) for share in shares]


Lines = Mapping[str, tuple[TimeLine, int | None]]


def save_plot(panels: Mapping[str, Lines], path: Path, *, along: str = _TIME_MS, scale: float = 1e3) -> None:
    """One panel per title, one line of memory over time per label, the budgets dashed.

    `along` names the horizontal axis, in units of which the spans' seconds are `scale`.
    """
    pyplot = import_pyplot()
    moving = {title: _moving(lines) for title, lines in panels.items()}
    heights = [height for line in moving.values() for height in ((3.6,) if line is None else (3.6, 0.8))]
    figure, axes = pyplot.subplots(
        len(heights), 1, figsize=(10, sum(heights)), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    left = iter(axes[:, 0])
    for title, lines in panels.items():
        axis = next(left)
        _draw_memory(axis, lines, scale)
        axis.set_title(title)
        if (line := moving[title]) is not None:
            beneath = next(left)
            _draw_lanes(beneath, line, scale)
            beneath.set_xlim(axis.get_xlim())
            axis.tick_params(labelbottom=False)
            axis = beneath
        axis.set_xlabel(along)
    save_figure(figure, path)


def _moving(lines: Lines) -> TimeLine | None:
    """The time line whose transfers are drawn: the first that has any."""
    return next((line for line, _ in lines.values() if line.transfers), None)


def _draw_memory(axis: Any, lines: Lines, scale: float) -> None:
    unit, size = _unit(max((line.peak_bytes for line, _ in lines.values()), default=0))
    for label, (line, budget) in lines.items():
        moments = [t * scale for span in line.computing for t in (span.start, span.end)]
        sizes = [span.bytes / size for span in line.computing for _ in (0, 1)]
        (drawn,) = axis.plot(moments, sizes, label=label, linewidth=1)
        if budget is not None:
            axis.axhline(budget / size, color=drawn.get_color(), linestyle="--", linewidth=0.8)
    axis.set(ylabel=f"memory ({unit})", ylim=(0, None))
    axis.legend(fontsize=8)


def _draw_lanes(axis: Any, line: TimeLine, scale: float) -> None:
    """A thin bar for everything that is done, computing at the top."""
    drawn = lanes(line)
    for row, (name, spans) in enumerate(drawn.items()):
        bars = [(span.start * scale, (span.end - span.start) * scale) for span in spans]
        axis.broken_barh(bars, (-row - 0.3, 0.6), label=name, facecolors=f"C{row}")
    axis.set_yticks([-row for row in range(len(drawn))], labels=list(drawn), fontsize=8)


def import_pyplot() -> Any:
    """matplotlib without a window, or a sentence about how to get it."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise InputError("--plot", "needs matplotlib: pip install 'elbowroom[plot]'") from None
    return pyplot


def save_figure(figure: Any, path: Path) -> None:
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as failure:  # ValueError: an ending that matplotlib does not know
        raise InputError("--plot", f"{path} cannot be written: {failure}") from None
    finally:
        import_pyplot().close(figure)


def _unit(most_bytes: float) -> tuple[str, int]:
    larger = (("GiB", 2**30), ("MiB", 2**20))
    return next((unit for unit in larger if most_bytes >= unit[1]), ("KiB", 2**10))


def _cell(level: int, top: int, row: int, height: int) -> str:
    filled = level / top * height - (row - 1)
    return _EIGHTHS[max(0, min(8, round(filled * 8)))]


def _shade(share: float) -> str:
    return _SHADES[max(1, round(share * 4)) if share > 0 else 0]


def _amount(value: float, unit: str) -> str:
    return format_bytes(value) if unit == "bytes" else f"{value:.3g} {unit}"
