"""The time and memory of each solver method as the problem grows: a table, a plot, and JSON for machines.

    python benchmarks/solvers.py [--quick | --full] [--method NAME]... [--json PATH] [--plot PATH]

Every measurement is one `solve` in a fresh process. The process is warm: it has solved a tiny problem of the same
kind before, so that numba's compiled code is loaded. Memory is the process's peak resident size above what it was
then.

The process that starts the others imports no solver. On Linux a child's peak begins at its parent's, even after exec,
so a large parent would hide what the child uses.
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
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich import box
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from elbowroom.problem import Chain, Join, Stage

SEED = 0
BUDGET_SHARE = 0.25  # of the store-all peak: the budget of a chain
JOIN_SHARE = 1 / 3  # of one slot for every value: the budget of a join
TINY = 8  # stages of the chain, or steps of each branch of the join, that is solved to warm up
MIB = 2**20
OUT = Path(__file__).parent / "out" / "solvers.png"


class Series(NamedTuple):
    """A method at growing sizes: stages of a chain, or, with more than one branch, steps of each branch of a join.

    `more` are the sizes that `--full` adds.
    """

    method: str
    sizes: tuple[int, ...]
    more: tuple[int, ...] = ()
    slots: int | None = None
    branches: int = 1


SERIES = (
    Series("store-all", (100, 1000, 5000)),
    Series("sequential", (100, 1000, 5000)),
    Series("sqrt", (100, 1000, 5000)),
    Series("revolve", (20, 50, 100, 200, 339), (1000,), slots=500),
    Series("persistent", (20, 50, 100, 200, 339), (1000,), slots=500),
    Series("floating", (10, 20, 40, 60), (100,), slots=100),
    Series("floating", (), (60, 100), slots=500),
    Series("least-peak", (1000, 10_000, 100_000)),
    Series("least-peak-quadratic", (1000, 10_000)),
    Series("checkpoint-sum", (100, 300, 1000)),
    Series("join", (10, 25, 50), branches=2),
    Series("join", (10, 20), branches=3),
    Series("equiv-chain", (10, 25, 50), branches=2),
    Series("equiv-chain", (10, 20), branches=3),
)
METHODS = tuple(dict.fromkeys(series.method for series in SERIES))


@dataclass(frozen=True)
class Point:
    """One measurement to make. Without a budget here, a method that needs one gets `share_of` the problem."""

    method: str
    size: int
    slots: int | None
    branches: int
    budget: int | None = None

    @property
    def series(self) -> str:
        slots = f", {self.slots} slots" if self.slots else ""
        return self.method + slots + (f", {self.branches} branches" if self.branches > 1 else "")


@dataclass(frozen=True)
class Measurement:
    point: Point
    seconds: float = math.nan
    memory_mib: float = math.nan
    budget: str = "–"  # what the method was given, in words
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) if self.error is None else {"point": asdict(self.point), "error": self.error}


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    method: Annotated[list[str] | None, typer.Option(help="Measure only this method (repeatable).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One small size of each: under 30 s.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Add the points that take minutes and GiBs.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the numbers here.")] = None,
    plot: Annotated[Path, typer.Option(help="Where the picture goes.")] = OUT,
) -> None:
    """Measure how the time and memory of each solver method grow."""
    if context.invoked_subcommand is not None:
        return
    for name in method or ():
        if name not in METHODS:
            raise typer.BadParameter(f"no method {name!r}; known: {', '.join(METHODS)}", param_hint="--method")
    if quick and full:
        raise typer.BadParameter("choose one of --quick and --full")
    machine, command = machine_facts(), shlex.join(["python", *sys.argv])
    out = Console(highlight=False, markup=False, soft_wrap=True)
    out.print(", ".join(f"{name} {value}" for name, value in machine.items()))
    measured = measure_all(points_of(method or METHODS, quick, full))
    out.print(table_of(measured))
    out.print(footnotes(measured))
    if json_path is not None:
        numbers = {"machine": machine, "command": command, "measurements": [m.to_json() for m in measured]}
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(numbers, indent=1) + "\n")
    draw([m for m in measured if m.error is None], plot)
    out.print(f"Plot: {plot}\nAgain: {command}")
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
        "numba": "off" if os.environ.get("ELBOWROOM_NUMBA") == "0" else numba,
    }


def points_of(methods: Sequence[str], quick: bool, full: bool) -> list[Point]:
    return [
        Point(series.method, size, series.slots, series.branches)
        for series in SERIES
        if series.method in methods
        for size in (series.sizes[1:2] if quick else series.sizes + series.more * full)
    ]


# --- measuring -----------------------------------------------------------------------------------------------


def measure_all(points: Sequence[Point]) -> list[Measurement]:
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    now = TextColumn("{task.fields[now]}")
    measured = []
    with Progress(*columns, now, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Measuring", total=len(points), now="")
        for point in points:
            progress.update(task, now=f"{point.series}: {point.size}")
            measured.append(in_new_process(point))
            progress.advance(task)
    return measured


def in_new_process(point: Point) -> Measurement:
    command = [sys.executable, __file__, "measure", json.dumps(asdict(point))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        return Measurement(point, error=f"{reason}\n  again: {shlex.join(command)}")
    answer = json.loads(done.stdout)
    if "least_budget" in answer:
        # The share was too little for this method. Again with its least, in a process that has solved nothing yet.
        return in_new_process(replace(point, budget=answer["least_budget"]))
    return Measurement(point=Point(**answer.pop("point")), **answer)


@app.command(hidden=True)
def measure(point_json: str) -> None:
    """Make one measurement in this process, and print it as JSON."""
    from elbowroom.solve import Options, method_named, solve

    point = Point(**json.loads(point_json))
    method = method_named(point.method)
    tiny = problem_of(replace(point, size=TINY))
    least = method.least_budget(tiny, Options(point.slots))
    for budget in (least, least * 3 // 2):  # a tight and a roomy budget: together they call every kernel
        solve(tiny, budget, point.method, slots=point.slots)
    problem = problem_of(point)
    words = "least"
    if point.budget is None:
        words = "share" if method.needs_budget else "own"
        point = replace(point, budget=share_of(problem) if method.needs_budget else None)
    warm_mib, started = peak_mib(), time.perf_counter()
    result = solve(problem, point.budget, point.method, slots=point.slots)
    seconds, memory_mib = time.perf_counter() - started, peak_mib() - warm_mib
    if result.feasible:
        answer = {"seconds": seconds, "memory_mib": memory_mib, "budget": words, "point": asdict(point)}
    else:
        answer = {"least_budget": result.least_budget}
    print(json.dumps(answer))


def problem_of(point: Point) -> Chain | Join:
    from elbowroom.problem import Join

    if point.branches > 1:
        return Join((point.size,) * point.branches, 1.0, 2.0, 1.0, (1,) * point.branches)
    return random_chain(point.size)


def random_chain(stages: int) -> Chain:
    """A chain of random stages and the loss. A shorter chain is the beginning of a longer one.

    Outputs have 1 to 16 MiB, saved sets are 1 to 6 times as large, times are roughly in proportion to saved sets.
    Sizes have no divisor in common, so a method that counts in slots always has to round.
    """
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


def share_of(problem: Chain | Join) -> int:
    """A budget, found without running a schedule, which would take memory and so hide some of the solver's."""
    from elbowroom.problem import Join
    from elbowroom.solve.segments import Segments

    if isinstance(problem, Join):
        return int(JOIN_SHARE * (sum(problem.lengths) + len(problem.lengths)))
    return int(BUDGET_SHARE * Segments(problem).peak([len(problem)]))


