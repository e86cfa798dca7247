"""Integer programs, written down as sums of variables, and HiGHS, which solves them.

HiGHS does not look at signals while it runs, but lets other threads of Python run. So it gets a thread of its own,
and the calling thread waits beside it and hears an interrupt at once. What that leaves behind ends with its time
limit, or with the process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint
from scipy.optimize import milp as _milp
from scipy.sparse import csr_array

_GLANCE_S = 0.1  # how often the calling thread wakes up; where nothing interrupts its waiting, it hears of one then


@dataclass(frozen=True, slots=True)
class Sum:
    """A constant, and variables (by number) with their coefficients."""

    constant: float = 0.0
    terms: Mapping[int, float] = field(default_factory=dict)

    def __add__(self, other: Sum | float) -> Sum:
        if not isinstance(other, Sum):
            return Sum(self.constant + other, self.terms)
        terms = dict(self.terms)
        for variable, factor in other.terms.items():
            terms[variable] = terms.get(variable, 0.0) + factor
        return Sum(self.constant + other.constant, terms)

    def __sub__(self, other: Sum | float) -> Sum:
        return self + other * -1.0

    def __mul__(self, factor: float) -> Sum:
        return Sum(self.constant * factor, {variable: c * factor for variable, c in self.terms.items()})

    def at(self, solution: NDArray[np.float64]) -> float:
        return self.constant + sum(float(c * solution[variable]) for variable, c in self.terms.items())


def total(sums: Iterable[Sum]) -> Sum:
    added = Sum()
    for each in sums:
        added = added + each
    return added


def no(binary: Sum) -> Sum:
    """1 − a variable that is 0 or 1."""
    return Sum(1.0) - binary


@dataclass(frozen=True)
class Solved:
    """The best solution found, if any, and what no solution is below."""

    bound: float
    solution: NDArray[np.float64] | None


class IntegerProgram:
    """Variables within bounds, and rows of sums that must not be negative."""

    def __init__(self) -> None:
        self.low: list[float] = []
        self.high: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[Sum] = []

    def variable(self, low: float, high: float, whole: bool = False) -> Sum:
        self.low.append(low)
        self.high.append(high)
        self.whole.append(whole)
        return Sum(0.0, {len(self.low) - 1: 1.0})

    def binary(self) -> Sum:
        return self.variable(0.0, 1.0, whole=True)

    def at_least(self, left: Sum, right: Sum, *needs: Sum) -> None:
        """left ≥ right if all `needs` are 1. If one of them is 0, the row says no more than the variables' bounds."""
        row = left - right
        lowest = row.constant + sum(c * (self.low[v] if c > 0 else self.high[v]) for v, c in row.terms.items())
        if lowest < 0:
            for need in needs:
                row = row - no(need) * lowest
            self.rows.append(row)

    def equal(self, left: Sum, right: Sum) -> None:
        self.rows += [left - right, right - left]

    def least(self, cost: Sum, seconds: float) -> Solved:
        """The solution in which `cost` is least, as far as it is found in time."""
        costs, columns, values, lengths = np.zeros(len(self.low)), [], [], [0]
        for variable, factor in cost.terms.items():
            costs[variable] = factor
        for row in self.rows:
            columns += list(row.terms)
            values += list(row.terms.values())
            lengths.append(len(columns))
        matrix = csr_array((values, columns, lengths), shape=(len(self.rows), len(self.low)))
        found = milp(
            costs,
            integrality=np.array(self.whole, dtype=int),
            constraints=LinearConstraint(matrix, np.array([-row.constant for row in self.rows])),
            bounds=Bounds(np.array(self.low), np.array(self.high)),
            options={"time_limit": seconds, "mip_rel_gap": 0.0},
        )
        proven = found.fun if found.status == 0 else found.mip_dual_bound
        return Solved(-np.inf if proven is None else float(proven) + cost.constant, found.x)


def milp(cost: Any, **arguments: Any) -> Any:
    """As `scipy.optimize.milp`, but quiet, and an interrupt ends it at once."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(_milp(cost, **arguments))
        except BaseException as failure:  # which the calling thread raises
            outcome.append(failure)

    thread = Thread(target=run, name="HiGHS", daemon=True)
    with _silence():
        thread.start()
        while thread.is_alive():
            thread.join(_GLANCE_S)
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


@contextmanager
def _silence() -> Iterator[None]:
    """HiGHS has messages that no option turns off; they must not get between the lines of an answer."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
