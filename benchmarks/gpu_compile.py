"""elbowroom with fused kernels against torch.compile, at equal memory, on a GPU: a table, a summary, JSON, a plot.

    python benchmarks/gpu_compile.py --models gpt2-medium resnet101 [--json FILE] [--plot FILE] [--jobs 8]
    python benchmarks/gpu_compile.py --tiny | --show FILE… [--plot FILE]

The peers are `torch.compile` of model and loss, the same with PyTorch's own `activation_memory_budget`, and the same
with the first blocks under `checkpoint`. elbowroom gets the memory of each of them as its budget, and for some models
less than any of them reaches.

Cells compile side by side and are measured alone; cells.py says what a step and its peak are. With `--alone`,
`torch.compile` and a first fit also run before all others, one after the other, to compare how long they take to
compile. Caches are empty when a run begins; its cells share them, except those that run alone. A run that was cut
short goes on with `--with` and the file of its `--json`.

The kinds of rows: compile, budget and blocks (see `PEERS`), ours, and alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from cases import MODELS, TINY_MODELS, Case
from cells import (
    Bench,
    Cell,
    Floor,
    add_options,
    check_options,
    floor_for,
    measure_alone,
    run_cell,
    run_fitted,
)
from hand_checkpoints import checkpointed
from row_tables import listed, row_cells, show
from rows import MIB, Book, Row, fastest, open_book, rows_of
from torch._functorch import config as functorch_config

RATIOS = (0.5, 0.2, 0.05)  # values of `activation_memory_budget`
CHECKPOINTED = (1 / 3, 2 / 3, 1.0)  # shares of the blocks that are checkpointed, counted from the first
EXTRA_MIB = {"gpt2-medium": (8192, 6500), "resnet101": (1800,)}  # rooms that are lower than any peer reaches
PEERS = {"compile": "torch.compile", "budget": "activation_memory_budget", "blocks": "checkpointed blocks"}
PLAIN, FIRST = PEERS["compile"], "elbowroom, first fit"
ALONE = 0.6  # share of the peak of `torch.compile` that the fit gets whose compilation is timed alone
NOISE = 0.02  # times that differ by less than this share count as equal
PLOTS_WIDE = 3


def main() -> int:
    options = parse()
    if options.cell:
        return run_cell(options, TINY_MODELS if options.tiny else MODELS, run)
    if options.show:
        return finish(rows_of(*options.show), options.plot)
    book = open_book("gpu_compile", options)
    if book is None:
        return 2
    with floor_for(__file__, options) as floor:
        run_models(floor, options, book)
    return finish(book.rows, options.plot)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", metavar="NAME", default=[], help="which; compiling takes minutes each")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="time over memory, peers and ours")
    parser.add_argument("--alone", action="store_true", help="also time compiling, with nothing beside it")
    parser.add_argument("--peers", nargs="*", metavar="KIND", help=f"only these kinds, or none: {', '.join(PEERS)}")
    parser.add_argument("--extra", nargs="*", type=float, metavar="MIB", help="rooms for ours besides the peers'")
    parser.add_argument("--only-peers", action="store_true", help="leave ours for another run on the same machine")
    add_options(parser)
    options = parser.parse_args()
    known = TINY_MODELS if options.tiny else MODELS
    options.models = options.models or (list(known) if options.tiny else [])
    check_options(parser, options, known)
    if unknown := set(options.peers or ()) - set(PEERS):
        parser.error(f"--peers: no kind {min(unknown)!r}; known: {', '.join(PEERS)}")
    if not options.models and not options.show and not options.cell:
        parser.error(f"--models: name some of {', '.join(known)}")
    return options


# --- cells ---------------------------------------------------------------------------------------------------


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
    """Add all rows of one model to the book: each peer, and ours within its memory as soon as that is known."""
    known = {row.how: row for row in options.known if row.model == name and row.ms and row.kind != "alone"}
    peers = [cell for cell in peer_cells(name) if options.peers is None or cell.kind in options.peers]
    if not peers:
        return
    extra = EXTRA_MIB.get(name, ()) if options.extra is None else options.extra
    ours: dict[int, Future[Row]] = {}  # by room, because peers that need the same room share one measurement
    lock = Lock()

    def run_ours(how: str, room: int, held: int) -> None:
        cell = Cell(name, how, "ours", room_bytes=room, held_bytes=held + room)
        with lock:
            if room not in ours or how in known:
                ours[room] = pool.submit(floor.run_or_take, cell, known)
        book.add(replace(ours[room].result(), how=how))

    def run_peer_and_ours(peer: Cell) -> None:
        row = book.add(floor.run_or_take(peer, known))
        if row.ms is None or options.only_peers:
            return
        rooms = [(f"elbowroom as {row.how}", row.peak_bytes)]
        if peer is peers[0]:
            rooms += [(f"elbowroom, {size:,g} MiB", int(size * MIB)) for size in sorted(extra, reverse=True)]
        for future in [pool.submit(run_ours, how, room, row.resident_bytes) for how, room in rooms]:
            future.result()

    with ThreadPoolExecutor(3 * len(peers) + 2 * len(extra)) as pool:
        for future in [pool.submit(run_peer_and_ours, peer) for peer in peers]:
            future.result()


def peer_cells(name: str) -> Iterator[Cell]:
    yield Cell(name, PLAIN, "compile")
    for ratio in RATIOS:
        yield Cell(name, f"activation_memory_budget {ratio}", "budget", ratio)
    for share in CHECKPOINTED:
        yield Cell(name, f"first {share:.0%} of its blocks checkpointed", "blocks", share)


def compared(rows: Sequence[Row]) -> Iterator[Row]:
    """All rows in the order of the table; ours also get the best peer that needs no more memory.

    Model by model, the peers come first, then ours from the largest room to the smallest.
    """
    peers = [row for row in rows if row.kind not in ("ours", "alone") and row.ms]
    models = list(dict.fromkeys(row.model for row in rows))
    for row in sorted(rows, key=lambda row: (models.index(row.model), row.kind == "ours", -(row.room_bytes or 0))):
        best = fastest([peer for peer in peers if peer.model == row.model], row.room_bytes or 0)
        if row.kind == "ours" and best and row.ms:
            yield replace(row, best_peer=best.how, vs_peer=best.ms / row.ms)
        else:
            yield row


def run(bench: Bench, cell: Cell) -> Row:
    """Measure one cell, in its own process."""
    if cell.kind != "ours" and cell.how != FIRST:
        return run_peer(bench, cell)
    measure_alone(bench.gate)
    return run_fitted(bench, cell)[0]


def run_peer(bench: Bench, cell: Cell) -> Row:
    case = bench.case
    with peer_setting(case, cell):
        call = torch.compile(lambda *args: case.loss(case.model(*args[:-1]), args[-1]), dynamic=False)
        seconds = bench.first(call)
        cost = bench.measure(call)
    return Row(cell.model, cell.how, cell.kind, **cost, seconds=seconds)


def peer_setting(case: Case, cell: Cell) -> AbstractContextManager[Any]:
    """What to enter around a peer's steps, so that it saves memory in its way."""
    if cell.kind == "budget":
        return functorch_config.patch(activation_memory_budget=cell.setting)
    if cell.kind == "blocks":
        blocks = next(iter(case.blocks.values()))
        return checkpointed(blocks[: round(cell.setting * len(blocks))])
    return nullcontext()


