"""elbowroom with fused kernels against torch.compile, at equal memory, on a GPU: a table, a summary, JSON, a plot.

    python benchmarks/gpu_compile.py --models gpt2-medium resnet101 [--json FILE] [--plot FILE] [--jobs 8]
    python benchmarks/gpu_compile.py --tiny | --show FILE… [--plot FILE]

For each model first the peers (`torch.compile` of model and loss; the same with PyTorch's own
`activation_memory_budget`; the same with the first blocks under `checkpoint`), then elbowroom within the memory of
each of them, and within less than any reaches. Compiling takes minutes, so every cell has a process of its own and
`--jobs` of them compile side by side, of all models named, as long as the GPU's memory holds them; whoever measures
stops all others meanwhile (gate.py). With `--alone`, `torch.compile` and a first fit are run before, one after the
other, to compare how long they take to compile. A run that was cut short goes on with `--with` and its `--json`.

A step is forward, loss and backward under bf16 autocast, gradients set to None before. Its peak is the most allocated
at once above parameters, their gradients, buffers and the batch. Caches are empty when a run begins; its cells share
them.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Condition
from typing import Any

import gpu_fit
import torch
from cases import MODELS, TINY_MODELS, Case
from gate import Gate
from gpu_fit import MIB, Book, Cpu, Gpu, Row, checkpointed, fastest, mib, said
from torch._functorch import config as functorch_config

RATIOS = (0.5, 0.2, 0.05)
CHECKPOINTED = (1 / 3, 2 / 3, 1.0)  # of the blocks, the first ones
EXTRA_MIB = {"gpt2-medium": (8192, 6500), "resnet101": (1800,)}  # lower than any peer reaches
PLAIN, FIRST = "torch.compile", "elbowroom, first fit"
ALONE = 0.6  # of what `torch.compile` takes, for the fit that is timed alone
NOISE = 0.02
CONTEXT_BYTES = 700 * MIB  # of GPU memory that a process takes for itself
PEER_BYTES = 8 << 30  # a guess, not known before it ran; it holds its memory only at its end
MOST_BYTES = 64 << 30  # for a second try


def main() -> int:
    options = parse()
    if options.cell:
        return run_cell(Cell(**json.loads(options.cell)), options)
    if options.show:
        rows = [Row(**row) for path in options.show for row in json.loads(path.read_text())["rows"]]
        return finish(rows, options.plot)
    if not options.tiny and not torch.cuda.is_available():
        print("gpu_compile: there is no CUDA device here; --tiny tries the script on the CPU", file=sys.stderr)
        return 2
    book = Book(gpu_fit.facts(Cpu() if options.tiny else Gpu()), options.json)
    print(", ".join(f"{name} {value}" for name, value in book.facts.items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        run_models(Floor(options, Path(folder)), options, book)
    return finish(book.rows, options.plot)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", metavar="NAME", default=[], help="which; compiling takes minutes each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all rows here, as they come")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="time over memory, peers and ours")
    parser.add_argument("--reps", type=int, default=20, help="timed steps of each cell")
    parser.add_argument("--jobs", type=int, default=8, help="cells that compile side by side")
    parser.add_argument("--alone", action="store_true", help="also time compiling, with nothing beside it")
    parser.add_argument("--peers", nargs="*", choices=("compile", "budget", "blocks"), help="only these kinds")
    parser.add_argument("--extra", nargs="*", type=float, metavar="MIB", help="rooms for ours besides the peers'")
    parser.add_argument("--only-peers", action="store_true", help="leave ours for another run on the same machine")
    parser.add_argument(
        "--with", dest="known", type=Path, metavar="FILE", help="an earlier run's --json, to go on with"
    )
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU, to try the script")
    parser.add_argument("--show", nargs="+", type=Path, metavar="FILE", help="the table of earlier --json files")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--gate", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    known = TINY_MODELS if options.tiny else MODELS
    options.models = options.models or (list(known) if options.tiny else [])
    options.known = [Row(**row) for row in json.loads(options.known.read_text())["rows"]] if options.known else []
    if unknown := set(options.models) - set(known):
        parser.error(f"--models: no model {min(unknown)!r}; known: {', '.join(known)}")
    if not options.models and not options.show and not options.cell:
        parser.error(f"--models: name some of {', '.join(known)}")
    if options.jobs < 1 or options.reps < 1:
        parser.error("--jobs and --reps: must be at least 1")
    return options


# --- cells, side by side -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One way to take a step of a model. `setting` is the peer's ratio or share; ours have a room in bytes."""

    model: str
    how: str
    kind: str
    setting: float | None = None
    room_bytes: int | None = None
    held_bytes: int = PEER_BYTES


