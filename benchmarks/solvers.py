"""The time and memory of each solver method as the problem grows: a table, a plot, and JSON for machines.

    python benchmarks/solvers.py [--quick | --full] [--method NAME]... [--json PATH] [--plot PATH]

Every measurement is one `solve` in a fresh process. It is warm: a tiny problem of the same kind is solved first, so
that numba's compiled code is loaded. Memory is the process's peak resident size above what it was then. The
process that starts the others imports no solver: on Linux a child's peak begins at its parent's (it survives exec).
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import random
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from elbowroom.problem import Chain, Join, Stage

SEED = 0
BUDGET_SHARE = 0.25  # of the store-all peak
JOIN_SHARE = 1 / 3  # of one slot per value
TINY = 4  # stages of the warm-up
MIB = 2**20


@dataclass(frozen=True)
class Series:
    """One line of the plot: a method at growing sizes (stages, or steps of each branch of a join)."""

    method: str
    sizes: tuple[int, ...]
    slots: int | None = None
    branches: int = 1
    more: tuple[int, ...] = ()  # with --full
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or self.method


SERIES = (
    Series("store-all", (100, 1000, 5000)),
    Series("sequential", (100, 1000, 5000)),
    Series("sqrt", (100, 1000, 5000)),
    Series("revolve", (20, 50, 100, 200, 339), slots=500, more=(1000,)),
    Series("persistent", (20, 50, 100, 200, 339), slots=500, more=(1000,)),
    Series("floating", (10, 20, 40, 60), slots=100, more=(100,)),
    Series("floating", (), slots=500, more=(60, 100), label="floating, 500 slots"),
    Series("least-peak", (1000, 10_000, 100_000)),
    Series("least-peak-quadratic", (1000, 10_000)),
    Series("checkpoint-sum", (100, 300, 1000)),
    Series("join", (10, 25, 50), branches=2, label="join, 2 branches"),
    Series("join", (10, 20), branches=3, label="join, 3 branches"),
    Series("equiv-chain", (10, 25, 50), branches=2, label="equiv-chain, 2 branches"),
    Series("equiv-chain", (10, 20), branches=3, label="equiv-chain, 3 branches"),
)
JOIN_METHODS = ("join", "equiv-chain")


@dataclass(frozen=True)
class Point:
    """One measurement to make. Without a budget the method gets its share, or works without one."""

    series: str
    method: str
    size: int
    slots: int | None
    branches: int
    budget: int | None = None

    @property
    def stages(self) -> int:
        return self.size * self.branches


@dataclass(frozen=True)
class Measurement:
    point: Point
    seconds: float | None = None
    memory_mib: float | None = None
    budget: str = ""  # what the method was given, in words
    slots: int | None = None
    error: str | None = None


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    method: Annotated[list[str] | None, typer.Option(help="Measure only this method (repeatable).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two sizes a method: under 30 s.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Add the points that take minutes and GiBs.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the numbers here.")] = None,
    plot: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("benchmarks/out/solvers.png"),
) -> None:
    """Measure how the time and memory of each solver method grow."""
    if context.invoked_subcommand is not None:
        return
    unknown = sorted(set(method or ()) - {series.method for series in SERIES})
    if unknown:
        known = ", ".join(dict.fromkeys(series.method for series in SERIES))
        raise typer.BadParameter(f"no method {unknown[0]!r}; known: {known}", param_hint="--method")
    if quick and full:
        raise typer.BadParameter("choose one of --quick and --full")
    machine, command = machine_facts(), shlex.join(["python", *sys.argv])
    out = Console(highlight=False)
    out.print(", ".join(f"{name} {value}" for name, value in machine.items()), soft_wrap=True)
    measured = measure_all(points_of(method, quick, full))
    out.print(table_of(measured))
    for line in footnotes(measured):
        out.print(line, soft_wrap=True, markup=False)
    if json_path is not None:
        numbers = {"machine": machine, "command": command, "measurements": [asdict(m) for m in measured]}
        json_path.write_text(json.dumps(numbers, indent=1) + "\n")
    draw(measured, plot)
    out.print(f"Plot: {plot}\nAgain: {command}", soft_wrap=True, markup=False)
    if any(m.error for m in measured):
        raise typer.Exit(1)


def machine_facts() -> dict[str, str]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        numba = importlib.metadata.version("numba")
    except importlib.metadata.PackageNotFoundError:
        numba = "missing"
    return {
        "usable cores": str(usable),
        "CPUs": f"{os.cpu_count()} ({platform.machine()})",
        "load average": f"{os.getloadavg()[0]:.1f}",
        "Python": platform.python_version(),
        "numba": numba if os.environ.get("ELBOWROOM_NUMBA", "1") != "0" else "off",
    }


def points_of(methods: Sequence[str] | None, quick: bool, full: bool) -> list[Point]:
    points = []
    for series in SERIES:
        if methods and series.method not in methods:
            continue
        if quick and series.branches > 2:
            continue
        sizes = series.sizes[:2] if quick else series.sizes + series.more * full
        points += [Point(series.name, series.method, n, series.slots, series.branches) for n in sizes]
    return points


# --- measuring -------------------------------------------------------------------------------------------------


def measure_all(points: Sequence[Point]) -> list[Measurement]:
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    note = TextColumn("[dim]{task.fields[now]}")
    measured = []
    with Progress(*columns, note, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Measuring", total=len(points), now="")
        for point in points:
            progress.update(task, now=f"{point.series} × {point.size}")
            measured.append(in_new_process(point))
            progress.advance(task)
    return measured


def in_new_process(point: Point) -> Measurement:
    command = [sys.executable, __file__, "measure", json.dumps(asdict(point))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        return Measurement(point, error=last)
    answer = json.loads(done.stdout)
    if (
        "least_budget" in answer
    ):  # too little for this method: again, in a process that has solved nothing yet
        return in_new_process(replace(point, budget=answer["least_budget"]))
    return Measurement(point, **answer)


@app.command(hidden=True)
def measure(point_json: str) -> None:
    """One measurement, in this process, as JSON on stdout."""
    from elbowroom.solve import METHODS, solve

    point = Point(**json.loads(point_json))
    needs_budget = METHODS[point.method].needs_budget
    slots = None if point.method in JOIN_METHODS else point.slots
    tiny = problem_of(replace(point, size=TINY))
    for share in (BUDGET_SHARE, 1.0):  # the first may be infeasible: the second loads what it did not
        solve(tiny, int(share * store_all_peak(tiny)) if needs_budget else None, point.method, slots=slots)
    problem = problem_of(point)
    budget = point.budget
    if budget is None and needs_budget:
        share = JOIN_SHARE if point.method in JOIN_METHODS else BUDGET_SHARE
        budget = int(share * store_all_peak(problem))
    warm_mib = peak_mib()
    started = time.perf_counter()
    result = solve(problem, budget, point.method, slots=slots)
    seconds = time.perf_counter() - started
    if not result.feasible:
        print(json.dumps({"least_budget": result.least_budget}))
        return
    words = "own" if not needs_budget else "share" if point.budget is None else "least"
    used = budget if point.method in JOIN_METHODS else point.slots
    memory_mib = peak_mib() - warm_mib
    print(json.dumps({"seconds": seconds, "memory_mib": memory_mib, "budget": words, "slots": used}))


def problem_of(point: Point) -> Chain | Join:
    from elbowroom.problem import Join

    if point.method in JOIN_METHODS:
        return Join((point.size,) * point.branches, 1.0, 2.0, 1.0, (1,) * point.branches)
    return random_chain(point.size)


def random_chain(stages: int) -> Chain:
    """Outputs of 1 to 16 MiB, saved sets 1 to 6 times as large, times in proportion to what is saved; then the
    loss. Sizes are odd numbers of bytes, so slots always round. A shorter chain is the start of a longer one."""
    from elbowroom.problem import Chain, Stage

    chance = random.Random(SEED)

    def stage(number: int) -> Stage:
        output = chance.randrange(MIB, 16 * MIB)
        saved = int(output * chance.uniform(1, 6))
        forward_time = saved / 100e9 * chance.uniform(0.8, 1.2)
        overheads = (chance.randrange(output // 4), chance.randrange(output // 2))
        return Stage(f"s{number}", forward_time, 2 * forward_time, output, saved, output, *overheads)

    loss = Stage("loss", 1e-6, 1e-6, 4, 4, 4)
    return Chain(4 * MIB, 0, (*map(stage, range(1, stages)), loss))


def store_all_peak(problem: Chain | Join) -> int:
    """Without running the referee, whose memory would hide some of the solver's."""
    from elbowroom.problem import Join
    from elbowroom.solve.segments import Segments

    if isinstance(problem, Join):
        return sum(problem.lengths) + len(problem.lengths)
    return Segments(problem).peak([len(problem)])


