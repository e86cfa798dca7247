"""elbowroom against checkpoints placed by hand, at equal memory, on a GPU: a table, a summary, JSON for machines.

    python benchmarks/gpu_fit.py [--models resnet50 gpt2-medium …] [--json FILE] [--reps 20]
    python benchmarks/gpu_fit.py --list | --tiny | --show FILE…

For each model, in this process: first the peers (eager, `checkpoint` on its blocks, `checkpoint_sequential` over its
chain of modules), then elbowroom within the memory of each peer that no other beats in both time and memory. A step
is forward, loss and backward under bf16 autocast, added to gradients that are there already. Its peak is the most
allocated at once, above what was allocated before. A failure becomes a row, and the run goes on. `--tiny` tries all
of this on the CPU with small models; `--show` prints the table of earlier runs again, several as one.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from cases import MODELS, TINY_MODELS, Case
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

MIB = 2**20
WARM_UPS = 3
EVERY = (1, 2, 4)  # of these blocks, one is under `checkpoint`
SEGMENTS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48)  # and as many as the chain is long
MOST_BUDGETS = 6  # taken from peers, per model
SAME_MEMORY = 0.03  # budgets closer than this are one
TOLERANCE = 0.005  # by which a peer may exceed a budget and still be compared at it
FULL = 1.02  # of eager's peak
NO_LIMIT = 2**50
TOO_SMALL = 2**10
FULL_MEMORY, LEAST_MEMORY = "elbowroom, full memory", "elbowroom, least memory"
COMPILED_ONLY = ("llama-1b", "bert-large")  # of interest to gpu_compile.py
EXTRA_MIB = {"resnet101": (3080, 2048), "gpt2-medium": (11144,)}  # figures in earlier records, over the resident


def main() -> int:
    options = parse()
    makers = TINY_MODELS if options.tiny else MODELS
    if options.list:
        print(*makers, sep="\n")
        return 0
    if options.show:
        return finish([Row(**row) for path in options.show for row in json.loads(path.read_text())["rows"]])
    book = open_book("gpu_fit", options)
    if book is None:
        return 2
    device = Cpu() if options.tiny else Gpu()
    for name in options.models or [name for name in makers if name not in COMPILED_ONLY]:
        run_model(name, makers[name], device, options.reps, book)
    return finish(book.rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only these (see --list)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all rows here, as they come")
    parser.add_argument("--reps", type=int, help="timed steps of each cell (default: 20; with --tiny 2)")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU, to try the script")
    parser.add_argument("--list", action="store_true", help="name the models and stop")
    parser.add_argument("--show", nargs="+", type=Path, metavar="FILE", help="the table of earlier --json files")
    options = parser.parse_args()
    known = TINY_MODELS if options.tiny else MODELS
    check_models(parser, options.models or (), known)
    if options.reps is None:
        options.reps = 2 if options.tiny else 20
    if options.reps < 1:
        parser.error("--reps: must be at least 1")
    return options


def check_models(parser: argparse.ArgumentParser, chosen: Collection[str], known: Collection[str]) -> None:
    if unknown := set(chosen) - set(known):
        parser.error(f"--models: no model {min(unknown)!r}; known: {', '.join(known)}")


def facts(device: Device) -> dict[str, str]:
    where = torch.cuda.get_device_name() if device.kind == "cuda" else "CPU"
    return {"device": where, "torch": torch.__version__, "Python": platform.python_version()}


def run_model(name: str, make: Callable[[], Case], device: Device, reps: int, book: Book) -> None:
    """All rows of one model. Nothing of it is left on the device afterwards."""
    torch.manual_seed(0)
    try:
        with torch.device(device.kind):
            case = make()
        case.model.train()
        for parameter in case.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        bench = Bench(name, case, device, reps, book)
        measure_peers(bench)
        measure_ours(bench)
    except Exception as failure:
        book.add(Row(name, "set-up", "fit", error=said(failure)))
    case = bench = parameter = None  # the last references
    torch._dynamo.reset()
    device.clean()


# --- what is compared ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """A step: its time (the median, and the fastest), the resident bytes before it, its peak above those."""

    ms: float
    fastest_ms: float
    resident_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Row:
    """A cell of the comparison. `kind` is eager, blocks, chain (`checkpoint_sequential`), ours or fit.

    `room_bytes` is the budget less what is resident; where that was not enough, `least_bytes` is what was taken
    instead. Ratios are another's time over ours: above 1, ours is faster.
    """

    model: str
    how: str
    kind: str
    room_bytes: int | None = None
    budget_bytes: int | None = None
    least_bytes: int | None = None
    ms: float | None = None
    fastest_ms: float | None = None  # where the host sets the pace, its other work moves the median
    peak_bytes: int | None = None
    resident_bytes: int | None = None
    predicted_bytes: int | None = None  # the peak above what is resident, as is `peak_bytes`
    predicted_resident_bytes: int | None = None
    within_budget: bool | None = None
    best_peer: str | None = None  # of those that need no more than the room
    vs_peer: float | None = None
    vs_chain: float | None = None
    vs_eager: float | None = None
    seconds: float | None = None  # spent in `fit` or `set_budget`
    note: str = ""
    tried: list[dict[str, Any]] = field(default_factory=list)  # every program that was compiled for it
    error: str | None = None

    @property
    def over_bytes(self) -> int:
        return self.resident_bytes + self.peak_bytes - self.budget_bytes

    @property
    def prediction_error(self) -> float | None:
        """Positive where more was predicted than measured."""
        if not self.predicted_bytes or not self.peak_bytes:
            return None
        return self.predicted_bytes / self.peak_bytes - 1


@dataclass
class Book:
    """Takes rows down: on the screen at once, and in the file."""

    facts: dict[str, str]
    path: Path | None
    rows: list[Row] = field(default_factory=list)
    began_s: float = field(default_factory=time.perf_counter)

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        print(f"{time.perf_counter() - self.began_s:7.1f} s  {row.model:12} {row.how:42} {in_words(row)}", flush=True)
        if self.path is not None:
            written = {"machine": self.facts, "command": shlex.join(["python", *sys.argv])}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({**written, "rows": [asdict(row) for row in self.rows]}, indent=1) + "\n")
        return row


def open_book(script: str, options: argparse.Namespace) -> Book | None:
    """For what this machine is about to measure; none where there is nothing to measure on."""
    device = device_for(script, tiny=options.tiny)
    if device is None:
        return None
    book = Book(facts(device), options.json)
    print(", ".join(f"{name} {value}" for name, value in book.facts.items()), flush=True)
    return book


def in_words(row: Row) -> str:
    if row.error is not None:
        return f"failed: {row.error}"
    parts = [
        (row.ms, "{:.1f} ms"),
        (mib(row.peak_bytes), "peak {:,.1f} MiB"),
        (mib(row.room_bytes), "room {:,.1f} MiB"),
        (mib(row.predicted_bytes), "predicted {:,.1f} MiB"),
        (row.vs_peer, "{:.2f}× the best peer's speed"),
        (row.seconds, "planned in {:.1f} s"),
        (row.note or None, "({})"),
    ]
    over = ["OVER BUDGET"] if row.within_budget is False else []
    return ", ".join(over + [form.format(value) for value, form in parts if value is not None])


@dataclass
class Bench:
    """One model on one device: measures ways to take a step of it."""

    name: str
    case: Case
    device: Device
    reps: int
    book: Book

    def peer(self, how: str, kind: str, call: Callable[..., Any]) -> None:
        case = self.case
        try:
            cost = self.measure(lambda: case.loss(call(*case.inputs), case.target))
            row = Row(self.name, how, kind, **asdict(cost))
        except Exception as failure:
            row = Row(self.name, how, kind, error=said(failure))
        self.book.add(row)
        self.device.clean()

    def measure(self, loss: Callable[[], torch.Tensor]) -> Cost:
        def step() -> None:
            with self.device.autocast():
                value = loss()
            value.backward()

        return self.device.measure(step, self.case, self.reps)

    @property
    def peers(self) -> list[Row]:
        return [row for row in self.book.rows if row.model == self.name and row.kind != "ours" and row.ms is not None]

    @property
    def eager(self) -> Row | None:
        return next((row for row in self.peers if row.kind == "eager"), None)


def said(failure: Exception) -> str:
    lines = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {lines[0]}"[:300]


# --- the peers -----------------------------------------------------------------------------------------------


def measure_peers(bench: Bench) -> None:
    case = bench.case
    bench.peer("eager", "eager", case.model)
    for block, modules in case.blocks.items():
        for every in EVERY:
            if every < len(modules):
                with checkpointed(modules[::every]):
                    bench.peer(f"checkpoint, {ordinal(every)} {block}", "blocks", case.model)
    if thrifty := [module for module in case.model.modules() if getattr(module, "memory_efficient", None) is False]:
        with memory_efficient(thrifty):
            bench.peer("the model's own memory_efficient", "blocks", case.model)
    chain = nn.Sequential(*case.chain)
    for segments in [n for n in SEGMENTS if n < len(chain)] + [len(chain)] * bool(case.chain):
        split = partial(checkpoint_sequential, chain, segments, use_reentrant=False)
        bench.peer(f"checkpoint_sequential, {segments} segments", "chain", lambda x, split=split: split(input=x))


@contextmanager
def checkpointed(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Keep only the inputs of these modules, and compute what is inside them again."""
    for module in modules:
        module.forward = partial(run_checkpointed, module.forward)
    try:
        yield
    finally:
        for module in modules:
            del module.forward  # the class's own shows again


