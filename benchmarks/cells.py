"""The cells of a comparison on a GPU, each in a process of its own: they compile side by side and are measured alone.

A cell is one way to take a step of a model, and becomes one row. Compiling takes minutes, so `--jobs` cells compile
at once, as long as the GPU's memory holds them. A process that measures stops all others meanwhile (gate.py).

A step is forward, loss and backward under bf16 autocast, or in float32 where its case says so, with gradients set to
None before. Its peak is the most allocated at once above parameters, their gradients, buffers and the batch.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Condition
from typing import Any

import torch
import torch._inductor.config
from cases import Case
from gate import Gate
from rows import MIB, NO_LIMIT, Row, check_models, rows_of, said
from step_costs import Cpu, Gpu

CONTEXT_BYTES = 700 * MIB  # GPU memory that every process takes for CUDA itself
PEER_BYTES = 8 << 30  # a guess of what a peer takes, which is not known before it has run
MOST_BYTES = 64 << 30  # what a cell is given on its second try, after it ran out of memory


@dataclass(frozen=True)
class Cell:
    """One way to take a step of a model, to be measured in a process of its own.

    `setting` is the ratio or share that the kind of cell needs. `room_bytes` is the budget above what is resident,
    for ours, and `offload` whether values may move to the host. `held_bytes` is the GPU memory that the process is
    expected to hold, so that not too many run at once.
    """

    model: str
    how: str
    kind: str
    setting: float | None = None
    room_bytes: int | None = None
    held_bytes: int = PEER_BYTES
    kernels: str = "inductor"
    offload: str = "never"


# --- side by side --------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a script with cells; `--cell` and `--gate` are for the processes that it starts itself."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all rows here, as they come")
    parser.add_argument("--reps", type=int, default=20, help="timed steps of each cell")
    parser.add_argument("--compilations", type=int, default=3, help="plans that a fit may compile, at most")
    parser.add_argument("--jobs", type=int, default=8, help="cells that compile side by side")
    parser.add_argument(
        "--beside",
        type=Path,
        metavar="FOLDER",
        help="scripts that run at the same time with the same folder share caches, and stop while another measures",
    )
    parser.add_argument(
        "--memory", type=float, metavar="GIB", help="GPU memory for all cells together (default: what is free)"
    )
    parser.add_argument(
        "--with", dest="known", type=Path, metavar="FILE", help="an earlier run's --json, to go on with"
    )
    parser.add_argument(
        "--again", nargs="+", default=[], metavar="HOW", help="rows or kinds of --with to measure again all the same"
    )
    parser.add_argument(
        "--inductor",
        nargs="+",
        type=setting,
        default=[],
        metavar="NAME=NUMBER",
        help="settings of Inductor to try",
    )
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU, to try the script")
    parser.add_argument("--show", nargs="+", type=Path, metavar="FILE", help="the table of earlier --json files")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--gate", type=Path, help=argparse.SUPPRESS)


def setting(text: str) -> tuple[str, int]:
    """A setting of Inductor as it is written on the command line: `realize_reads_threshold=16`."""
    name, _, number = text.partition("=")
    if not hasattr(torch._inductor.config, name):
        raise argparse.ArgumentTypeError(f"Inductor has no setting {name!r}")
    return name, int(number)


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace, models: Collection[str]) -> None:
    """Stop the script where options make no sense. `options.known` becomes the rows of `--with` that stand."""
    known = rows_of(options.known) if options.known else []
    options.known = [row for row in known if not {row.kind, row.how}.intersection(options.again)]
    check_models(parser, options.models, models)
    for name in ("jobs", "reps", "compilations"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: must be at least 1")


@contextmanager
def floor_for(script: str, options: argparse.Namespace) -> Iterator[Floor]:
    """A floor in a folder of its own, which is deleted afterwards, or in the folder of `--beside`."""
    if options.beside is not None:
        options.beside.mkdir(parents=True, exist_ok=True)
        yield Floor(script, options, options.beside)
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Floor(script, options, Path(folder))


class Floor:
    """Where cells work side by side, each in a process of its own: no more than there are jobs and memory for.

    `script` runs one cell when it is called with `--cell`. `folder` is where the processes find each other's gate and
    caches.
    """

    def __init__(self, script: str, options: argparse.Namespace, folder: Path) -> None:
        self.script = script
        self.options = options
        self.folder = folder
        self.free = options.jobs, memory_for_cells(options.memory)  # jobs and bytes that are not taken
        self.changed = Condition()

    def run_all(self, cells: Sequence[Cell], known: Mapping[str, Row]) -> Iterator[Row]:
        """The rows of all cells: first those known from an earlier run, then the others in the order they end."""
        waiting = [cell for cell in cells if cell.how not in known]
        yield from (known[cell.how] for cell in cells if cell.how in known)
        if waiting:
            with ThreadPoolExecutor(len(waiting)) as pool:
                yield from (
                    future.result() for future in as_completed(pool.submit(self.run, cell) for cell in waiting)
                )

    def run_or_take(self, cell: Cell, known: Mapping[str, Row]) -> Row:
        return known[cell.how] if cell.how in known else self.run(cell)

    def run(self, cell: Cell) -> Row:
        """The row of one cell. Where it failed, others may have taken its memory: it gets more for a second try."""
        row = self._run(cell)
        if (row.error or "out of memory" in row.note) and cell.held_bytes < MOST_BYTES:
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
        """Wait until a job and the cell's memory are free. An empty floor takes any cell, however large."""
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
        command = [sys.executable, self.script, "--cell", json.dumps(asdict(cell)), "--gate", str(self.folder)]
        command += ["--reps", str(self.options.reps), "--compilations", str(self.options.compilations)]
        command += ["--tiny"] if self.options.tiny else []
        if self.options.inductor:
            command += ["--inductor", *(f"{name}={number}" for name, number in self.options.inductor)]
        caches = self.folder
        if cell.kind == "alone":  # it must not find what another cell has compiled or measured
            caches = Path(tempfile.mkdtemp(dir=self.folder))
            settings = {"ELBOWROOM_CACHE": f"{caches}/elbowroom"}
        else:
            threads = max(2, 2 * (os.cpu_count() or 1) // self.options.jobs)
            settings = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
        settings |= {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
        return subprocess.Popen(
            command, env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


def memory_for_cells(wish: float | None) -> int:
    """Bytes of the GPU for all cells together: as `--memory` says in GiB, or what is free."""
    if wish is not None:
        return int(wish * 2**30)
    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else sys.maxsize


# --- one cell ------------------------------------------------------------------------------------------------


def run_cell(
    options: argparse.Namespace, makers: Mapping[str, Callable[[], Case]], run: Callable[[Bench, Cell], Row]
) -> int:
    """Run the cell of `--cell`: this process is its own. The last line that it prints is the row, as JSON."""
    cell = Cell(**json.loads(options.cell))
    gate = Gate(options.gate)
    gate.enter()
    device = Cpu() if options.tiny else Gpu()
    torch.manual_seed(0)
    for name, number in options.inductor:
        setattr(torch._inductor.config, name, number)
    try:
        with torch.device(device.kind):
            case = makers[cell.model]()
        case.model.train()
        row = run(Bench(case, device, gate, options.reps, options.compilations), cell)
    except Exception as failure:
        row = Row(cell.model, cell.how, cell.kind, cell.room_bytes, error=said(failure))
    print(json.dumps(asdict(row)), flush=True)
    os._exit(0)  # without waiting for the compiler's processes


@dataclass
class Bench:
    """A model on a device, in the process of one cell: takes and measures its steps."""

    case: Case
    device: Any
    gate: Gate
    reps: int
    compilations: int

    def __post_init__(self) -> None:
        """Count what is resident: parameters, buffers, the batch, and gradients, which are only there meanwhile."""
        for parameter in self.case.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.resident_bytes = self.device.resident_bytes(self.case)
        for parameter in self.case.model.parameters():
            parameter.grad = None

    def first(self, call: Callable[..., torch.Tensor]) -> float:
        """Take the first step, which compiles; returns the seconds that it took."""
        started = time.perf_counter()
        with memory_handed_back():
            self.step(call)
            if self.device.kind == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - started

    def measure(self, call: Callable[..., torch.Tensor]) -> dict[str, Any]:
        """What a step costs, as fields of a row. All that is allocated besides the resident state counts into the
        peak, also what is held between steps."""
        with alone(self.gate):
            cost = self.device.measure(partial(self.step, call), self.case, self.reps)
        peak = cost.resident_bytes + cost.peak_bytes - self.resident_bytes
        return {**vars(cost), "resident_bytes": self.resident_bytes, "peak_bytes": peak}

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.case.keeps_float32 else self.device.autocast()

    def step(self, call: Callable[..., torch.Tensor]) -> None:
        for parameter in self.case.model.parameters():
            parameter.grad = None
        with self.autocast():
            loss = call(*self.case.inputs, self.case.target)
        loss.backward()


def run_fitted(bench: Bench, cell: Cell) -> tuple[Row, Any]:
    """elbowroom within the cell's room, or without a limit if it has none: the row, and the plan that ran."""
    from elbowroom.api import fit

    case = bench.case
    budget = NO_LIMIT if cell.room_bytes is None else bench.resident_bytes + cell.room_bytes
    started = time.perf_counter()
    wishes = {"loss": case.loss, "kernels": cell.kernels, "compilations": bench.compilations, "offload": cell.offload}
    with bench.autocast(), warnings.catch_warnings(record=True) as warned:
        model = fit(case.model, *case.inputs, case.target, budget=budget, **wishes)
    seconds = time.perf_counter() - started + bench.first(model)
    cost = bench.measure(model)
    (entry,) = model.elbowroom.entries.values()
    plan = entry.plan
    row = Row(
        cell.model,
        cell.how,
        cell.kind,
        cell.room_bytes,
        plan.budget_bytes,
        **cost,
        predicted_bytes=plan.peak_bytes - bench.resident_bytes,
        within_budget=bench.resident_bytes + cost["peak_bytes"] <= plan.budget_bytes,
        seconds=seconds,
        note=" ".join([how_it_runs(entry), *(str(each.message) for each in warned if entry.instead is not None)]),
        tried=[] if entry.trials is None else [tried_as_json(tried) for tried in entry.trials.known],
    )
    return row, plan


def how_it_runs(entry: Any) -> str:
    """In words: how many programs were compiled for a session's entry, and whether its CUDA graphs are replayed."""
    if entry.instead is not None or not entry.graphs[0].measured.is_fused:
        return "PyTorch's kernels"
    compiled = {tuple(id(plan.program) for plan in tried.planned) for tried in entry.trials.known}
    recorded = any(region.programs[region.current].recorder is not None for region in entry.regions)
    return f"{len(compiled)} compiled, {'replayed' if recorded else 'launched'}"


def tried_as_json(tried: Any) -> dict[str, Any]:
    """A program that was measured on trial: what was predicted of it, and what it took."""
    (plan,) = tried.planned
    predicted = {"predicted_bytes": plan.prediction.peak_bytes, "predicted_ms": 1e3 * plan.time_s}
    measured = {"peak_bytes": tried.peak_bytes, "ms": 1e3 * tried.time_s, "recorded": tried.recorded}
    if tried.recorded:
        predicted["predicted_pool_bytes"] = tried.expected_bytes
    return {**predicted, **measured, "kernels_ms": 1e3 * tried.kernels_s, "host_ms": 1e3 * tried.host_s}


def measure_alone(gate: Gate) -> None:
    """Wrap the functions with which elbowroom measures, so that all other processes stop meanwhile.

    Each is replaced in the modules that call it. To be called once in a process: a function that is wrapped twice
    would wait for itself at the gate.
    """
    from elbowroom.execute import rehearsal
    from elbowroom.session import planning, steps

    def within(place: Callable[[], Any], function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with place():
                return function(*args, **kwargs)

        return call

    for module in (steps, planning):
        module.measured = within(partial(alone, gate), module.measured)
    rehearsal.in_a_row = within(gate.alone, rehearsal.in_a_row)
    rehearsal.kernels_and_host = within(gate.alone, rehearsal.kernels_and_host)
    rehearsal.launched = within(memory_handed_back, rehearsal.launched)
    rehearsal.recorded = within(memory_handed_back, rehearsal.recorded)


@contextmanager
def alone(gate: Gate) -> Iterator[None]:
    """All other processes stop, and afterwards they get the memory that this one does not need."""
    with gate.alone(), memory_handed_back():
        yield


@contextmanager
def memory_handed_back() -> Iterator[None]:
    """Empty the allocator's cache afterwards: processes that compile beside this one need the memory."""
    try:
        yield
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
