"""The table and the summary of gpu_fit.py: budgets kept, peaks predicted, and times against the peers'."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from row_tables import listed, row_cells, show
from rows import NO_LIMIT, TOLERANCE, Row

# Names of the two rows of ours that have a line of their own in the summary.
FULL_MEMORY, LEAST_MEMORY = "elbowroom, full memory", "elbowroom, least memory"


def finish(rows: Sequence[Row]) -> int:
    """Print everything. The exit status is 1 if something failed or went over its budget."""
    show([row_cells(row) for row in rows if row.kind != "fit"])
    print("Budget, peak and predicted: above what is resident. Error: predicted over measured.")
    print("vs best peer: the time of the fastest peer that needs no more than the budget, over ours.\n")
    print("\n".join(summary(rows)), flush=True)
    return int(any(row.error or row.within_budget is False for row in rows))


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
    yield from against_eager(rows, ours)
    yield from fit_seconds(rows)
    yield from dict.fromkeys(f"Remark: {row.model}: {row.note}" for row in rows if row.note)
    yield from (f"Failed: {row.model}, {row.how}: {row.error}" for row in rows if row.error)


def fastest_steps(row: Row, rows: Sequence[Row]) -> str:
    """The comparison with the best peer once more, between the fastest steps of both."""
    peer = next((each for each in rows if (each.model, each.how) == (row.model, row.best_peer)), None)
    if peer is None or not (peer.fastest_ms and row.fastest_ms):
        return ""
    return f" (fastest steps: {peer.fastest_ms / row.fastest_ms:.3f})"


def gain_over_chains(rows: Sequence[Row]) -> str:
    """How much faster than `checkpoint_sequential`, only where memory is short.

    Where eager mode has room, nobody would checkpoint, and a gain over checkpoints would mean nothing.
    """
    eager = peaks_of_eager(rows)
    within = [row for row in rows if row.vs_chain and row.within_budget]
    short = [row for row in within if row.room_bytes * (1 + TOLERANCE) < eager.get(row.model, NO_LIMIT)]
    start = "Mean throughput gain over the best checkpoint_sequential at the same memory: "
    if not short:
        return start + "nothing to compare"
    models = list(dict.fromkeys(row.model for row in short))
    gains = {name: statistics.mean(row.vs_chain for row in short if row.model == name) - 1 for name in models}
    parts = ", ".join(f"{name} {gain:+.1%}" for name, gain in gains.items())
    return f"{start}{statistics.mean(row.vs_chain for row in short) - 1:+.1%} over {len(short)} cells ({parts})"


def against_eager(rows: Sequence[Row], ours: Sequence[Row]) -> Iterator[str]:
    """Times with as much memory as eager mode takes, and the least memory with its time."""
    full = [row for row in ours if row.how == FULL_MEMORY and row.vs_eager]
    times = ", ".join(f"{row.model} {1 / row.vs_eager:.3f}" for row in full)
    yield f"Time over eager's, full memory: {times}"
    eager = peaks_of_eager(rows)
    least = [row for row in ours if row.how == LEAST_MEMORY and row.model in eager]
    shares = [
        f"{row.model} {row.peak_bytes / eager[row.model]:.1%} at {1 / row.vs_eager:.2f}× the time" for row in least
    ]
    yield "Least memory, as a share of eager's: " + ", ".join(shares)


def peaks_of_eager(rows: Sequence[Row]) -> dict[str, int]:
    return {row.model: row.peak_bytes for row in rows if row.kind == "eager" and row.peak_bytes}


def fit_seconds(rows: Sequence[Row]) -> Iterator[str]:
    for first in (row for row in rows if row.kind == "fit" and row.seconds is not None):
        later = [row.seconds for row in rows if row.kind == "ours" and row.model == first.model and row.seconds]
        more = f", then {statistics.mean(later):.1f} a budget (most {max(later):.1f})" if later else ""
        yield f"Seconds in fit: {first.model} {first.seconds:.1f} to capture and measure{more}"
