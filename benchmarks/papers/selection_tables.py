"""The tables of checkpoint_selection.py, each followed by remarks on where the paper and we agree or differ."""

from __future__ import annotations

import statistics
import textwrap
import time
from collections.abc import Iterator, Sequence

from selection_networks import ALEXNET, VGG, Network
from selection_rows import (
    COLUMNS,
    FIGURE_5,
    FIGURE_5_ERROR,
    LINEAR,
    METHOD_OF,
    OOM,
    PAPER_SETS,
    PLAIN,
    ROOT,
    SEARCH_MS,
    WEIGHT_COPIES,
    Row,
    Setting,
    equation_trace,
    found,
    grouped,
    networks_of,
)

from elbowroom.solve import METHODS, Options

MIB = 2**20
CARD_MIB = 24 * 1024  # memory of the paper's card


def show_peaks(rows: Sequence[Row]) -> None:
    print("Table 2: peaks in MiB. `more`: than in the first row of the batch.\n")
    heads = ("column", "set", "Eq. 12", "more", "by layer", "more", "+ weights", "paper", "more", "paper - Eq. 12")
    for setting, group in grouped(rows):
        weights = mib(setting.network.weight_bytes())
        print(f"{title(setting)}; {WEIGHT_COPIES} × {weights:,.1f} MiB of weights: {WEIGHT_COPIES * weights:,.1f}")
        show([heads, *(peak_cells(row, group[0]) for row in group)])
    show_sets(rows)
    for remark in peak_remarks(rows):
        print(textwrap.fill(remark, 118, subsequent_indent="  "))
    print()


def peak_cells(row: Row, first: Row) -> tuple[str, ...]:
    """A row as a line of Table 2. `first` is the batch's first row, with which it is compared."""
    known = is_known(row.paper_mib)
    return (
        row.column or "",
        row.how,
        f"{mib(row.equation_bytes):,.1f}",
        f"{mib(row.equation_bytes - first.equation_bytes):+,.1f}",
        f"{mib(row.by_layer_bytes):,.1f}",
        f"{mib(row.by_layer_bytes - first.by_layer_bytes):+,.1f}",
        f"{mib(row.total_bytes):,.0f}",
        as_paper(row.paper_mib, ",.0f"),
        f"{row.paper_mib - first.paper_mib:+,.0f}" if known else "",
        f"{row.paper_mib - mib(row.equation_bytes):,.0f}" if known else "",
    )


def show_sets(rows: Sequence[Row]) -> None:
    for network in networks_of(rows):
        print(f"Checkpoints of {network.name}, for every batch:")
        for column, paper in zip(COLUMNS[:-1], PAPER_SETS[network][:-1], strict=True):
            ours = found(network, METHOD_OF[column])
            same = "as in the paper" if ours == paper else f"in the paper {as_set(paper)}"
            print(f"  {METHOD_OF[column]:21} {as_set(ours)}, {same}")
        for method in ("least-peak-quadratic", "sequential"):
            print(f"  {method:21} {as_set(found(network, method))}")
    print()


def peak_remarks(rows: Sequence[Row]) -> Iterator[str]:
    for network in networks_of(rows):
        groups = [group for setting, group in grouped(rows) if setting.network is network]
        yield from difference_remarks(network, groups)
        kept = sum(is_ordered(group) for group in groups)
        yield f"{network.name}: the columns are in the paper's order by layer in {kept} of {len(groups)} batches."
        rest = [group[0].paper_mib - mib(group[0].total_bytes) for group in groups]
        yield (
            f"{network.name}: the paper's {LINEAR} needs {min(rest):,.1f} to {max(rest):,.1f} MiB besides data "
            f"(Eq. 12) and {WEIGHT_COPIES} × the weights."
        )
        yield from network_remarks(network)
    unexplained = [row for row in rows if row.paper_mib == OOM and mib(row.total_bytes) < CARD_MIB]
    if unexplained:
        names = ", ".join(f"{title(row.setting)}, {row.column} ({mib(row.total_bytes):,.0f})" for row in unexplained)
        yield (
            f"Out of memory in the paper, though predicted to fit its 24 GiB: {names}. Between the moments at which "
            "it looks more is allocated: a layer's other gradients, workspaces, unusable gaps."
        )
    yield (
        "The paper does not name its optimizer or the pieces of the constant part; three times the weights is read "
        "off its figures."
    )