def run_checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # A dense block appends to the list that it hands to its layers; the second run must see what the first saw.
    args = tuple(list(value) if isinstance(value, list) else value for value in args)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


@contextmanager
def memory_efficient(modules: Sequence[Any]) -> Iterator[None]:
    """torchvision's switch for DenseNet: concatenations and the normalizations after them are computed again."""
    for module in modules:
        module.memory_efficient = True
    try:
        yield
    finally:
        for module in modules:
            module.memory_efficient = False


def ordinal(every: int) -> str:
    return {1: "every", 2: "every 2nd", 3: "every 3rd"}.get(every, f"every {every}th")


# --- ours ----------------------------------------------------------------------------------------------------


def measure_ours(bench: Bench) -> None:
    """Captured once, without a limit; then planned and measured within one budget after another."""
    fitted = fit_without_limit(bench)
    if fitted is None:
        return
    for how, room in rooms(bench):
        measure_budget(bench, fitted, how, room)
    measure_least(bench, fitted)


@dataclass
class Ours:
    """The fitted model, what was resident before it was fitted, and what elbowroom had to say about it."""

    model: Any
    resident_bytes: int
    remarks: list[str]

    @property
    def session(self) -> Any:
        return self.model.elbowroom

    @property
    def plan(self) -> Any:
        """The latest; None if the model runs unplanned."""
        return [entry.plan for entry in self.session.entries.values()][-1]

    @property
    def note(self) -> str:
        again = ["captured again"] if len(self.session.entries) > 1 else []
        unplanned = [entry.unplanned for entry in self.session.entries.values() if entry.unplanned]
        return "; ".join(dict.fromkeys(unplanned or self.remarks + again))


