"""Plans that see a graph against plans that see a chain, at equal memory, on a GPU: tables, a summary, JSON.

    python benchmarks/gpu_graphs.py --whole --json FILE [--models unet clip_b16 …] [--kernels torch] [--jobs 8]
    python benchmarks/gpu_graphs.py --tiny | --show FILE…

For each model, for PyTorch's kernels and for fused ones: first everything saved, then a plan within a half and within
35 % of that peak, as `fit` makes it and as a tool for chains would: cut only where one value crosses. With `--whole`
also one whose stages are moreover saved whole or not at all, as `checkpoint_sequential` and rotor do. Where nothing
of a chain's fits, its time within the least that it needs is taken, and said so. Cells compile side by side and are
measured alone (cells.py, where it says what a step and its peak are). A run that was cut short goes on with `--with`
and its `--json`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

import gpu_fit
from cases import GRAPH_MODELS, TINY_GRAPH_MODELS
from cells import (
    Bench,
    Cell,
    Floor,
    add_options,
    check_options,
    floor_for,
    measure_alone,
    rows_of,
    run_cell,
    run_fitted,
)
from gpu_fit import Book, Row, mib, number, open_book

KERNELS = "torch", "inductor"
SHARES = 0.5, 0.35  # of the peak with everything saved
PLANS = {"graph": "as fit plans", "chain": "as a chain", "whole": "as a chain, stages whole"}
EVERYTHING = "everything saved"
EVERYTHING_BYTES = 24 << 30  # a guess, not known before it ran
FASTER = 1.05
NOISE = 0.01
TRIES = 3  # at a chain's least budget: a compiled program may take more than predicted


def main() -> int:
    options = parse()
    if options.cell:
        return run_cell(options, TINY_GRAPH_MODELS if options.tiny else GRAPH_MODELS, run)
    if options.show:
        return finish(rows_of(*options.show))
    book = open_book("gpu_graphs", options)
    if book is None:
        return 2
    with floor_for(__file__, options) as floor:
        series = [(name, kernels) for name in options.models for kernels in options.kernels]
        with ThreadPoolExecutor(len(series)) as pool:
            for future in [pool.submit(run_series, *each, floor, options, book) for each in series]:
                future.result()
    return finish(book.rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS, help="only these")
    parser.add_argument("--whole", action="store_true", help="also chains whose stages are saved whole or not at all")
    add_options(parser)
    options = parser.parse_args()
    known = TINY_GRAPH_MODELS if options.tiny else GRAPH_MODELS
    options.models = options.models or list(known)
    check_options(parser, options, known)
    return options


# --- cells ---------------------------------------------------------------------------------------------------


def run_series(name: str, kernels: str, floor: Floor, options: argparse.Namespace, book: Book) -> None:
    """All rows of one model with one kind of kernels."""
    known = {row.how: row for row in options.known if row.model == name and row.ms}
    plain_cell = Cell(name, f"{kernels}: {EVERYTHING}", "plain", held_bytes=EVERYTHING_BYTES, kernels=kernels)
    (plain,) = (book.add(row) for row in floor.run_all([plain_cell], known))
    if plain.ms:
        plans = [plan for plan in PLANS if plan != "whole" or options.whole]
        for row in floor.run_all(list(cells_within(plain, kernels, plans)), known):
            book.add(row)


def cells_within(plain: Row, kernels: str, plans: Sequence[str]) -> Iterator[Cell]:
    """Every cell may come to need as much as plain execution does: a chain's, where nothing of it fits."""
    held = plain.resident_bytes + plain.peak_bytes
    for share in SHARES:
        room = int(share * plain.peak_bytes)
        for plan in plans:
            how = f"{kernels} {share:.0%}: {PLANS[plan]}"
            yield Cell(plain.model, how, plan, share, room, held, kernels)


def run(bench: Bench, cell: Cell) -> Row:
    measure_alone(bench.gate)
    with planned_as(cell.kind), no_other_kernels():
        return run_or_least(bench, cell)


def run_or_least(bench: Bench, cell: Cell) -> Row:
    """Within the cell's room; if nothing fits, within the least that does, which the row then has."""
    from elbowroom.errors import BudgetTooSmall

    room, least = cell.room_bytes, None
    for _ in range(1 + TRIES):
        try:
            row, plan = run_fitted(bench, replace(cell, room_bytes=room))
        except BudgetTooSmall as refusal:
            room = least = refusal.least_budget - bench.resident_bytes
        else:
            said = [f"{region.structure.kind}; {region.method}; {region.why}" for region in plan.regions]
            return replace(row, room_bytes=cell.room_bytes, least_bytes=least, note="; ".join([row.note, *said]))
    return Row(cell.model, cell.how, cell.kind, cell.room_bytes, least_bytes=least, error="no room was enough")


@contextmanager
def planned_as(kind: str) -> Iterator[None]:
    """Have `fit` plan as a tool for chains would, if the kind of plan is one of theirs."""
    from elbowroom.execute import session

    own = session.Planner
    if kind in ("chain", "whole"):
        session.Planner = partial(own, as_chain=True, whole_stages=kind == "whole")
    try:
        yield
    finally:
        session.Planner = own