def run_models(floor: Floor, options: argparse.Namespace, book: Book) -> None:
    for name in options.models if options.alone else ():
        plain = floor.run(Cell(name, PLAIN, "alone"))
        room = int(ALONE * (plain.peak_bytes or 0))
        for row in plain, floor.run(Cell(name, FIRST, "alone", room_bytes=room)):
            book.add(row)
    with ThreadPoolExecutor(len(options.models)) as pool:
        for future in [pool.submit(run_model, name, floor, options, book) for name in options.models]:
            future.result()


def run_model(name: str, floor: Floor, options: argparse.Namespace, book: Book) -> None:
    """All rows of one model."""
    known = {row.how: row for row in options.known if row.model == name and row.ms and row.kind != "alone"}
    peers = [cell for cell in peer_cells(name) if options.peers is None or cell.kind in options.peers]
    found = [book.add(row) for row in floor.run_all(peers, known)]
    if options.only_peers:
        return
    peers_found = sorted((row for row in found if row.ms), key=lambda row: -row.peak_bytes)
    rooms = [(f"elbowroom as {peer.how}", peer.peak_bytes) for peer in peers_found]
    extra = EXTRA_MIB.get(name, ()) if options.extra is None else options.extra
    rooms += [(f"elbowroom, {size:,g} MiB", int(size * MIB)) for size in sorted(extra, reverse=True)]
    held = max((row.resident_bytes for row in peers_found), default=0)
    ours = [Cell(name, how, "ours", room_bytes=room, held_bytes=held + room) for how, room in rooms]
    for row in floor.run_all(ours, known):
        book.add(against(peers_found, row))


def peer_cells(name: str) -> Iterator[Cell]:
    yield Cell(name, PLAIN, "compile")
    for ratio in RATIOS:
        yield Cell(name, f"activation_memory_budget {ratio}", "budget", ratio)
    for share in CHECKPOINTED:
        yield Cell(name, f"first {share:.0%} of its blocks checkpointed", "blocks", share)


def against(peers: Sequence[Row], row: Row) -> Row:
    best = fastest(peers, row.room_bytes)
    return replace(row, best_peer=best and best.how, vs_peer=best.ms / row.ms if best and row.ms else None)