def fit_without_limit(bench: Bench) -> Ours | None:
    case, device, remarks = bench.case, bench.device, []
    try:
        from elbowroom.api import fit

        device.clean()
        resident = device.resident_bytes(case)
        started = time.perf_counter()
        with device.autocast(), remarks_in(remarks):
            model = fit(case.model, *case.inputs, case.target, budget=NO_LIMIT, loss=case.loss, kernels="torch")
        seconds = time.perf_counter() - started
        fitted = Ours(model, resident, remarks)
        grown = device.resident_bytes(case) - resident
        left = f"left {mib(grown):,.1f} MiB on the device" if grown > MIB else ""
        row = Row(bench.name, "elbowroom, first fit", "fit", seconds=seconds, note=fitted.note or left)
    except Exception as failure:
        fitted, row = None, Row(bench.name, "elbowroom, first fit", "fit", error=said(failure))
    bench.book.add(row)
    device.clean()
    return fitted


def rooms(bench: Bench) -> Iterator[tuple[str, int]]:
    """Budgets above what is resident, and what they stand for."""
    if bench.eager is not None:
        yield FULL_MEMORY, int(bench.eager.peak_bytes * FULL)
    for peer in worth_matching(bench.peers):
        yield f"elbowroom as {peer.how}", peer.peak_bytes
    for extra_mib in EXTRA_MIB.get(bench.name, ()):
        yield f"elbowroom, {extra_mib:,} MiB", extra_mib * MIB