def peak_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (MIB if sys.platform == "darwin" else 1024)


# --- showing ---------------------------------------------------------------------------------------------------


def table_of(measured: Sequence[Measurement]) -> Table:
    table = Table(title="One solve, warm, in a process of its own")
    table.add_column("method")
    for heading in ("stages", "slots", "budget", "seconds", "memory MiB", "growth"):
        table.add_column(heading, justify="right")
    for before, m in zip([None, *measured], measured, strict=False):
        point = m.point
        stages = str(point.size) if point.branches == 1 else f"{point.branches} × {point.size}"
        slots = "–" if m.slots is None else str(m.slots)
        if m.error is not None or m.seconds is None or m.memory_mib is None:
            table.add_row(point.method, stages, slots, "–", "failed", "–", "–", style="red")
            continue
        new_method = before is not None and before.point.method != point.method
        if new_method:
            table.add_section()
        numbers = f"{m.seconds:.4f}", f"{m.memory_mib:.1f}", growth(before, m)
        table.add_row(point.method, stages, slots, m.budget, *numbers)
    return table


def growth(before: Measurement | None, now: Measurement) -> str:
    """x where the time grew as size^x since the previous size of the series."""
    if before is None or before.point.series != now.point.series or not before.seconds or not now.seconds:
        return "–"
    return f"{math.log(now.seconds / before.seconds) / math.log(now.point.size / before.point.size):.1f}"


