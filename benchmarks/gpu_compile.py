"""elbowroom with fused kernels against torch.compile, at equal memory, on a GPU: a table, a summary, JSON, a plot.

    python benchmarks/gpu_compile.py --models gpt2-medium resnet101 [--json FILE] [--plot FILE] [--reps 8]
    python benchmarks/gpu_compile.py --tiny | --show FILE… [--plot FILE]

For each model, in this process: first the peers (`torch.compile` of model and loss; the same with PyTorch's own
`activation_memory_budget`; the same with the first blocks under `checkpoint`), then elbowroom within the memory of
each of them, and within less than any reaches. A step is forward, loss and backward under bf16 autocast, gradients
set to None before. Its peak is the most allocated at once above parameters, their gradients and the batch. Seconds
are those of the first step for peers, and of `fit` or `set_budget` for ours, both starting with empty caches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import gpu_fit
import torch
from cases import MODELS, TINY_MODELS, Case
from gpu_fit import MIB, NO_LIMIT, Bench, Book, Cpu, Gpu, Row, checkpointed, fastest, mib, planning_seconds, said
from torch._functorch import config as functorch_config

RATIOS = (0.5, 0.2, 0.05)
CHECKPOINTED = (1 / 3, 2 / 3, 1.0)  # of the blocks, the first ones
EXTRA_MIB = {"gpt2-medium": (8192, 6500), "resnet101": (1800,)}  # lower than any peer reaches
PLAIN, FIRST = "torch.compile", "elbowroom, first fit"
NOISE = 0.02


def main() -> int:
    options = parse()
    if options.show:
        rows = [Row(**row) for path in options.show for row in json.loads(path.read_text())["rows"]]
        return finish(rows, options.plot)
    if not options.tiny and not torch.cuda.is_available():
        print("gpu_compile: there is no CUDA device here; --tiny tries the script on the CPU", file=sys.stderr)
        return 2
    device = Cpu() if options.tiny else Gpu()
    book = Book(gpu_fit.facts(device), options.json)
    print(", ".join(f"{name} {value}" for name, value in book.facts.items()), flush=True)
    for name in options.models:
        run_model(name, (TINY_MODELS if options.tiny else MODELS)[name], device, options, book)
    return finish(book.rows, options.plot)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", metavar="NAME", default=[], help="which; compiling takes minutes each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all rows here, as they come")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="time over memory, peers and ours")
    parser.add_argument("--reps", type=int, default=8, help="timed steps of each cell")
    parser.add_argument("--peers", nargs="*", choices=("compile", "budget", "blocks"), help="only these kinds")
    parser.add_argument("--extra", nargs="*", type=float, metavar="MIB", help="rooms for ours besides the peers'")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU, to try the script")
    parser.add_argument("--show", nargs="+", type=Path, metavar="FILE", help="the table of earlier --json files")
    options = parser.parse_args()
    known = TINY_MODELS if options.tiny else MODELS
    options.models = options.models or (list(known) if options.tiny else [])
    if unknown := set(options.models) - set(known):
        parser.error(f"--models: no model {min(unknown)!r}; known: {', '.join(known)}")
    if not options.models and not options.show:
        parser.error(f"--models: name some of {', '.join(known)}")
    return options


def run_model(name: str, make: Callable[[], Case], device: Any, options: argparse.Namespace, book: Book) -> None:
    """All rows of one model. Nothing of it is left on the device afterwards."""
    torch.manual_seed(0)
    try:
        with torch.device(device.kind):
            case = make()
        case.model.train()
        bench = Bench(name, case, device, options.reps, book)
        with fresh_caches():
            measure_peers(bench, options.peers)
        with fresh_caches():
            measure_ours(bench, EXTRA_MIB.get(name, ()) if options.extra is None else options.extra)
    except Exception as failure:
        book.add(Row(name, "set-up", "fit", error=said(failure)))
    case = bench = None  # the last references
    torch._dynamo.reset()
    device.clean()


@contextmanager
def fresh_caches() -> Iterator[None]:
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield


def measure(bench: Bench, call: Callable[..., torch.Tensor]) -> tuple[Any, float]:
    """What a step costs, and the seconds that the first one took."""
    case, device = bench.case, bench.device

    def step() -> None:
        for parameter in case.model.parameters():
            parameter.grad = None
        with device.autocast():
            loss = call(*case.inputs, case.target)
        loss.backward()

    started = time.perf_counter()
    step()
    if device.kind == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return device.measure(step, case, bench.reps), seconds


# --- peers ---------------------------------------------------------------------------------------------------


def measure_peers(bench: Bench, kinds: Sequence[str] | None) -> None:
    for how, kind, setting in peers(bench.case):
        if kinds is not None and kind not in kinds:
            continue
        try:
            with setting:
                cost, seconds = measure(bench, torch.compile(whole_step(bench.case), dynamic=False))
            row = Row(bench.name, how, kind, **vars(cost), seconds=seconds)
        except Exception as failure:
            row = Row(bench.name, how, kind, error=said(failure))
        bench.book.add(row)
        torch._dynamo.reset()
        bench.device.clean()


def peers(case: Case) -> Iterator[tuple[str, str, Any]]:
    yield PLAIN, "compile", nullcontext()
    for ratio in RATIOS:
        yield f"activation_memory_budget {ratio}", "budget", functorch_config.patch(activation_memory_budget=ratio)
    name, blocks = next(iter(case.blocks.items()))
    for share in CHECKPOINTED:
        count = round(share * len(blocks))
        yield f"first {count} of {len(blocks)} {name}s checkpointed", "blocks", checkpointed(blocks[:count])


def whole_step(case: Case) -> Callable[..., torch.Tensor]:
    def step(*arguments: torch.Tensor) -> torch.Tensor:
        return case.loss(case.model(*arguments[:-1]), arguments[-1])

    return step


# --- ours ----------------------------------------------------------------------------------------------------


def measure_ours(bench: Bench, extra: Sequence[float]) -> None:
    """Captured once; then planned, compiled and measured within one budget after another, largest first."""
    from elbowroom.api import fit

    case, book = bench.case, bench.book
    found = sorted(bench.peers, key=lambda peer: -peer.peak_bytes)
    rooms = [(f"elbowroom as {peer.how}", peer.peak_bytes) for peer in found]
    rooms += [(f"elbowroom, {size:,g} MiB", int(size * MIB)) for size in sorted(extra, reverse=True)]
    try:
        bench.device.clean()
        resident = resident_bytes(bench)
        started = time.perf_counter()
        with bench.device.autocast():
            budget = resident + rooms[0][1] if rooms else NO_LIMIT
            model = fit(case.model, *case.inputs, case.target, budget=budget, loss=case.loss, kernels="inductor")
        book.add(Row(bench.name, FIRST, "fit", seconds=time.perf_counter() - started))
    except Exception as failure:
        book.add(Row(bench.name, FIRST, "fit", error=said(failure)))
        return
    for how, room in rooms:
        try:
            book.add(within(bench, model, how, room, resident))
        except Exception as failure:
            book.add(Row(bench.name, how, "ours", room, error=said(failure)))
        bench.device.clean()


def within(bench: Bench, model: Any, how: str, room: int, resident: int) -> Row:
    budget = resident + room
    seconds = planning_seconds(model.elbowroom, budget)
    cost, _ = measure(bench, model)
    (entry,) = model.elbowroom.entries.values()
    best = fastest(bench.peers, room)
    tried = "" if entry.trials is None else f"{len(entry.trials.known)} programs compiled so far"
    return Row(
        bench.name,
        how,
        "ours",
        room,
        budget,
        **vars(cost),
        predicted_bytes=entry.plan.peak_bytes - entry.plan.resident_bytes,
        within_budget=cost.resident_bytes + cost.peak_bytes <= budget,
        best_peer=best and best.how,
        vs_peer=best and best.ms / cost.ms,
        seconds=seconds,
        note="PyTorch's kernels" if entry.instead is not None else tried,
    )


def resident_bytes(bench: Bench) -> int:
    """Parameters, buffers, batch as they are, and gradients to come."""
    for parameter in bench.case.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    resident = bench.device.resident_bytes(bench.case)
    for parameter in bench.case.model.parameters():
        parameter.grad = None
    return resident


# --- showing -------------------------------------------------------------------------------------------------


def finish(rows: Sequence[Row], plot: Path | None) -> int:
    gpu_fit.show([gpu_fit.cells(row) for row in rows if row.kind != "fit"])
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
    for first in (row for row in rows if row.how == FIRST and row.seconds):
        plain = next((row for row in rows if row.model == first.model and row.how == PLAIN and row.seconds), None)
        later = [row.seconds for row in rows if row.kind == "ours" and row.model == first.model and row.seconds]
        if plain is None or not later:
            continue
        yield (
            f"Seconds to compile {first.model}: torch.compile {plain.seconds:.0f}; fit {first.seconds:.0f} "
            f"({first.seconds / plain.seconds:.2f}×), then {statistics.mean(later):.0f} a budget, at most "
            f"{max(later):.0f} ({max(later) / plain.seconds:.2f}×)"
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
