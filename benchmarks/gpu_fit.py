"""elbowroom against checkpoints placed by hand, at equal memory, on a GPU: a table, a summary, JSON for machines.

    python benchmarks/gpu_fit.py [--models resnet50 gpt2-medium …] [--json FILE] [--reps 20]
    python benchmarks/gpu_fit.py --list | --tiny | --show FILE…

Everything runs in this process, one model after the other. First come the peers: the model in eager mode,
`checkpoint` on its blocks, `checkpoint_sequential` over its chain of modules. A peer is worth matching if no other
beats it in both time and memory; elbowroom then gets the memory of each of those as its budget.

A step is forward, loss and backward under bf16 autocast; it adds to gradients that are there already. Its peak is the
most allocated at once, above what was allocated before the step. What fails becomes a row that says so, and the run
goes on. `--tiny` tries all of this on the CPU with small models. `--show` prints the table of earlier runs again,
several files as one.

The kinds of rows: eager, blocks (checkpointed blocks), chain (`checkpoint_sequential`), ours, and fit (the first fit,
which captures the model and measures its operators).
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from cases import MODELS, TINY_MODELS, Case
from gpu_fit_summary import FULL_MEMORY, LEAST_MEMORY, finish
from hand_checkpoints import Peer, peers_of
from rows import MIB, NO_LIMIT, Book, Row, check_models, fastest, mib, open_book, rows_of, said
from step_costs import Cost, Cpu, Device, Gpu

MOST_BUDGETS = 6  # for each model, as many peers are matched at most
SAME_MEMORY = 0.03  # peers whose peaks differ by less than this share count as one budget
FULL = 1.02  # of eager's peak: the budget in which elbowroom need not recompute anything
TOO_SMALL = 2**10  # bytes: a budget that nothing fits into, so that elbowroom tells the least that has a plan
FIRST_FIT = "elbowroom, first fit"
COMPILED_ONLY = ("llama-1b", "bert-large")  # these are for gpu_compile.py
EXTRA_MIB = {"resnet101": (3080, 2048), "gpt2-medium": (11144,)}  # rooms that earlier records have figures for


def main() -> int:
    options = parse()
    makers = TINY_MODELS if options.tiny else MODELS
    if options.list:
        print(*makers, sep="\n")
        return 0
    if options.show:
        return finish(rows_of(*options.show))
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
    parser.add_argument("--reps", type=int, help="timed steps of each row (default: 20; with --tiny 2)")
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


def run_model(name: str, make: Callable[[], Case], device: Device, reps: int, book: Book) -> None:
    """Add all rows of one model to the book. Nothing of the model is left on the device afterwards."""
    torch.manual_seed(0)
    try:
        with torch.device(device.kind):
            case = make()
        case.model.train()
        for parameter in case.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        bench = Bench(name, case, device, reps, book)
        for peer in peers_of(case):
            bench.add_peer(peer)
        measure_ours(bench)
    except Exception as failure:
        book.add(Row(name, "set-up", "fit", error=said(failure)))
    case = bench = parameter = peer = None  # the last references to the model
    torch._dynamo.reset()
    device.clean()


@dataclass
class Bench:
    """One model on one device: measures ways to take a step of it."""

    name: str
    case: Case
    device: Device
    reps: int
    book: Book

    def add_peer(self, peer: Peer) -> None:
        case = self.case
        try:
            with peer.placed:
                cost = self.measure(lambda: case.loss(peer.call(*case.inputs), case.target))
            row = Row(self.name, peer.how, peer.kind, **asdict(cost))
        except Exception as failure:
            row = Row(self.name, peer.how, peer.kind, error=said(failure))
        self.book.add(row)
        self.device.clean()

    def measure(self, loss: Callable[[], torch.Tensor]) -> Cost:
        """What a step costs whose forward and loss are `loss`."""

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


# --- ours ----------------------------------------------------------------------------------------------------


def measure_ours(bench: Bench) -> None:
    """The model is captured once, without a limit, and then planned and measured within one budget after another."""
    fitted = fit_without_limit(bench)
    if fitted is None:
        return
    for how, room in rooms(bench):
        measure_budget(bench, fitted, how, room)
    measure_least(bench, fitted)


@dataclass
class Ours:
    """The fitted model, what was resident before it was fitted, and the warnings that elbowroom gave about it."""

    model: Any
    resident_bytes: int
    remarks: list[str]

    @property
    def session(self) -> Any:
        return self.model.elbowroom

    @property
    def plan(self) -> Any:
        """The latest plan; None if the model runs unplanned."""
        return [entry.plan for entry in self.session.entries.values()][-1]

    @property
    def note(self) -> str:
        """What a reader of the row should know: why the model runs unplanned, or else the warnings."""
        again = ["captured again"] if len(self.session.entries) > 1 else []
        unplanned = [entry.unplanned for entry in self.session.entries.values() if entry.unplanned]
        return "; ".join(dict.fromkeys(unplanned or self.remarks + again))


def fit_without_limit(bench: Bench) -> Ours | None:
    """The fitted model, whose row says how long that took and what it left on the device; None if it failed."""
    from elbowroom.api import fit

    case, device, remarks = bench.case, bench.device, []
    try:
        device.clean()
        resident = device.resident_bytes(case)
        started = time.perf_counter()
        with device.autocast(), remarks_in(remarks):
            model = fit(case.model, *case.inputs, case.target, budget=NO_LIMIT, loss=case.loss, kernels="torch")
        seconds = time.perf_counter() - started
        fitted = Ours(model, resident, remarks)
        grown = device.resident_bytes(case) - resident
        left = f"left {mib(grown):,.1f} MiB on the device" if grown > MIB else ""
        row = Row(bench.name, FIRST_FIT, "fit", seconds=seconds, note=fitted.note or left)
    except Exception as failure:
        fitted, row = None, Row(bench.name, FIRST_FIT, "fit", error=said(failure))
    bench.book.add(row)
    device.clean()
    return fitted


def rooms(bench: Bench) -> Iterator[tuple[str, int]]:
    """The budgets to plan within: what each stands for, and its bytes above what is resident."""
    if bench.eager is not None:
        yield FULL_MEMORY, int(bench.eager.peak_bytes * FULL)
    for peer in worth_matching(bench.peers):
        yield f"elbowroom as {peer.how}", peer.peak_bytes
    for extra_mib in EXTRA_MIB.get(bench.name, ()):
        yield f"elbowroom, {extra_mib:,} MiB", extra_mib * MIB


def worth_matching(peers: Sequence[Row]) -> list[Row]:
    """The peers that no other beats in both time and memory, the largest first.

    Where they are many, some are left out so that the rest are spread evenly.
    """
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
    """Add the row of one budget to the book, or that it failed."""
    try:
        row = within(bench, fitted, how, room)
    except Exception as failure:
        row = Row(bench.name, how, "ours", room, error=said(failure))
    bench.book.add(row)
    bench.device.clean()


def within(bench: Bench, fitted: Ours, how: str, room: int) -> Row:
    """Plan within `room` bytes above what is resident, and measure a step of that plan."""
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
    """Plan again within another budget; returns how long that took."""
    started = time.perf_counter()
    session.set_budget(budget)
    return time.perf_counter() - started


def measure_least(bench: Bench, fitted: Ours) -> None:
    """Add the row of the smallest budget that has a plan to the book."""
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
    """Add elbowroom's warnings, each of which it gives once, to `remarks`, and print no warning at all."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    remarks += [str(each.message) for each in caught if str(each.message).startswith("elbowroom")]


if __name__ == "__main__":
    sys.exit(main())