def difference_remarks(network: Network, groups: Sequence[Sequence[Row]]) -> Iterator[str]:
    """How far the differences to the first row of a batch are off the paper's, at the worst.

    What is the same in all rows of a batch, such as weights, does not count into differences.
    """
    pairs = [(row, group[0]) for group in groups for row in group[1:] if is_known(row.paper_mib)]
    for how, attribute in (("Eq. 12", "equation_bytes"), ("by layer", "by_layer_bytes")):
        off = [
            (mib(getattr(row, attribute) - getattr(first, attribute)) - row.paper_mib + first.paper_mib, row)
            for row, first in pairs
        ]
        for plain in (False, True):
            miss, row = max(((m, r) for m, r in off if (r.column == PLAIN) == plain), key=lambda x: abs(x[0]))
            what = "without checkpoints" if plain else "between sets"
            yield (
                f"{network.name}, {how}: the difference {what} is at most {abs(miss):,.1f} MiB off the paper's, "
                f"{abs(miss) / row.paper_mib:.2%} of its peak (batch {row.setting.batch})."
            )


def is_ordered(group: Sequence[Row]) -> bool:
    """Whether columns have the same order by layer as in the paper, whose differences of 1 MiB count as noise."""
    known = [row for row in group if is_known(row.paper_mib)]
    return all(a.by_layer_bytes < b.by_layer_bytes for a in known for b in known if a.paper_mib + 1 < b.paper_mib)


def network_remarks(network: Network) -> Iterator[str]:
    """Where our methods choose other checkpoints than the paper, and what its text and its tables disagree on."""
    sizes, name = network.sizes(128), network.name
    for column, paper in zip(COLUMNS[:-1], PAPER_SETS[network][:-1], strict=True):
        ours, method = found(network, METHOD_OF[column]), METHOD_OF[column]
        if ours != paper and column != ROOT:
            a, b = (max(equation_trace(sizes, checkpoints)) for checkpoints in (ours, paper))
            how = "the same" if a == b else "another"
            yield f"{name}: {method} chooses other checkpoints than {column}, with {how} peak by Eq. 12."
    yield (
        f"{name}: for {ROOT} the paper makes segments of round(√n) layers; our `sqrt` makes round(√n) segments and "
        "gives the last one what is left."
    )
    if network is VGG:
        peak = mib(max(equation_trace(sizes, FIGURE_5)))
        yield (
            f"VGG-19: section 5.2 calls {as_set(FIGURE_5)} its algorithm's answer; by Eq. 12 that needs {peak:,.1f} "
            f"MiB, as much as {as_set(PAPER_SETS[VGG][1])} and more than Table 2's."
        )
        return
    growth = (9866 - 1002) / (4096 / 128 - 1)
    ours = mib(max(equation_trace(sizes, PAPER_SETS[ALEXNET][0])))
    yield (
        f"AlexNet: section 5.6 has 103 and 26 MiB for the first convolution and its max-pool; torchvision's layers "
        f"have {mib(sizes[1]):.1f} and {mib(sizes[2]):.1f}, and Table 2 fits these: from batch 128 to 4096 its "
        f"{LINEAR} grows by {growth:.1f} MiB for each 128 images, ours by {ours:.1f}."
    )
    yield (
        f"AlexNet: Eq. 12 has {ROOT} too low, because it does not know the first max-pool's indices, and {PLAIN} too "
        "high, because it counts values that no backward reads. By layer both are counted as they are."
    )


def show_times(rows: Sequence[Row]) -> None:
    has_measured = any(row.measured for row in rows)
    print(
        "Table 3: seconds a batch. `ratio`: to the time without checkpoints. Ours are estimated for an RTX 3090 from"
    )
    print("operations and bytes moved, without the optimizer: first with every segment run twice, as PyTorch's")
    print("`checkpoint` does, then with the last one run once, as our schedules do.\n")
    heads = ("column", "set", "paper", "ratio", "ours", "ratio", "last once", "ratio")
    for setting, group in grouped(rows):
        print(title(setting))
        plain = next(row for row in group if row.column == PLAIN)
        lines = [(*heads, *(("measured", "ratio") if has_measured else ()))]
        lines += [time_cells(row, plain, has_measured) for row in group]
        show(lines)
    print(
        "Seconds are those of the paper's card and a whole training step, so only ratios can be compared. AlexNet's"
    )
    print(
        "are lower in the paper than estimated; what else its steps contain is not said. The 2.849 s at batch 400 the"
    )
    print("paper leaves unexplained, and so does our estimate.\n")