@contextmanager
def no_other_kernels() -> Iterator[None]:
    """Where compiled programs do not fit, `fit` would take PyTorch's kernels; here it says what would be enough."""
    from elbowroom.session.session import Session

    own = Session._plan_fused
    Session._plan_fused = lambda self, args, kwargs: self._plan(self._record(args, kwargs), args, kwargs)
    try:
        yield
    finally:
        Session._plan_fused = own


# --- showing -------------------------------------------------------------------------------------------------

HEADINGS = "model", "kernels, share", "room MiB", "everything ms", "fit ms", "chain ms", "ratio", "whole ms", "ratio"


@dataclass(frozen=True)
class Pair:
    """A plan as `fit` makes it, and a chain's for the same model, kernels and share."""

    graph: Row
    chain: Row

    @property
    def kernels(self) -> str:
        return point(self.graph).split()[0]

    @property
    def ratio(self) -> float:
        """Above 1, `fit`'s is faster."""
        return self.chain.ms / self.graph.ms

    @property
    def fastest_ratio(self) -> float:
        """The same of the fastest steps, in which no host was disturbed."""
        return self.chain.fastest_ms / self.graph.fastest_ms


def point(row: Row) -> str:
    """Kernels and share: what a graph's and a chain's rows have in common."""
    return row.how.partition(":")[0]


def pairs(rows: Sequence[Row], kind: str) -> list[Pair]:
    """Both measured, and `fit`'s within the room that was asked for."""
    chains = {(row.model, point(row)): row for row in rows if row.kind == kind and row.ms}
    graphs = [row for row in rows if row.kind == "graph" and row.ms and row.least_bytes is None]
    return [Pair(row, chains[key]) for row in graphs if (key := (row.model, point(row))) in chains]


def finish(rows: Sequence[Row]) -> int:
    rows = sorted(rows, key=lambda row: (row.model, row.how))
    gpu_fit.show([gpu_fit.cells(row)[:-1] for row in rows], gpu_fit.HEADINGS[:-1])
    gpu_fit.show(list(ratios(rows)), HEADINGS)
    print("Room, peak and predicted: above parameters, gradients and batch. Ratio: a chain's time over fit's.")
    print("(…): it does not fit, and takes that long within as many MiB as it needs at least.\n")
    print("\n".join(summary(rows)), flush=True)
    return int(any(row.error or row.within_budget is False for row in rows))


def ratios(rows: Sequence[Row]) -> Iterator[list[str]]:
    plain = {(row.model, point(row)): row.ms for row in rows if row.kind == "plain"}
    others = {kind: {(pair.graph.model, point(pair.graph)): pair for pair in pairs(rows, kind)} for kind in PLANS}
    for row in rows:
        if row.kind == "graph":
            kernels = point(row).split()[0]
            told = [row.model, point(row), number(mib(row.room_bytes)), number(plain.get((row.model, kernels)))]
            against = [told_pair(others[kind].get((row.model, point(row)))) for kind in ("chain", "whole")]
            yield [*told, told_ms(row), *against[0], *against[1]]


def told_pair(pair: Pair | None) -> tuple[str, str]:
    return ("–", "–") if pair is None else (told_ms(pair.chain), f"{pair.ratio:.3f}")


def told_ms(row: Row) -> str:
    return number(row.ms) if row.least_bytes is None else f"({number(row.ms)} in {number(mib(row.least_bytes))})"


def summary(rows: Sequence[Row]) -> Iterator[str]:
    over = [row for row in rows if row.within_budget is False]
    yield f"Over budget: {len(over)} of {len(rows)} cells{gpu_fit.listed(over, lambda row: f'{row.over_bytes:,} B')}"
    for kernels in KERNELS:
        for kind in ("chain", "whole"):
            found = [pair for pair in pairs(rows, kind) if pair.kernels == kernels]
            if found:
                yield compared(kernels, kind, found)
    yield from (f"Failed: {row.model}, {row.how}: {row.error}" for row in rows if row.error)


def compared(kernels: str, kind: str, found: Sequence[Pair]) -> str:
    """A chain that needs more memory than there is and takes longer all the same is slower; else it is left out."""
    fitting = [pair for pair in found if pair.chain.least_bytes is None]
    unfit = models_of([pair for pair in found if pair.chain.least_bytes is not None])
    told = []
    for ratio in (attrgetter("ratio"), attrgetter("fastest_ratio")):
        as_fast = sum(ratio(pair) >= 1 - NOISE for pair in fitting)
        faster = models_of([pair for pair in found if ratio(pair) >= FASTER])
        told.append(
            f"at least as fast on {as_fast} of {len(fitting)} points ({NOISE:.0%} aside), {FASTER - 1:.0%} faster or "
            f"more on {len(faster)} of {len(models_of(found))} models{named(faster)}"
        )
    return (
        f"{kernels}, {PLANS[kind]}: graph-aware {told[0]} (by the fastest steps: {told[1]}); the chain does not fit "
        f"on {len(found) - len(fitting)} more points, of {len(unfit)} models{named(unfit)}"
    )


def models_of(pairs: Sequence[Pair]) -> list[str]:
    return list(dict.fromkeys(pair.graph.model for pair in pairs))


def named(models: Sequence[str]) -> str:
    return f" ({', '.join(models)})" if models else ""


if __name__ == "__main__":
    sys.exit(main())
