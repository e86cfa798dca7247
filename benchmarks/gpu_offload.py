"""Values that move to the host, on a GPU: ours with and without it, and other tools that move, at their own peaks.

    python benchmarks/gpu_offload.py --models gpt2-medium llama-32k [--kernels torch] [--json FILE] [--jobs 4]
    python benchmarks/gpu_offload.py --tiny | --show FILE…

For each model, plain execution is measured first: as it is with PyTorch's kernels, under `torch.compile` with fused
ones. Shares of its memory are then the rooms of ours, twice each: recomputing alone (kind "still") and with values
that move as well (kind "moving"). Peers move all that is saved, one way or another; ours gets the room of each.

Cells compile side by side and are measured alone; cells.py says what a step and its peak are. A row of ours that
moves tells what it holds on the host in its note, and whether that is what was planned, after all its steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from cases import TINY_MODELS, Case, densenet, gpt2, in_float32, llama, resnet, unet
from cells import Bench, Cell, Floor, add_options, check_options, floor_for, measure_alone, run_cell, run_fitted
from hand_checkpoints import checkpointed
from row_tables import listed, row_cells, show
from rows import Book, Row, fastest, open_book, rows_of
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from elbowroom.errors import BudgetTooSmall

MODELS = {
    "gpt2-medium": partial(gpt2, 24, 1024, 16, 16, 1024),
    "llama-1b": partial(llama, 22, 2048, 32, 4, 5632, 4, 1024),
    "llama-32k": partial(llama, 22, 2048, 32, 4, 5632, 1, 32_768),
    "llama-128k": partial(llama, 22, 2048, 32, 4, 5632, 1, 131_072),
    "resnet101-500": partial(resnet, "resnet101", 32, 500),
    "densenet161": partial(densenet, "densenet161", 64),
    "densenet169": partial(densenet, "densenet169", 64),
    "unet": partial(unet, 16),
    "gpt2-medium-float32": partial(in_float32, gpt2, 24, 1024, 16, 4, 1024),
    "resnet101-float32": partial(in_float32, resnet, "resnet101", 64),
}
SHARES = (0.75, 0.5, 0.35, 0.25, 0.2, 0.125)  # of what plain execution takes above what is resident
PEERS = {
    "save_on_cpu": "all that is saved, by torch.autograd.graph.save_on_cpu",
    "checkpoint_on_cpu": "every block checkpointed and its input moved, as transformers does where asked to offload",
    "compiled": "torch.compile with its own offloading of activations",
}
LIKE = 0.01  # ours that moves may be so much slower than ours that does not: two measurements differ by it


def main() -> int:
    options = parse()
    if options.cell:
        return run_cell(options, TINY_MODELS if options.tiny else MODELS, run)
    if options.show:
        return finish(rows_of(*options.show))
    book = open_book("gpu_offload", options)
    if book is None:
        return 2
    with floor_for(__file__, options) as floor, ThreadPoolExecutor(len(options.models)) as pool:
        for done in [pool.submit(run_model, name, floor, options, book) for name in options.models]:
            done.result()
    return finish(book.rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", metavar="NAME", default=[], help="which; all of them take hours")
    parser.add_argument("--kernels", choices=["torch", "inductor"], default="torch", help="of plain and ours")
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES), help="rooms, as shares of plain")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS), help="only these")
    add_options(parser)
    options = parser.parse_args()
    known = TINY_MODELS if options.tiny else MODELS
    options.models = options.models or (list(known) if options.tiny else [])
    check_options(parser, options, known)
    if not options.models and not options.show and not options.cell:
        parser.error(f"--models: name some of {', '.join(known)}")
    return options


# --- cells ---------------------------------------------------------------------------------------------------


def run_model(name: str, floor: Floor, options: argparse.Namespace, book: Book) -> None:
    known = {row.how: row for row in options.known if row.model == name and row.ms}
    plain = book.add(floor.run_or_take(Cell(name, "plain", "plain", kernels=options.kernels), known))
    if plain.peak_bytes is None:
        return
    peers = [Cell(name, kind, kind, kernels=options.kernels) for kind in options.peers]
    with ThreadPoolExecutor(max(1, len(peers))) as pool:
        rows = [book.add(row) for row in pool.map(lambda cell: floor.run_or_take(cell, known), peers)]
    rooms = {f"{share:.0%} of plain": int(share * plain.peak_bytes) for share in options.shares}
    rooms |= {f"as {row.how}": row.peak_bytes for row in rows if row.peak_bytes is not None}
    cells = [
        Cell(name, f"{how}, {kind}", kind, None, room, plain.resident_bytes + room, options.kernels, MOVES[kind])
        for how, room in rooms.items()
        for kind in MOVES
    ]
    with ThreadPoolExecutor(len(cells)) as pool:
        for done in [pool.submit(floor.run_or_take, cell, known) for cell in cells]:
            book.add(done.result())


MOVES = {"still": "never", "moving": "always" if not torch.cuda.is_available() else "auto"}


def run(bench: Bench, cell: Cell) -> Row:
    """Measure one cell, in its own process."""
    if cell.kind in MOVES:
        measure_alone(bench.gate)
        try:
            row, plan = run_fitted(bench, cell)
        except BudgetTooSmall as refusal:
            least = refusal.least_budget - bench.resident_bytes
            return Row(cell.model, cell.how, cell.kind, cell.room_bytes, least_bytes=least, note="does not fit")
        return replace(row, note=f"{row.note}; {on_the_host(plan)}")
    case = bench.case
    with peer_setting(case, cell):
        call: Any = partial(step, case)
        if cell.kind == "compiled" or (cell.kind == "plain" and cell.kernels == "inductor"):
            call = torch.compile(call, dynamic=False)
        seconds = bench.first(call)
        cost = bench.measure(call)
    return Row(cell.model, cell.how, cell.kind, **cost, seconds=seconds)


def step(case: Case, *arguments: Any) -> torch.Tensor:
    return case.loss(case.model(*arguments[:-1]), arguments[-1])


@contextmanager
def peer_setting(case: Case, cell: Cell) -> Iterator[None]:
    """What is in force around a peer's steps, so that it moves values in its way."""
    with ExitStack() as settings:
        if cell.kind in ("save_on_cpu", "checkpoint_on_cpu"):
            pins = torch.cuda.is_available()
            settings.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=pins))
        if cell.kind == "checkpoint_on_cpu":
            settings.enter_context(checkpointed(next(iter(case.blocks.values())), reentrant=True))
        if cell.kind == "compiled":
            streams = "activation_offload_separate_stream", "activation_reload_prefetch"
            wishes = ["enable_activation_offloading", *(streams if torch.cuda.is_available() else ())]
            settings.enter_context(functorch_config.patch(dict.fromkeys(wishes, True)))
            settings.enter_context(inductor_config.patch(joint_custom_post_pass=WishesAll()))
        yield


