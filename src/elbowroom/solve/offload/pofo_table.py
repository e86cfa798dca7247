"""The filled dynamic program of `pofo`, and how finely memory is divided for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from elbowroom.errors import InputError
from elbowroom.problem import Chain
from elbowroom.solve.kernels import pofo as kernel
from elbowroom.solve.kernels.pofo import Space
from elbowroom.solve.method import Options
from elbowroom.solve.offload.leanest import Leanest
from elbowroom.solve.slots import TABLE_BYTES, divide
from elbowroom.units import format_bytes

CUSTOMARY = 50  # levels of memory, as in 001
FEWEST = 10
WORK = 1e8  # inner steps that may be spent on levels nobody asked for: a fraction of a second


class Table:
    """The filled dynamic program for one budget."""

    def __init__(self, lean: Leanest, budget: int, options: Options) -> None:
        self.lean, self.budget, self.platform = lean, budget, options.platform
        self.n = len(lean.chain)
        self.space = _space(lean, budget, options)
        rows = self.n * (self.n + 1) // 2
        self.recomputing = np.empty((rows, _row_cells(self.space.levels)))
        self.phases = np.empty((len(lean.entries.stage), _plane_cells(self.space.levels)))
        threads = os.cpu_count() or 1
        with ThreadPoolExecutor(threads) as pool:
            self._fill_recomputing(pool, 4 * threads, lambda part: options.progress(part / 2))
            self._fill_phases(pool, 4 * threads, lambda part: options.progress((1 + part) / 2))

    def _fill_recomputing(self, pool: ThreadPoolExecutor, pieces: int, progress: Callable[[float], None]) -> None:
        for length in range(self.n):  # stretches of one length do not depend on each other
            count = self.n - length
            step = -(-count // pieces)

            def fill(first: int, length: int = length, step: int = step, end: int = count + 1) -> None:
                last = min(first + step, end)
                kernel.fill_recomputing(
                    self.lean.costs, self.space, self.lean.reach, first, last, length, self.recomputing
                )

            list(pool.map(fill, range(1, count + 1, step)))
            progress((length + 1) / self.n)

    def _fill_phases(self, pool: ThreadPoolExecutor, pieces: int, progress: Callable[[float], None]) -> None:
        """All entries but the first, from which the schedules begin."""
        stages = self.lean.entries.stage
        for stage in range(self.n, 1, -1):
            jobs = [(int(entry), piece) for entry in np.flatnonzero(stages == stage) for piece in range(pieces)]

            def fill(job: tuple[int, int]) -> None:
                entry, piece = job
                kernel.fill_entry(
                    self.lean.costs, self.space, self.lean.reach, self.lean.entries,
                    entry, piece, pieces, self.recomputing, self.phases,
                )  # fmt: skip

            list(pool.map(fill, jobs))
            progress((self.n - stage + 1) / self.n)


# --- levels ------------------------------------------------------------------------------------------------------


def _row_cells(levels: int) -> int:
    """Cells of one row of the table of recomputation, all amounts of memory together."""
    return (levels + 1) * (levels + 4) // 2


def _plane_cells(levels: int) -> int:
    """Cells of one entry in the table of the forward phase."""
    return sum(width * width for width in range(2, levels + 3))


def _space(lean: Leanest, budget: int, options: Options) -> Space:
    levels, level = _levels(lean, budget, options.slots)
    widths = np.array([levels - a + 2 for a in range(levels + 1)], dtype=np.int64)
    stages = lean.chain.stages
    out, back = options.platform.rate_to_host, options.platform.rate_from_host
    assert out is not None
    assert back is not None
    shape = lean.reach.shape
    space = Space(
        levels=levels,
        level=level,
        budget=float(budget),
        to_host=float(out),
        from_host=float(back),
        row=np.cumsum(widths) - widths,
        plane=np.cumsum(widths**2) - widths**2,
        forward=np.array([way.forward_time for stage in stages for way in stage.ways], dtype=np.float64),
        backward=np.array([way.backward_time for stage in stages for way in stage.ways], dtype=np.float64),
        beyond=np.zeros(shape, dtype=np.int64),
        lag_out=np.zeros(shape),
        lag_back=np.zeros(shape),
    )
    kernel.fill_walks(lean.costs, space.to_host, space.from_host, space.beyond, space.lag_out, space.lag_back)
    return space


def _levels(lean: Leanest, budget: int, asked: int | None) -> tuple[int, float]:
    """How many levels, and the bytes of one: the greatest that all sizes share, if those are few enough."""
    n, entries = len(lean.chain), len(lean.entries.stage)
    wanted = asked or max(CUSTOMARY, int((3 * WORK / (n * entries)) ** (1 / 3)))
    division = divide(lean.chain, budget, wanted, rows=1, steps=1)
    levels = division.slots if division.exact else wanted
    need = _table_bytes(n, entries, levels)
    if need > TABLE_BYTES and asked is not None:
        raise InputError("slots", f"{asked} for {n} stages need a table of {format_bytes(need)}")
    while _table_bytes(n, entries, levels) > TABLE_BYTES:
        levels -= 1
    return (
        (levels, float(division.unit)) if division.exact and levels == division.slots else (levels, budget / levels)
    )


def _table_bytes(n: int, entries: int, levels: int) -> int:
    return 8 * (n * (n + 1) // 2 * _row_cells(levels) + entries * _plane_cells(levels))


def check_size(chain: Chain) -> None:
    n = len(chain)
    entries = n + sum(len(stage.ways) for stage in chain.stages)
    need = _table_bytes(n, entries, FEWEST)
    if need > TABLE_BYTES:
        raise InputError(
            "stages",
            f"{n} are too many for this method: even {FEWEST} levels need a table of {format_bytes(need)}; "
            "use 'sequential'",
        )