# --- showing -------------------------------------------------------------------------------------------------


def finish(rows: Sequence[Row], plot: Path | None) -> int:
    """Print everything. The exit status is 1 if something failed or went over its budget."""
    rows = list(compared(rows))
    show([row_cells(row) for row in rows if row.kind != "alone"])
    print("Budget, peak and predicted: above parameters, gradients and batch. vs best peer: its time over ours.\n")
    print("\n".join(summary(rows)), flush=True)
    if plot is not None:
        save_plot(rows, plot)
    return int(any(row.error or row.within_budget is False for row in rows))


def summary(rows: Sequence[Row]) -> Iterator[str]:
    ours = [row for row in rows if row.kind == "ours" and row.ms is not None]
    over = [row for row in ours if row.within_budget is False]
    yield f"Over budget: {len(over)} of {len(ours)} cells{listed(over, lambda row: f'{row.over_bytes:,} B')}"
    slower = [row for row in ours if row.vs_peer is not None and row.vs_peer < 1]
    yield f"Slower than the best peer within the budget: {len(slower)} cells" + listed(
        slower, lambda row: f"{row.vs_peer:.3f} of the speed of {row.best_peer}"
    )
    for kind, name in PEERS.items():
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
    """For each peer of a kind, its time divided by ours within its memory."""
    for peer in rows:
        for row in rows:
            if peer.kind == kind and row.model == peer.model and row.how == f"elbowroom as {peer.how}" and row.ms:
                yield peer.ms / row.ms


def rising(ours: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """All pairs of rows of the same model whose second has more room than the first."""
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
    columns = min(PLOTS_WIDE, len(models))
    lines = -(-len(models) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(4 * columns, 3 * lines), squeeze=False)
    for axis in axes.flat[len(models) :]:
        axis.axis("off")
    for axis, model in zip(axes.flat, models, strict=False):
        draw(axis, model, [row for row in rows if row.model == model and row.ms])
    axes[0, 0].legend(loc="lower left", fontsize=8)
    figure.supxlabel("peak above the resident state (GiB)", fontsize=10)
    figure.supylabel("ms a step", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def draw(axis: Any, model: str, rows: Sequence[Row]) -> None:
    for kind, label in {**PEERS, "ours": "elbowroom"}.items():
        points = sorted((row.peak_bytes / 2**30, row.ms) for row in rows if row.kind == kind)
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", linestyle="-" if kind == "ours" else "", label=label)
    axis.set(title=model, xlim=(0, None), ylim=(0, 1.08 * max(row.ms for row in rows)))


if __name__ == "__main__":
    sys.exit(main())
