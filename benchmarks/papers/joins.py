"""Figures 7, 8 and 9 of paper 000 and 1.8 and 1.9 of paper 001: joins, made again with `join` and `equiv-chain`.

    python benchmarks/papers/joins.py [--figure 7 8 9 1.8 1.9] [--plot-dir DIR] [--json FILE] [--full]

Every forward, backward and loss takes time 1, every value takes one slot, and the gradients of the inputs are kept.
There are three joins of 6L forwards each, named as in the papers, with branches of these lengths: SNN (2L, 2L, 2L),
CM (L, 5L) and RNN (6L). A ratio is a time divided by 12L + 1, which is the time without recomputation.

Each figure becomes a table, followed by what the paper's text says about it and what we find. The curves themselves
are pictures in the papers, and their values cannot be read from the text. How far L goes in figures 8, 9 and 1.9 the
text does not say: ours stops where a minute is enough, and `--full` goes further and prints every row.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

from elbowroom.problem import Join
from elbowroom.solve import METHODS, Options, solve

Lengths = tuple[int, ...]
NETWORKS: Mapping[str, Callable[[int], Lengths]] = {
    "SNN": lambda size: (2 * size,) * 3,
    "CM": lambda size: (size, 5 * size),
    "RNN": lambda size: (6 * size,),
}
KNOWN = {  # times at L = 5 by slots: reference values of this project, which are in neither paper
    "SNN": {7: 132, 9: 94, 13: 81, 16: 78},
    "CM": {5: 159, 7: 101, 9: 86, 13: 80},
    "RNN": {5: 117, 7: 94, 9: 83, 13: 79},
}
SLOT_ROWS = (*range(3, 17), 20, 25, 31, 32, 33, 40, 46, 61, 62, 63, 75, 91, 92, 93)
SIZE_ROWS = (*range(1, 11), 12, 15, 18, 20, 22, 25, 27, 28, 30, 35, 40)
HIGHEST = 5  # the largest ratio that is drawn in plots over memory
AGREES, DIFFERS, PARTLY, VAGUE = "agrees", "DIFFERS", "in part", "no number to compare"


@dataclass(frozen=True)
class Point:
    """One point of a curve. `panel` is its part of the figure, `row` its line in the table, x and y its place."""

    panel: str
    curve: str
    row: int
    x: float
    y: float
    lengths: Lengths
    slots: int
    time: float
    equiv_chain_time: float | None = None


@dataclass(frozen=True)
class Claim:
    """What a paper's text says, and what we find."""

    about: str
    theirs: str
    ours: str
    verdict: str


@dataclass
class Figure:
    """A figure as a table. `row` says what a line of it stands for; only `rows` are printed, or all if it is None."""

    title: str
    xlabel: str
    ylabel: str
    row: str
    points: list[Point]
    claims: list[Claim]
    notes: list[str] = field(default_factory=list)
    rows: Sequence[int] | None = None