def peak_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (MIB if sys.platform == "darwin" else 1024)


# --- showing -------------------------------------------------------------------------------------------------


def table_of(measured: Sequence[Measurement]) -> Table:
    sizes = Counter(m.point.series for m in measured)
    table = Table("method", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("stages", "slots", "budget", "seconds", "memory MiB", "growth"):
        table.add_column(heading, justify="right")
    for before, m in zip([None, *measured[:-1]], measured, strict=True):
        point = m.point
        if before is not None and before.point.series != point.series and sizes[before.point.series] > 1:
            table.add_section()
        stages = str(point.size) if point.branches == 1 else f"{point.branches} × {point.size}"
        slots = point.slots if point.branches == 1 else point.budget
        numbers = (f"{m.seconds:.4f}", f"{m.memory_mib:.1f}", growth(before, m))
        table.add_row(point.method, stages, str(slots or "–"), m.budget, *(numbers if not m.error else ["failed"]))
    return table


def growth(before: Measurement | None, now: Measurement) -> str:
    """The exponent x if the seconds grew as size^x since the previous size of the series."""
    if before is None or before.point.series != now.point.series or before.error:
        return "–"
    return f"{math.log(now.seconds / before.seconds) / math.log(now.point.size / before.point.size):.1f}"


def footnotes(measured: Sequence[Measurement]) -> str:
    lines = [
        "Seconds: wall time of one warm solve (a tiny problem of the same kind goes before it).",
        "Memory: peak resident size above the warm process's.",
        f"Budget: share = {BUDGET_SHARE:.0%} of the store-all peak, or for a join a third of a slot per value;",
        "        least = the method's least, where that is more; own = the method takes none.",
        "Growth: x where seconds grew as size^x since the row above. A join's slots grow with its size.",
        "For reference, from the thesis (001): C code takes under 20 s for 339 stages × 500 slots.",
        *(f"Failed: {m.point.series}: {m.point.size}: {m.error}" for m in measured if m.error),
    ]
    return "\n".join(lines)


def draw(measured: Sequence[Measurement], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    least_mib = 0.1  # less is drawn as this much, because a logarithmic axis has no zero
    figure, (times, memories) = pyplot.subplots(1, 2, figsize=(14, 6), sharex=True, layout="constrained")
    for i, series in enumerate(dict.fromkeys(m.point.series for m in measured)):
        line = [m for m in measured if m.point.series == series]
        style = {"color": f"C{i % 10}", "marker": "osD^vP*X"[i % 8], "linestyle": "-" if i < 10 else "--"}
        stages = [m.point.size * m.point.branches for m in line]
        times.loglog(stages, [m.seconds for m in line], label=series, **style)
        memories.loglog(stages, [max(m.memory_mib, least_mib) for m in line], **style)
    times.set(title="Time of one solve, warm", ylabel="seconds")
    memories.set(title=f"Peak memory above the warm process (from {least_mib} MiB)", ylabel="MiB")
    for axes in (times, memories):
        axes.set_xlabel("stages (joins: steps of all branches)")
        axes.grid(alpha=0.3)
    if measured:
        figure.legend(loc="outside right center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    app()