def worth_matching(peers: Sequence[Row]) -> list[Row]:
    """The peers that no other beats in both time and memory, spread over their memory, the largest first."""
    front: list[Row] = []
    for peer in sorted(peers, key=lambda peer: (peer.peak_bytes, peer.ms)):
        if not front or peer.ms < front[-1].ms:
            front.append(peer)
    distinct: list[Row] = []
    for peer in reversed(front):
        if not distinct or peer.peak_bytes < (1 - SAME_MEMORY) * distinct[-1].peak_bytes:
            distinct.append(peer)
    if len(distinct) <= MOST_BUDGETS:
        return distinct
    return [distinct[round(i * (len(distinct) - 1) / (MOST_BUDGETS - 1))] for i in range(MOST_BUDGETS)]


def measure_budget(bench: Bench, fitted: Ours, how: str, room: int) -> None:
    try:
        row = within(bench, fitted, how, room)
    except Exception as failure:
        row = Row(bench.name, how, "ours", room, error=said(failure))
    bench.book.add(row)
    bench.device.clean()


def within(bench: Bench, fitted: Ours, how: str, room: int) -> Row:
    """Plan within a budget and measure that."""
    case, budget = bench.case, fitted.resident_bytes + room
    with remarks_in(fitted.remarks):
        seconds = planning_seconds(fitted.session, budget)
        cost = bench.measure(lambda: fitted.model(*case.inputs, case.target))
    plan, best = fitted.plan, fastest(bench.peers, room)
    chain = fastest([peer for peer in bench.peers if peer.kind == "chain"], room)
    return Row(
        bench.name,
        how,
        "ours",
        room,
        budget,
        **asdict(cost),
        predicted_bytes=None if plan is None else plan.peak_bytes - plan.resident_bytes,
        predicted_resident_bytes=None if plan is None else plan.resident_bytes,
        within_budget=cost.resident_bytes + cost.peak_bytes <= budget,
        best_peer=best and best.how,
        vs_peer=best and best.ms / cost.ms,
        vs_chain=chain and chain.ms / cost.ms,
        vs_eager=bench.eager and bench.eager.ms / cost.ms,
        seconds=seconds,
        note=fitted.note,
    )


def planning_seconds(session: Any, budget: int) -> float:
    started = time.perf_counter()
    session.set_budget(budget)
    return time.perf_counter() - started


def fastest(peers: Sequence[Row], room: int) -> Row | None:
    fitting = [peer for peer in peers if peer.peak_bytes <= room * (1 + TOLERANCE)]
    return min(fitting, key=lambda peer: peer.ms, default=None)


def measure_least(bench: Bench, fitted: Ours) -> None:
    """The smallest budget that has a plan."""
    from elbowroom.errors import BudgetTooSmall

    try:
        fitted.session.set_budget(TOO_SMALL)
        bench.book.add(Row(bench.name, LEAST_MEMORY, "ours", error=f"no plan to make smaller: {fitted.note}"))
    except BudgetTooSmall as refusal:
        measure_budget(bench, fitted, LEAST_MEMORY, refusal.least_budget - fitted.resident_bytes)
    except Exception as failure:
        bench.book.add(Row(bench.name, LEAST_MEMORY, "ours", error=said(failure)))