def main() -> None:
    options = parse()
    figures = {}
    for name in options.figure:
        started = time.perf_counter()
        figures[name] = figure = FIGURES[name](options.full)
        show(figure)
        print(f"{len(figure.points)} points, {time.perf_counter() - started:.1f} s\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps({name: asdict(figure) for name, figure in figures.items()}, indent=1))
    if options.claims:
        claims = {name: [asdict(claim) for claim in figure.claims] for name, figure in figures.items()}
        options.claims.write_text(json.dumps(claims, indent=1) + "\n")
    if options.plot_dir:
        options.plot_dir.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            plot(figure, options.plot_dir / f"joins-{name}.png")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", nargs="+", choices=FIGURES, default=list(FIGURES), help="only these")
    parser.add_argument("--plot-dir", type=Path, metavar="DIR", help="also draw the figures here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all points and claims here")
    parser.add_argument("--claims", type=Path, metavar="FILE", help="also write what the texts say and we find here")
    parser.add_argument("--full", action="store_true", help="L to 40 (30 in figure 9), all rows: about three minutes")
    return parser.parse_args()


# --- solving -------------------------------------------------------------------------------------------------


@cache
def time_of(lengths: Lengths, slots: int, method: str = "join") -> float:
    return solve(join_of(lengths), slots, method).time


@cache
def least(lengths: Lengths, method: str = "join") -> int:
    return METHODS[method].least_budget(join_of(lengths), Options())


def join_of(lengths: Lengths) -> Join:
    return Join(lengths, 1, 1, 1, (1,) * len(lengths))


def most(lengths: Lengths) -> int:
    """Slots for every value at once: where the x-axis of the papers' figures has its 1."""
    return sum(lengths) + len(lengths)


def plain(lengths: Lengths) -> int:
    """The time when nothing is recomputed."""
    return 2 * sum(lengths) + 1


def ratio(lengths: Lengths, slots: int) -> float:
    return time_of(lengths, slots) / plain(lengths)


# --- figures 7 and 1.8: time over memory ---------------------------------------------------------------------


def over_memory(paper: str, sizes: Sequence[int], full: bool) -> Figure:
    points = []
    for size in sizes:
        for name, build in NETWORKS.items():
            lengths = build(size)
            for slots in range(least(lengths), most(lengths) + 1):
                there = ratio(lengths, slots), lengths, slots, time_of(lengths, slots)
                points.append(Point(f"L = {size}", name, slots, slots / most(lengths), *there))
    title = f"{paper}: time over memory, at L = {', '.join(map(str, sizes))}"
    return Figure(
        title,
        "slots / slots that hold every value",
        "time / (12L + 1)",
        "slots",
        points,
        [*known_values(), *memory_claims(sizes)],
        [
            "The x-axis of the figure is slots over 6L + 3 (SNN), 6L + 2 (CM) or 6L + 1 (RNN); rows here are slots.",
            "join is exact: where it is not below 2, no schedule of this model is. The text names no L for that.",
            f"Half is rounded down. The plot leaves out what is above {HIGHEST}: RNN with 3 slots.",
        ],
        None if full else SLOT_ROWS,
    )


def memory_claims(sizes: Sequence[int]) -> Iterator[Claim]:
    cases = {(size, name): build(size) for size in sizes for name, build in NETWORKS.items()}

    starts = {name: {least(cases[size, name]) for size in sizes} for name in NETWORKS}
    found = ", ".join(f"{name} {' '.join(map(str, slots))}" for name, slots in starts.items())
    yield Claim("first slots of a curve", "SNN 7, CM 5", found, judged(starts["SNN"] == {7} and starts["CM"] == {5}))

    enough = {case: first(range(least(n), most(n) + 1), partial(is_plain, n)) for case, n in cases.items()}
    good = all(enough[size, name] == 6 * size + len(n) for (size, name), n in cases.items())
    theirs = "6L + 3, 6L + 2, 6L + 1"
    yield Claim("slots for 12L + 1", theirs, theirs if good else str(enough), judged(good))

    halves = {case: ratio(n, most(n) // 2) for case, n in cases.items()}
    good = all(abs(value - 1.25) < 0.05 for value in halves.values())
    yield Claim("ratio with half of these slots", "about 1.25", spread(halves.values()), judged(good))

    begins = {case: ratio(n, linear_from(n)) for case, n in cases.items()}
    good = all(abs(value - 1.5) < 0.1 for value in begins.values())
    yield Claim("a straight line to 1 begins at", "about 1.5", spread(begins.values()), judged(good, PARTLY))

    for size in sizes:
        two = {name: ratio(cases[size, name], least(cases[size, name]) + 2) for name in NETWORKS}
        values = ", ".join(f"{name} {value:.2f}" for name, value in two.items())
        good = max(two.values()) < 2
        if not good:
            extra = [first(range(most(n)), partial(is_below_two, n)) for n in (cases[size, name] for name in two)]
            values += f" (below 2 from least + {', '.join(map(str, extra))})"
        yield Claim(f"ratio with 2 more than the least, L = {size}", "below 2", values, judged(good))


def is_plain(lengths: Lengths, slots: int) -> bool:
    return time_of(lengths, slots) == plain(lengths)


def is_below_two(lengths: Lengths, extra: int) -> bool:
    return ratio(lengths, least(lengths) + extra) < 2


def linear_from(lengths: Lengths) -> int:
    """The least number of slots from which every further slot makes the time shorter by exactly 1."""
    slots = most(lengths)
    while slots > least(lengths) and time_of(lengths, slots - 1) - time_of(lengths, slots) == 1:
        slots -= 1
    return slots


# --- figures 8 and 1.9: time over length ---------------------------------------------------------------------


def over_length(paper: str, counts: Sequence[int], full: bool) -> Figure:
    sizes = range(1, 41 if full else 31)
    points = []
    for slots in counts:
        for name, build in NETWORKS.items():
            for size in sizes:
                lengths = build(size)
                there = ratio(lengths, slots), lengths, slots, time_of(lengths, slots)
                points.append(Point(f"{slots} slots", name, size, size, *there))
    title = f"{paper}: time over L, with {', '.join(map(str, counts))} slots"
    claims = [*known_values(counts), *length_claims(counts, sizes)]
    notes = [
        f"The text does not say how far L goes; ours goes to {sizes[-1]}.",
        "A distance to RNN grows while RNN is before a threshold that the other has passed, and shrinks after it.",
    ]
    return Figure(title, "L", "time / (12L + 1)", "L", points, claims, notes, None if full else SIZE_ROWS)


def length_claims(counts: Sequence[int], sizes: Sequence[int]) -> Iterator[Claim]:
    shown = (5, 15, sizes[-1])
    for slots in counts:
        gaps = {name: [gap(name, size, slots) for size in shown] for name in ("SNN", "CM")}
        found = ", ".join(f"{name} {' '.join(f'{value:.2f}' for value in row)}" for name, row in gaps.items())
        good = all(a <= b for row in gaps.values() for a, b in pairwise(row))
        about = f"{slots} slots: ratio less RNN's, L = {', '.join(map(str, shown))}"
        yield Claim(about, "small, grows with L", found, judged(good, PARTLY))

    means = {name: [sum(gap(name, n, slots) for n in sizes) / len(sizes) for slots in counts] for name in gaps}
    found = ", ".join(f"{name} {' '.join(f'{value:.2f}' for value in row)}" for name, row in means.items())
    good = all(a > b for row in means.values() for a, b in pairwise(row))
    yield Claim(f"the same, mean over L, {' '.join(map(str, counts))} slots", "shrinks", found, judged(good))

    last = sizes[-1]
    worst, best = gap("SNN", last, 7), gap("SNN", last, 9)
    found = f"{worst:.2f} at L = {last}, {best:.2f} with 9 slots"
    yield Claim("the same, SNN with its least, 7 slots", "an exception, far larger", found, judged(worst > 3 * best))

    for slots in counts:
        bends = {name: slopes_changed(build, slots, sizes) for name, build in NETWORKS.items()}
        straight = {name: 1 - bent / (len(sizes) - 2) for name, bent in bends.items()}
        found = ", ".join(f"{name} at {value:.0%} of L" for name, value in straight.items())
        about = f"{slots} slots: a - b/L but at thresholds"
        yield Claim(about, "all three", found, judged(min(straight.values()) > 0.5, PARTLY))

    if 11 in counts:
        over = {name: [size for size in sizes if ratio(build(size), 11) >= 2] for name, build in NETWORKS.items()}
        found = ", ".join(f"{name} {f'to L = {late[0] - 1}' if late else 'all'}" for name, late in over.items())
        yield Claim("11 slots: ratio below 2", "throughout", found, judged(not any(over.values()), PARTLY))


def gap(name: str, size: int, slots: int) -> float:
    return ratio(NETWORKS[name](size), slots) - ratio(NETWORKS["RNN"](size), slots)


def slopes_changed(build: Callable[[int], Lengths], slots: int, sizes: Sequence[int]) -> int:
    """How often the time over L leaves a straight line. On a straight line the ratio is a - b/(12L + 1)."""
    times = [time_of(build(size), slots) for size in sizes]
    return sum(a + c != 2 * b for a, b, c in zip(times, times[1:], times[2:], strict=False))


# --- figure 9: the join as one chain -------------------------------------------------------------------------


def as_one_chain(full: bool) -> Figure:
    sizes, counts = range(1, 31 if full else 21), (9, 12, 15)
    points = []
    for slots in counts:
        for size in sizes:
            lengths = NETWORKS["SNN"](size)
            ours, other = time_of(lengths, slots), time_of(lengths, slots, "equiv-chain")
            where = 2 * size + 1
            points.append(Point("SNN", f"{slots} slots", where, where, other / ours, lengths, slots, ours, other))
    longest = NETWORKS["SNN"](sizes[-1])
    other = time_of(longest, 12, "equiv-chain") / time_of(longest, 9)
    notes = [
        f"The text gives no values and not how far the x-axis goes; ours goes to {2 * sizes[-1] + 1}.",
        "equiv-chain has a third of the slots, for three values each; inputs, gradients and values on the way count.",
        "With 9 slots that is 3, the least there is: no checkpoint but the input, and time grows as the square of L.",
        f"The text does not say how the paper counts. With one more, uncounted, 9 slots end at {other:.2f}.",
    ]
    title = "000, Figure 9: time of equiv-chain over the least, SNN"
    return Figure(title, "2L + 1", "time / least time", "2L + 1", points, [*chain_claims(points)], notes)


def chain_claims(points: Sequence[Point]) -> Iterator[Claim]:
    for curve in dict.fromkeys(point.curve for point in points):
        line = [point for point in points if point.curve == curve]
        near = [point.row for point in line if point.y <= 1.1]
        found = f"within 10 % to 2L + 1 = {max(near)}" if near else "nowhere within 10 %"
        yield Claim(f"{curve}: small graphs", "close to the least", found, VAGUE)
        falls = sum(a.y > b.y for a, b in pairwise(line))
        end = line[-1]
        found = f"{end.y:.2f} at {end.row} ({end.equiv_chain_time:g} against {end.time:g}); falls {falls} times"
        yield Claim(f"{curve}: longer graphs", "further away with length", found, judged(falls == 0, PARTLY))
    ends = [[p for p in points if p.curve == curve][-1].y for curve in dict.fromkeys(p.curve for p in points)]
    found = ", ".join(f"{value:.2f}" for value in ends)
    yield Claim(
        "longest graph, 9, 12, 15 slots", "worse with fewer", found, judged(ends == sorted(ends, reverse=True))
    )


# --- claims --------------------------------------------------------------------------------------------------


def known_values(counts: Iterable[int] | None = None) -> Iterator[Claim]:
    for name, known in KNOWN.items():
        picked = {slots: value for slots, value in known.items() if counts is None or slots in counts}
        ours = [time_of(NETWORKS[name](5), slots) for slots in picked]
        about = f"time of {name}, L = 5, {' '.join(map(str, picked))} slots"
        theirs = " ".join(map(str, picked.values())) + " *"
        yield Claim(about, theirs, " ".join(f"{value:g}" for value in ours), judged(ours == [*picked.values()]))


def judged(good: bool, otherwise: str = DIFFERS) -> str:
    return AGREES if good else otherwise


def first(values: Iterable[int], good: Callable[[int], bool]) -> int:
    return next(value for value in values if good(value))


def spread(values: Iterable[float]) -> str:
    low, *_, high = sorted(values)
    return f"{low:.2f} to {high:.2f}"


# --- printing and drawing ------------------------------------------------------------------------------------


def show(figure: Figure) -> None:
    print(f"== {figure.title}")
    columns = list(dict.fromkeys((point.panel, point.curve) for point in figure.points))
    values = {(point.panel, point.curve, point.row): point.y for point in figure.points}
    rows = sorted({point.row for point in figure.points if figure.rows is None or point.row in figure.rows})
    panels = list(dict.fromkeys(panel for panel, _ in columns))
    widths = {panel: 9 * sum(where == panel for where, _ in columns) for panel in panels}
    print(f"{'':8}" + "".join(f"{panel:>{widths[panel]}}" for panel in panels))
    print(f"{figure.row:>8}" + "".join(f"{curve:>9}" for _, curve in columns))
    for row in rows:
        found = (values.get((*column, row)) for column in columns)
        print(f"{row:8}" + "".join(f"{'–' if value is None else f'{value:.3f}':>9}" for value in found))
    print()
    table = [("", "paper", "ours", ""), *((c.about, c.theirs, c.ours, c.verdict) for c in figure.claims)]
    wide = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(cells, wide, strict=True)).rstrip())
    if any(claim.theirs.endswith("*") for claim in figure.claims):
        print("* the paper prints no times; these are this project's reference values")
    for note in figure.notes:
        print(note)
    if len(rows) < len({point.row for point in figure.points}):
        print("Not all rows are printed; --full prints them, --json has them.")


def plot(figure: Figure, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys(point.panel for point in figure.points))
    canvas, axes = pyplot.subplots(1, len(panels), figsize=(5.5 * len(panels), 4), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        inside = [point for point in figure.points if point.panel == panel]
        for curve in dict.fromkeys(point.curve for point in inside):
            line = [(point.x, point.y) for point in inside if point.curve == curve]
            axis.plot(*zip(*line, strict=True), marker=".", markersize=4, linewidth=1, label=curve)
        if figure.row == "slots":
            axis.set_ylim(0.9, HIGHEST)
        axis.set(title=panel, xlabel=figure.xlabel, ylabel=figure.ylabel)
        axis.legend()
    canvas.suptitle(figure.title, fontsize="medium")
    canvas.tight_layout()
    canvas.savefig(path, dpi=130)
    pyplot.close(canvas)
    print(f"drawn: {path}")


FIGURES: Mapping[str, Callable[[bool], Figure]] = {
    "7": lambda full: over_memory("000, Figure 7", (5, 15), full),
    "8": lambda full: over_length("000, Figure 8", (9, 13), full),
    "9": as_one_chain,
    "1.8": lambda full: over_memory("001, Figure 1.8", (5, 10, 15), full),
    "1.9": lambda full: over_length("001, Figure 1.9", (7, 9, 11, 13), full),
}


if __name__ == "__main__":
    main()
