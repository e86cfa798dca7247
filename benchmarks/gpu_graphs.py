"""Plans that see a graph against plans that see a chain, at equal memory, on a GPU: tables, a summary, JSON.

    python benchmarks/gpu_graphs.py --whole --json FILE [--models unet clip_b16 …] [--kernels torch] [--jobs 8]
    python benchmarks/gpu_graphs.py --tiny | --show FILE…

For each model, with PyTorch's kernels and with fused ones, the first cell saves everything. The others are plans
within 50 % and within 35 % of that cell's peak:

- graph: as `fit` makes them;
- chain: as a tool for chains would make them, which cuts a model only where a single value crosses;
- whole, with `--whole`: as a chain, and every stage is saved whole or not at all, as by `checkpoint_sequential` and
  rotor.

Where no plan of a chain fits, the chain gets the least memory that it needs, and the table says so. Cells compile
side by side and are measured alone; cells.py says what a step and its peak are. A run that was cut short goes on with
`--with` and the file of its `--json`.
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
from unittest import mock

from cases import GRAPH_MODELS, TINY_GRAPH_MODELS
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
from row_tables import HEADINGS as ROW_HEADINGS
from row_tables import listed, number, row_cells, show
from rows import Book, Row, mib, open_book, rows_of

KERNELS = "torch", "inductor"
SHARES = 0.5, 0.35  # of the peak with everything saved: the room of the plans that are compared
PLANS = {"graph": "as fit plans", "chain": "as a chain", "whole": "as a chain, stages whole"}
EVERYTHING = "everything saved"
EVERYTHING_BYTES = 24 << 30  # a guess of what the first cell of a model takes, which is not known before it has run
FASTER = 1.05  # times as fast: from here on a model counts as faster
NOISE = 0.01  # times that differ by less than this share count as equal
TRIES = 3  # how often a chain may ask for more memory: its compiled program may take more than was predicted


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
    """Add all rows of one model with one kind of kernels to the book."""
    known = {row.how: row for row in options.known if row.model == name and row.ms}
    plain_cell = Cell(name, f"{kernels}: {EVERYTHING}", "plain", held_bytes=EVERYTHING_BYTES, kernels=kernels)
    (plain,) = (book.add(row) for row in floor.run_all([plain_cell], known))
    if plain.ms:
        plans = [plan for plan in PLANS if plan != "whole" or options.whole]
        for row in floor.run_all(list(cells_within(plain, kernels, plans)), known):
            book.add(row)


def cells_within(plain: Row, kernels: str, plans: Sequence[str]) -> Iterator[Cell]:
    """The cells of plans within shares of the peak of `plain`.

    Each is expected to hold as much memory as plain execution: a chain that does not fit gets as much as it needs.
    """
    held = plain.resident_bytes + plain.peak_bytes
    for share in SHARES:
        room = int(share * plain.peak_bytes)
        for plan in plans:
            how = f"{kernels} {share:.0%}: {PLANS[plan]}"
            yield Cell(plain.model, how, plan, share, room, held, kernels)


def run(bench: Bench, cell: Cell) -> Row:
    """Measure one cell, in its own process."""
    measure_alone(bench.gate)
    with planned_as(cell.kind), no_other_kernels():
        return run_or_least(bench, cell)


def run_or_least(bench: Bench, cell: Cell) -> Row:
    """Measure within the cell's room; if no plan fits, within the least that has one, which the row then names."""
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
    """Have `fit` plan as a tool for chains would, if the cell is of kind chain or whole."""
    from elbowroom.session import planning

    if kind not in ("chain", "whole"):
        yield
        return
    as_chain = partial(planning.Planner, as_chain=True, whole_stages=kind == "whole")
    with mock.patch.object(planning, "Planner", as_chain):
        yield


@contextmanager
def no_other_kernels() -> Iterator[None]:
    """Where compiled programs do not fit, have `fit` say what would be enough, and not take PyTorch's kernels."""
    from elbowroom.session import session

    with mock.patch.object(session, "fused_or_plain", lambda fused, plain, say: fused()):
        yield


# --- showing -------------------------------------------------------------------------------------------------

HEADINGS = "model", "kernels, share", "room MiB", "everything ms", "fit ms", "chain ms", "ratio", "whole ms", "ratio"


@dataclass(frozen=True)
class Pair:
    """The row of a plan as `fit` makes it, and of a chain's plan for the same model, kernels and share."""

    graph: Row
    chain: Row

    @property
    def kernels(self) -> str:
        return point(self.graph).split()[0]

    @property
    def ratio(self) -> float:
        """The chain's time divided by that of `fit`: above 1, `fit` is faster."""
        return self.chain.ms / self.graph.ms

    @property
    def fastest_ratio(self) -> float:
        """The same between the fastest steps of both, in which other work did not disturb the host."""
        return self.chain.fastest_ms / self.graph.fastest_ms


def point(row: Row) -> str:
    """Kernels and share, as `torch 50%`: what the rows of `fit` and of the chain have in common."""
    return row.how.partition(":")[0]


def pairs(rows: Sequence[Row], kind: str) -> list[Pair]:
    """All points where both were measured, and the plan of `fit` is within the room that was asked for."""
    chains = {(row.model, point(row)): row for row in rows if row.kind == kind and row.ms}
    graphs = [row for row in rows if row.kind == "graph" and row.ms and row.least_bytes is None]
    return [Pair(row, chains[key]) for row in graphs if (key := (row.model, point(row))) in chains]


def finish(rows: Sequence[Row]) -> int:
    """Print everything. The exit status is 1 if something failed or went over its budget."""
    rows = sorted(rows, key=lambda row: (row.model, row.how))
    show([row_cells(row)[:-1] for row in rows], ROW_HEADINGS[:-1])
    show(list(ratios(rows)), HEADINGS)
    print("Room, peak and predicted: above parameters, gradients and batch. Ratio: a chain's time over fit's.")
    print("(…): it does not fit, and takes that long within as many MiB as it needs at least.\n")
    print("\n".join(summary(rows)), flush=True)
    return int(any(row.error or row.within_budget is False for row in rows))


def ratios(rows: Sequence[Row]) -> Iterator[list[str]]:
    """The lines of the second table, whose columns are `HEADINGS`."""
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
    yield f"Over budget: {len(over)} of {len(rows)} cells{listed(over, lambda row: f'{row.over_bytes:,} B')}"
    for kernels in KERNELS:
        for kind in ("chain", "whole"):
            found = [pair for pair in pairs(rows, kind) if pair.kernels == kernels]
            if found:
                yield compared(kernels, kind, found)
    yield from (f"Failed: {row.model}, {row.how}: {row.error}" for row in rows if row.error)


def compared(kernels: str, kind: str, found: Sequence[Pair]) -> str:
    """The summary of one kind of chain, by the median steps and by the fastest ones.

    Points where the chain does not fit are left out of "at least as fast". They do count as "faster" where the chain,
    although it had more memory, took longer.
    """
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