@contextmanager
def remarks_in(remarks: list[str]) -> Iterator[None]:
    """Collect elbowroom's warnings, which it gives once, and let no other warning into the table."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    remarks += [str(each.message) for each in caught if str(each.message).startswith("elbowroom")]


# --- the devices ---------------------------------------------------------------------------------------------


class Device:
    """Where the steps run, and how they are measured there."""

    kind: str

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.kind, torch.bfloat16)

    def clean(self) -> None:
        gc.collect()

    def resident_bytes(self, case: Case) -> int:
        raise NotImplementedError

    def measure(self, step: Callable[[], None], case: Case, reps: int) -> Cost:
        raise NotImplementedError


class Gpu(Device):
    """CUDA events for time, the allocator's own count for memory."""

    kind = "cuda"

    def clean(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def resident_bytes(self, case: Case) -> int:
        return torch.cuda.memory_allocated()

    def measure(self, step: Callable[[], None], case: Case, reps: int) -> Cost:
        """Steps in a row, as in training: the host runs ahead, and is not waited for at the start of each."""
        for _ in range(WARM_UPS):
            step()
        torch.cuda.synchronize()
        gc.collect()
        resident = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(reps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        torch.cuda.synchronize()
        ms = [begin.elapsed_time(end) for begin, end in pairwise(marks)]
        peak = torch.cuda.max_memory_allocated() - resident
        return Cost(statistics.median(ms), min(ms), resident + self.hidden_bytes(), peak)

    def hidden_bytes(self) -> int:
        """Of CUDA graphs' pools, what PyTorch does not count as allocated: gaps too small for a tensor."""
        self.clean()
        pools = [segment for segment in torch.cuda.memory_snapshot() if any(segment["segment_pool_id"])]
        blocks = [block for segment in pools for block in segment["blocks"]]
        return sum(block["size"] for block in blocks if block["state"] == "inactive")


class Cpu(Device):
    """For trying the script: wall time, and memory of one more step under the profiler."""

    kind = "cpu"

    def __init__(self) -> None:
        torch.set_num_threads(1)  # the steps are too small for more

    def resident_bytes(self, case: Case) -> int:
        from elbowroom.measure.memory import live_bytes

        parameters = list(case.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return live_bytes([*parameters, *gradients, *case.model.buffers(), *case.inputs, case.target])

    def measure(self, step: Callable[[], None], case: Case, reps: int) -> Cost:
        from elbowroom.measure.memory import measure

        for _ in range(WARM_UPS):
            step()
        ms = [self._time(step) for _ in range(reps)]
        with measure("cpu", timeline=False) as measured:
            step()
        return Cost(statistics.median(ms), min(ms), self.resident_bytes(case), measured.peak_bytes)

    def _time(self, step: Callable[[], None]) -> float:
        started = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - started)


def device_for(script: str, *, tiny: bool) -> Device | None:
    """The GPU, or the CPU if the script is only tried; none where there is no GPU, and that is said."""
    if tiny:
        return Cpu()
    if torch.cuda.is_available():
        return Gpu()
    print(f"{script}: there is no CUDA device here; --tiny tries the script on the CPU", file=sys.stderr)
    return None


# --- showing -------------------------------------------------------------------------------------------------

HEADINGS = "model", "how", "budget MiB", "ms", "peak MiB", "predicted MiB", "error %", "within", "vs best peer"


def finish(rows: Sequence[Row]) -> int:
    """Print everything. Status 1 says that something failed or went over its budget."""
    show([cells(row) for row in rows if row.kind != "fit"])
    print("Budget, peak and predicted: above what is resident. Error: predicted over measured.")
    print("vs best peer: the time of the fastest peer that needs no more than the budget, over ours.\n")
    print("\n".join(summary(rows)), flush=True)
    return int(any(row.error or row.within_budget is False for row in rows))


def cells(row: Row) -> list[str]:
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


def mib(count: int | None) -> float | None:
    return None if count is None else count / MIB


def show(lines: Sequence[Sequence[str]], headings: Sequence[str] = HEADINGS) -> None:
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
    widths = [max(map(len, column)) for column in zip(headings, *lines, strict=True)]
    for line in (headings, *lines):
        names = [text.ljust(width) for text, width in zip(line[:2], widths[:2], strict=True)]
        print(*names, *(text.rjust(width) for text, width in zip(line[2:], widths[2:], strict=True)), sep="  ")


def summary(rows: Sequence[Row]) -> Iterator[str]:
    ours = [row for row in rows if row.kind == "ours" and row.ms is not None]
    over = [row for row in ours if row.within_budget is False]
    yield f"Over budget: {len(over)} of {len(ours)} cells{listed(over, lambda row: f'{row.over_bytes:,} bytes')}"
    predicted = [row for row in ours if row.prediction_error is not None]
    if predicted:
        worst = max(predicted, key=lambda row: abs(row.prediction_error))
        yield f"Worst prediction of the peak: {worst.prediction_error:+.2%} ({worst.model}, {worst.how})"
    compared = [row for row in ours if row.vs_peer is not None and row.within_budget]
    slower = sorted((row for row in compared if row.vs_peer < 1), key=lambda row: row.vs_peer)
    yield (
        f"Slower than the best peer at the same memory: {len(slower)} of {len(compared)} cells"
        + listed(slower, lambda row: f"{row.vs_peer:.3f}{fastest_steps(row, rows)}")
    )
    yield gain_over_chains(rows)
    full = [row for row in ours if row.how == FULL_MEMORY]
    yield "Time over eager's, full memory: " + ", ".join(
        f"{r.model} {1 / r.vs_eager:.3f}" for r in full if r.vs_eager
    )
    eager_bytes = {row.model: row.peak_bytes for row in rows if row.kind == "eager" and row.peak_bytes}
    least = [row for row in ours if row.how == LEAST_MEMORY and row.model in eager_bytes]
    shares = [f"{r.model} {r.peak_bytes / eager_bytes[r.model]:.1%} at {1 / r.vs_eager:.2f}× the time" for r in least]
    yield "Least memory, as a share of eager's: " + ", ".join(shares)
    yield from fit_seconds(rows)
    yield from dict.fromkeys(f"Remark: {row.model}: {row.note}" for row in rows if row.note)
    yield from (f"Failed: {row.model}, {row.how}: {row.error}" for row in rows if row.error)


def fastest_steps(row: Row, rows: Sequence[Row]) -> str:
    """The same comparison between the fastest steps of both."""
    peer = next((each for each in rows if (each.model, each.how) == (row.model, row.best_peer)), None)
    if peer is None or not (peer.fastest_ms and row.fastest_ms):
        return ""
    return f" (fastest steps: {peer.fastest_ms / row.fastest_ms:.3f})"


def listed(rows: Sequence[Row], say: Callable[[Row], str]) -> str:
    return "".join(f"\n  {row.model}, {row.how}: {say(row)}" for row in rows)


def gain_over_chains(rows: Sequence[Row]) -> str:
    """Where memory is short: with room for eager nobody would checkpoint, and the gain would be idle."""
    eager = {row.model: row.peak_bytes for row in rows if row.kind == "eager" and row.peak_bytes}
    within = [row for row in rows if row.vs_chain and row.within_budget]
    short = [row for row in within if row.room_bytes * (1 + TOLERANCE) < eager.get(row.model, NO_LIMIT)]
    start = "Mean throughput gain over the best checkpoint_sequential at the same memory: "
    if not short:
        return start + "nothing to compare"
    models = list(dict.fromkeys(row.model for row in short))
    gains = {name: statistics.mean(row.vs_chain for row in short if row.model == name) - 1 for name in models}
    parts = ", ".join(f"{name} {gain:+.1%}" for name, gain in gains.items())
    return f"{start}{statistics.mean(row.vs_chain for row in short) - 1:+.1%} over {len(short)} cells ({parts})"


def fit_seconds(rows: Sequence[Row]) -> Iterator[str]:
    for first in (row for row in rows if row.kind == "fit" and row.seconds is not None):
        later = [row.seconds for row in rows if row.kind == "ours" and row.model == first.model and row.seconds]
        more = f", then {statistics.mean(later):.1f} a budget (most {max(later):.1f})" if later else ""
        yield f"Seconds in fit: {first.model} {first.seconds:.1f} to capture and measure{more}"


if __name__ == "__main__":
    sys.exit(main())