class Floor:
    """Where cells work side by side, each in a process of its own: no more than there are jobs and memory for."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.free = options.jobs, (torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else sys.maxsize)
        self.changed = Condition()

    def run_all(self, cells: Sequence[Cell], known: Mapping[str, Row]) -> Iterator[Row]:
        """In the order in which they end, those known first."""
        waiting = [cell for cell in cells if cell.how not in known]
        yield from (known[cell.how] for cell in cells if cell.how in known)
        if waiting:
            with ThreadPoolExecutor(len(waiting)) as pool:
                yield from (
                    future.result() for future in as_completed(pool.submit(self.run, cell) for cell in waiting)
                )

    def run(self, cell: Cell) -> Row:
        row = self._run(cell)
        if (row.error or "out of memory" in row.note) and cell.held_bytes < MOST_BYTES:  # too many beside it
            row = self._run(replace(cell, held_bytes=MOST_BYTES))
        return row

    def _run(self, cell: Cell) -> Row:
        with self._place(cell):
            process = self._start(cell)
            printed = process.communicate()[0].strip().splitlines() or [""]
        try:
            return Row(**json.loads(printed[-1]))
        except (ValueError, TypeError):
            return Row(cell.model, cell.how, cell.kind, cell.room_bytes, error=" | ".join(printed[-3:])[:500])

    @contextmanager
    def _place(self, cell: Cell) -> Iterator[None]:
        need = 1, cell.held_bytes + CONTEXT_BYTES
        with self.changed:
            self.changed.wait_for(lambda: self._is_empty or all(map(operator.le, need, self.free)))
            self._take(need)
        try:
            yield
        finally:
            with self.changed:
                self._take((-1, -need[1]))
                self.changed.notify_all()

    @property
    def _is_empty(self) -> bool:
        return self.free[0] == self.options.jobs

    def _take(self, need: tuple[int, int]) -> None:
        self.free = self.free[0] - need[0], self.free[1] - need[1]

    def _start(self, cell: Cell) -> subprocess.Popen:
        command = [sys.executable, __file__, "--cell", json.dumps(asdict(cell)), "--gate", str(self.folder)]
        command += ["--reps", str(self.options.reps), *(["--tiny"] if self.options.tiny else [])]
        settings = {"TORCHINDUCTOR_CACHE_DIR": f"{self.folder}/inductor", "TRITON_CACHE_DIR": f"{self.folder}/triton"}
        if cell.kind != "alone":
            threads = max(2, 2 * (os.cpu_count() or 1) // self.options.jobs)
            settings["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
        return subprocess.Popen(
            command, env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


# --- one cell ------------------------------------------------------------------------------------------------


def run_cell(cell: Cell, options: argparse.Namespace) -> int:
    """In a process of its own; the last line printed is the row."""
    gate = Gate(options.gate)
    gate.enter()
    device = Cpu() if options.tiny else Gpu()
    torch.manual_seed(0)
    try:
        with torch.device(device.kind):
            case = (TINY_MODELS if options.tiny else MODELS)[cell.model]()
        case.model.train()
        ours = cell.kind == "ours" or cell.how == FIRST
        row = (run_ours if ours else run_peer)(Bench(case, device, gate, options.reps), cell)
    except Exception as failure:
        row = Row(cell.model, cell.how, cell.kind, cell.room_bytes, error=said(failure))
    print(json.dumps(asdict(row)), flush=True)
    os._exit(0)  # compiler processes need not be waited for


@dataclass
class Bench:
    case: Case
    device: Any
    gate: Gate
    reps: int

    def __post_init__(self) -> None:
        """Parameters, buffers, batch as they are, and gradients to come."""
        for parameter in self.case.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.resident_bytes = self.device.resident_bytes(self.case)
        for parameter in self.case.model.parameters():
            parameter.grad = None

    def first(self, call: Callable[..., torch.Tensor]) -> float:
        """Seconds that the first step takes."""
        started = time.perf_counter()
        with memory_handed_back():
            self.step(call)
            if self.device.kind == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - started

    def measure(self, call: Callable[..., torch.Tensor]) -> dict[str, Any]:
        """What a step costs. Whatever is allocated besides the resident state counts, between steps, too."""
        with alone(self.gate):
            cost = self.device.measure(partial(self.step, call), self.case, self.reps)
        peak = cost.resident_bytes + cost.peak_bytes - self.resident_bytes
        return {**vars(cost), "resident_bytes": self.resident_bytes, "peak_bytes": peak}

    def step(self, call: Callable[..., torch.Tensor]) -> None:
        for parameter in self.case.model.parameters():
            parameter.grad = None
        with self.device.autocast():
            loss = call(*self.case.inputs, self.case.target)
        loss.backward()


def run_peer(bench: Bench, cell: Cell) -> Row:
    case = bench.case
    with peer_setting(case, cell):
        call = torch.compile(lambda *args: case.loss(case.model(*args[:-1]), args[-1]), dynamic=False)
        seconds = bench.first(call)
        cost = bench.measure(call)
    return Row(cell.model, cell.how, cell.kind, **cost, seconds=seconds)


def peer_setting(case: Case, cell: Cell) -> Any:
    if cell.kind == "budget":
        return functorch_config.patch(activation_memory_budget=cell.setting)
    if cell.kind == "blocks":
        blocks = next(iter(case.blocks.values()))
        return checkpointed(blocks[: round(cell.setting * len(blocks))])
    return nullcontext()


def run_ours(bench: Bench, cell: Cell) -> Row:
    from elbowroom.api import fit

    measure_alone(bench.gate)
    case, device = bench.case, bench.device
    budget = bench.resident_bytes + cell.room_bytes
    started = time.perf_counter()
    with device.autocast(), warnings.catch_warnings(record=True) as said_so:
        model = fit(case.model, *case.inputs, case.target, budget=budget, loss=case.loss, kernels="inductor")
    seconds = time.perf_counter() - started + bench.first(model)
    cost = bench.measure(model)
    (entry,) = model.elbowroom.entries.values()
    plan = entry.plan
    return Row(
        cell.model,
        cell.how,
        cell.kind,
        cell.room_bytes,
        plan.budget_bytes,
        **cost,
        predicted_bytes=plan.peak_bytes - bench.resident_bytes,
        within_budget=bench.resident_bytes + cost["peak_bytes"] <= plan.budget_bytes,
        seconds=seconds,
        note=" ".join([how_it_runs(entry), *(str(each.message) for each in said_so if entry.instead is not None)]),
        tried=[] if entry.trials is None else [told(tried) for tried in entry.trials.known],
    )


def how_it_runs(entry: Any) -> str:
    if entry.instead is not None:
        return "PyTorch's kernels"
    tried = {tuple(id(plan.program) for plan in tried.planned) for tried in entry.trials.known}
    recorded = any(region.programs[region.current][1].recorder is not None for region in entry.regions)
    return f"{len(tried)} compiled, {'replayed' if recorded else 'launched'}"


def told(tried: Any) -> dict[str, Any]:
    (plan,) = tried.planned
    predicted = {"predicted_bytes": plan.prediction.peak_bytes, "predicted_ms": 1e3 * plan.prediction.time_s}
    return {**predicted, "peak_bytes": tried.peak_bytes, "ms": 1e3 * tried.time_s, "recorded": tried.recorded}


def measure_alone(gate: Gate) -> None:
    """Have elbowroom's own measurements disturbed by nobody."""
    from elbowroom.execute import session, trials

    def within(place: Callable[[], Any], function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with place():
                return function(*args, **kwargs)

        return call

    trials.cuda_seconds = within(partial(alone, gate), trials.cuda_seconds)
    session.measure_region = within(partial(alone, gate), session.measure_region)
    trials.try_program = within(memory_handed_back, trials.try_program)


@contextmanager
def alone(gate: Gate) -> Iterator[None]:
    with gate.alone(), memory_handed_back():
        yield


@contextmanager
def memory_handed_back() -> Iterator[None]:
    """Others compile beside this process, and need the memory that its allocator would keep."""
    try:
        yield
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# --- showing -------------------------------------------------------------------------------------------------


def finish(rows: Sequence[Row], plot: Path | None) -> int:
    gpu_fit.show([gpu_fit.cells(row) for row in rows if row.kind != "alone"])
    print("Budget, peak and predicted: above parameters, gradients and batch. vs best peer: its time over ours.\n")
    print("\n".join(summary(rows)), flush=True)
    if plot is not None:
        save_plot(rows, plot)
    return int(any(row.error or row.within_budget is False for row in rows))


def summary(rows: Sequence[Row]) -> Iterator[str]:
    ours = [row for row in rows if row.kind == "ours" and row.ms is not None]
    over = [row for row in ours if row.within_budget is False]
    yield f"Over budget: {len(over)} of {len(ours)} cells{gpu_fit.listed(over, lambda row: f'{row.over_bytes:,} B')}"
    slower = [row for row in ours if row.vs_peer is not None and row.vs_peer < 1]
    yield f"Slower than the best peer within the budget: {len(slower)} cells" + gpu_fit.listed(
        slower, lambda row: f"{row.vs_peer:.3f} of the speed of {row.best_peer}"
    )
    for kind, name in (("compile", PLAIN), ("budget", "activation_memory_budget"), ("blocks", "checkpointed blocks")):
        ratios = list(matched(rows, kind))
        if ratios:
            yield f"Mean speed over {name} at its peak: {statistics.mean(ratios):.3f} ({len(ratios)} points)"
    risen = [(a, b) for a, b in rising(ours) if b.ms > (1 + NOISE) * a.ms]
    yield f"Slower although the budget is larger: {len(risen)} pairs" + "".join(
        f"\n  {b.model}: {b.ms:.1f} ms as {b.how}, {a.ms:.1f} as {a.how}" for a, b in risen
    )
    yield from compile_seconds(rows)
    yield from (f"Failed: {row.model}, {row.how}: {row.error}" for row in rows if row.error)


def matched(rows: Sequence[Row], kind: str) -> Iterator[float]:
    """A peer's time over ours within its memory."""
    for peer in rows:
        for row in rows:
            if peer.kind == kind and row.model == peer.model and row.how == f"elbowroom as {peer.how}" and row.ms:
                yield peer.ms / row.ms


def rising(ours: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    for a in ours:
        yield from ((a, b) for b in ours if a.model == b.model and a.room_bytes < b.room_bytes)


def compile_seconds(rows: Sequence[Row]) -> Iterator[str]:
    alone = {(row.model, row.how): row.seconds for row in rows if row.kind == "alone" and row.seconds}
    for model, how in alone:
        if how == FIRST and (model, PLAIN) in alone:
            ours, plain = alone[model, FIRST], alone[model, PLAIN]
            ratio = f"{ours / plain:.2f}×"
            yield f"Seconds to compile {model}, alone: torch.compile {plain:.0f}, fit {ours:.0f} ({ratio})"
    for model in dict.fromkeys(row.model for row in rows):
        plain = next((row.seconds for row in rows if row.model == model and row.kind == "compile"), None)
        ours = [row.seconds for row in rows if row.model == model and row.kind == "ours" and row.seconds]
        if plain and ours:
            mean = statistics.mean(ours)
            yield (
                f"Seconds to compile {model}, side by side: torch.compile {plain:.0f}, fit {mean:.0f} on average "
                f"({mean / plain:.2f}×), at most {max(ours):.0f}"
            )


def save_plot(rows: Sequence[Row], path: Path) -> None:
    from matplotlib import pyplot

    models = list(dict.fromkeys(row.model for row in rows))
    figure, axes = pyplot.subplots(1, len(models), figsize=(5 * len(models), 4), squeeze=False)
    kinds = {"compile": "torch.compile", "budget": "activation_memory_budget", "blocks": "checkpointed blocks"}
    for axis, model in zip(axes[0], models, strict=True):
        for kind, label in {**kinds, "ours": "elbowroom"}.items():
            these = [row for row in rows if (row.model, row.kind) == (model, kind) and row.ms]
            points = sorted((mib(row.peak_bytes), row.ms) for row in these)
            if points:
                line = "-" if kind == "ours" else ""
                axis.plot(*zip(*points, strict=True), marker="o", linestyle=line, label=label)
        axis.set(title=model, xlabel="peak above the resident state (MiB)", ylabel="ms a step", ylim=(0, None))
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
