"""Dividing a budget into slots.

A dynamic program over memory needs few, equal steps of it. Sizes round up to whole slots, so a plan that fits in
slots fits in bytes. Sums that must be there at once (an operation's output, overhead and gradients) are added in
bytes and rounded once.

Where all sizes share a divisor, slots of that many bytes lose nothing, and they are used whenever they are no
more than the slots allowed. Without a number from the user, short chains get more slots than the customary 500,
because they cost next to nothing there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elbowroom.errors import InputError
from elbowroom.problem import Chain
from elbowroom.units import format_bytes

CUSTOMARY = 500
FEWEST, MOST = 100, 10_000
WORK = 5e8  # inner steps a solver may spend on slots nobody asked for: well under a second
TABLE_BYTES = 3 * 2**30  # about the largest table we are willing to fill


@dataclass(frozen=True)
class Division:
    """A budget cut into `slots` slots of `unit` bytes; `exact` if no size is rounded.

    If sizes are rounded, a table should go `spare` slots beyond: see `fitting`.
    """

    unit: int
    slots: int
    exact: bool
    spare: int

    @classmethod
    def of(cls, budget: int, unit: int, common: int, stored: int) -> Division:
        """Cut into slots of `unit` bytes, where all sizes are multiples of `common` and `stored` values at most are
        stored at once: each loses half a slot on average."""
        slots, exact = budget // unit, common % unit == 0
        return cls(unit, slots, exact, 0 if exact else min(slots // 8, stored // 2 + 1))


def table_slots(rows: float) -> int:
    """How many slots a table of so many rows may have, with room for the spare."""
    return int(TABLE_BYTES / 9 / rows)


def useful_bytes(chain: Chain) -> int:
    """More memory than this makes no schedule faster: everything is saved and nothing is recomputed."""
    ways = [stage.ways for stage in chain.stages]
    saved = sum(max(way.saved_bytes for way in stage_ways) for stage_ways in ways)
    passing = max(
        gradient + before + max(max(way.forward_overhead_bytes, way.backward_overhead_bytes) for way in stage_ways)
        for gradient, before, stage_ways in zip(
            chain.gradient_bytes[1:], chain.gradient_bytes[:-1], ways, strict=True
        )
    )
    return chain.input_bytes + saved + chain.gradient_bytes[-1] + passing


def most_slots(chain: Chain, rows: float) -> int:
    """How many slots a table of so many rows may have; refuses chains for which they would be too few."""
    most = table_slots(rows)
    if most < FEWEST:
        need = format_bytes(8.0 * rows * FEWEST)
        raise InputError(
            "stages",
            f"{len(chain)} are too many for this method: even {FEWEST} slots need a table of {need}; "
            "use 'sequential' or 'least-peak'",
        )
    return most


def divide(chain: Chain, budget: int, asked: int | None, rows: float, steps: float) -> Division:
    """Cut a budget for a table of so many `rows`, each slot of which takes so many `steps` to fill."""
    most, common = most_slots(chain, rows), _common_divisor(chain)
    if asked is not None and most < min(asked, budget // common):
        need = format_bytes(8.0 * rows * min(asked, budget // common))
        raise InputError("slots", f"{asked} for {len(chain)} stages need a table of {need}; at most {most} fit")
    wanted = min(most, asked if asked is not None else max(CUSTOMARY, min(MOST, int(WORK / steps))))
    unit = common if budget // common <= wanted else max(1, budget // wanted)
    if budget // unit > most:  # a slot is a whole number of bytes: of small budgets there may be twice the slots
        unit = -(-budget // most)
    return Division.of(budget, unit, common, len(chain))


def _common_divisor(chain: Chain) -> int:
    sizes = [*chain.output_bytes, *chain.gradient_bytes]
    for stage in chain.stages:
        for way in stage.ways:
            sizes += [way.saved_bytes, way.forward_overhead_bytes, way.backward_overhead_bytes]
    return math.gcd(*sizes) or 1