class WishesAll(CustomGraphPass):
    """torch.compile moves what is marked and may move; nobody marks anything unless he is asked."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            node.meta["should_offload"] = node.op == "call_function"

    def uuid(self) -> str:
        return "all that may move"


def on_the_host(plan: Any) -> str:
    from elbowroom.measure.host_memory import held_bytes

    held, planned = held_bytes(), plan.host_bytes
    return f"{held / 2**20:,.0f} MiB on the host, {'as planned' if held == planned else f'PLANNED {planned:,} B'}"


# --- showing -------------------------------------------------------------------------------------------------


def finish(rows: Sequence[Row]) -> int:
    """Print everything. The exit status is 1 if something failed or went over its budget."""
    rows = list(compared(rows))
    show([row_cells(row) for row in rows])
    print("Budget, peak and predicted: above parameters, gradients and batch. vs best peer: its time over ours.\n")
    print("\n".join(summary(rows)), flush=True)
    return int(any(row.error or row.within_budget is False for row in rows))


def compared(rows: Sequence[Row]) -> Iterator[Row]:
    """Model by model: plain and peers, then ours from the largest room to the smallest, beside the best peer."""
    models = list(dict.fromkeys(row.model for row in rows))
    peers = [row for row in rows if row.kind in PEERS and row.ms]
    for row in sorted(rows, key=lambda row: (models.index(row.model), row.kind in MOVES, -(row.room_bytes or 0))):
        best = fastest([peer for peer in peers if peer.model == row.model], row.room_bytes or 0)
        ours = row.kind in MOVES and row.ms is not None and best is not None
        yield replace(row, best_peer=best.how, vs_peer=best.ms / row.ms) if ours else row


def summary(rows: Sequence[Row]) -> Iterator[str]:
    ours = [row for row in rows if row.kind in MOVES and row.ms is not None]
    over = [row for row in ours if row.within_budget is False]
    yield f"Over budget: {len(over)} of {len(ours)} cells{listed(over, lambda row: f'{row.over_bytes:,} B')}"
    pairs = list(pairs_of(ours))
    slower = [moving for still, moving in pairs if moving.ms > (1 + LIKE) * still.ms]
    yield f"Slower than recomputing alone by more than {LIKE:.0%}: {len(slower)} of {len(pairs)} cells" + listed(
        slower, lambda row: f"{row.ms:.1f} ms"
    )
    for model in dict.fromkeys(row.model for row in rows):
        plain = next((row.ms for row in rows if row.model == model and row.kind == "plain" and row.ms), None)
        gone = [1 - (m.ms - plain) / (s.ms - plain) for s, m in pairs if plain and s.model == model and s.ms > plain]
        if gone:
            yield f"Of recomputation's extra time, gone in {model}: {statistics.mean(gone):.0%} on average"
    small = [row for row in rows if row.least_bytes is not None]
    if small:
        yield "Does not fit:" + listed(small, lambda row: f"{row.least_bytes / 2**20:,.1f} MiB would do")
    yield from (f"Failed: {row.model}, {row.how}: {row.error}" for row in rows if row.error)


def pairs_of(ours: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Ours within the same room, without moves and with them."""
    for still in ours:
        for moving in ours:
            same = (still.model, still.room_bytes) == (moving.model, moving.room_bytes)
            if same and (still.kind, moving.kind) == ("still", "moving"):
                yield still, moving


if __name__ == "__main__":
    sys.exit(main())