def time_cells(row: Row, plain: Row, has_measured: bool) -> tuple[str, ...]:
    """A row as a line of Table 3. `plain` is the batch's row without checkpoints, to which ratios are."""
    stages = row.setting.network.chain(row.setting.batch).stages
    once = sum(stage.forward_time + stage.backward_time for stage in stages)
    twice, last_once = row.slowdown(last_twice=True), row.slowdown(last_twice=False)
    ratio = row.paper_s / plain.paper_s if is_known(row.paper_s) and is_known(plain.paper_s) else None
    cells = [row.column or "", row.how, as_paper(row.paper_s, ".3f"), "" if ratio is None else f"{ratio:.2f}"]
    cells += [f"{once * twice:.3f}", f"{twice:.2f}", f"{once * last_once:.3f}", f"{last_once:.2f}"]
    if has_measured:
        seconds, basis = row.measured.get("seconds"), plain.measured.get("seconds")
        cells += [f"{seconds:.3f}" if seconds else "OOM", f"{seconds / basis:.2f}" if seconds and basis else ""]
    return tuple(cells)


def show_search_times() -> None:
    print("Milliseconds to find the checkpoints of VGG-19 (the paper's on its CPU, in Python; ours here, compiled):")
    for column, paper in SEARCH_MS.items():
        print(f"  {column}: paper {paper:g}, {METHOD_OF[column]} {search_ms(METHOD_OF[column]):.2g}")
    print()


def search_ms(method: str) -> float:
    """Milliseconds that a method takes to find the checkpoints of VGG-19, the median of ten batches.

    A method remembers what it has found, so every chain must be new to it. The first one does not count: there the
    method may still be compiled.
    """
    spent = []
    for batch in range(1, 12):
        chain = VGG.chain(batch)
        started = time.perf_counter()
        METHODS[method].find(chain, 0, Options())
        spent.append(1000 * (time.perf_counter() - started))
    return statistics.median(spent[1:])


def show_traces(rows: Sequence[Row]) -> None:
    """Print how far predictions are off what was measured. Both include what is there before the step."""
    if not any(row.measured for row in rows):
        print("Predictions are not compared with measurements here; --measure does, on a CUDA device.")
        return
    print(
        "Predicted and measured, in MiB with all that is there between steps. `seen`: the most at the end of a layer,"
    )
    print("as the paper measures. `true`: the most at any time. `phases`: mean error over the phases of a step; the")
    print(f"paper has {FIGURE_5_ERROR:.1%} in its Fig. 5.\n")
    heads = ("column", "set", "seen", "Eq. 12", "off", "phases", "by layer", "off", "phases", "true")
    for setting, group in grouped(rows):
        print(title(setting))
        show([heads, *(trace_cells(row) for row in group)])


def trace_cells(row: Row) -> tuple[str, ...]:
    """A row as a line of the table of predictions."""
    if "error" in row.measured:
        return (row.column or "", row.how, row.measured["error"], *[""] * 7)
    trace, base = row.measured["trace_bytes"], row.measured["base_bytes"]
    cells = [row.column or "", row.how, f"{mib(max(trace)):,.0f}"]
    for predicted in row.traces:
        total = [base + held for held in predicted]
        errors = [abs(held / real - 1) for held, real in zip(total, trace, strict=True)]
        off = max(total) / max(trace) - 1
        cells += [f"{mib(max(total)):,.0f}", f"{off:+.2%}", f"{statistics.mean(errors):.2%}"]
    return (*cells, f"{mib(row.measured['peak_bytes']):,.0f}")


def title(setting: Setting) -> str:
    return f"{setting.network.name}, batch {setting.batch}"


def is_known(value: float | None) -> bool:
    return value is not None and value != OOM


def as_paper(value: float | None, form: str) -> str:
    return "" if value is None else "OOM" if value == OOM else format(value, form)


def as_set(checkpoints: Sequence[int]) -> str:
    return "{" + ",".join(map(str, checkpoints)) + "}"


def mib(size: float) -> float:
    return size / MIB


def show(lines: Sequence[Sequence[str]]) -> None:
    """Print lines as a table, the headings being the first of them. The first two columns are names."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for cells in lines:
        texts = (
            f"{cell:<{w}}" if i < 2 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        print("  " + "  ".join(texts).rstrip())
    print()