def footnotes(measured: Sequence[Measurement]) -> list[str]:
    return [
        f"Budget: share = {BUDGET_SHARE:.0%} of the store-all peak (joins: a third of one slot per value); "
        "least = the method's least, where that is more; own = the method takes none.",
        "Seconds: warm, after a tiny problem of the same kind. Memory: peak resident size above the warm process.",
        "Growth: x where seconds grew as size^x since the row above. A join's slots grow with its size.",
        "For reference, the thesis (001): C code, under 20 s for 339 stages × 500 slots (persistent).",
        *(f"Failed: {m.point.series} × {m.point.size}: {m.error}" for m in measured if m.error),
    ]


def draw(measured: Sequence[Measurement], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    smallest_mib = 0.1
    lines: dict[str, list[Measurement]] = {}
    for m in measured:
        if m.error is None:
            lines.setdefault(m.point.series, []).append(m)
    figure, (time_axes, memory_axes) = pyplot.subplots(
        1, 2, figsize=(13, 5.5), sharex=True, layout="constrained"
    )
    for i, (name, line) in enumerate(lines.items()):
        style: dict[str, Any] = {
            "label": name,
            "color": f"C{i % 10}",
            "marker": "osD^vP*X"[i % 8],
            "linestyle": "-" if i < 10 else "--",
        }
        stages = [m.point.stages for m in line]
        time_axes.loglog(stages, [m.seconds for m in line], **style)
        memory_axes.loglog(stages, [max(m.memory_mib or 0, smallest_mib) for m in line], **style)
    time_axes.set(
        title="Time of one solve, warm", xlabel="stages (joins: steps of all branches)", ylabel="seconds"
    )
    memory_axes.set(
        title=f"Peak memory above the warm process (least shown: {smallest_mib} MiB)",
        xlabel="stages (joins: steps of all branches)",
        ylabel="MiB",
    )
    for axes in (time_axes, memory_axes):
        axes.grid(alpha=0.3)
    if lines:
        figure.legend(*time_axes.get_legend_handles_labels(), loc="outside right center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    app()
