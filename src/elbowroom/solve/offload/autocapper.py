"""`autocapper`: recomputes for more memory than there is, and offloads what is too much (001 section 4.3).

For each of 40 amounts of memory between the budget and what saving all takes: the fastest persistent schedule for it
is made to fit by moving, as long as its peak is above the budget, the lowest of the values that lie idle at the peak.
The referee says which of them is the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, final

from elbowroom.problem import Chain, Problem
from elbowroom.schedule import Backward, Forward, Operation
from elbowroom.solve.method import Found, Method, Options
from elbowroom.solve.offload.graded import Graded, fallback, without_need
from elbowroom.solve.offload.leanest import Leanest
from elbowroom.solve.offload.limits import SavedChain
from elbowroom.solve.offload.placing import Move, levels_without_moves, place
from elbowroom.solve.persistent import Sweep

AMOUNTS = 40  # as in 001


@final
class Autocapper(Method):
    name = "autocapper"
    kinds = ("chain",)
    summary = "recomputes for 40 amounts of memory and offloads what is too much, best kept; O(stages³ · slots)"
    exact = False
    needs_link = True

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Chain)
        return Leanest(problem).least_bytes(options.platform)

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Chain)
        fastest = without_need(problem, budget)
        if fastest is not None:
            return fastest
        best = fallback(Leanest(problem), budget, options)
        for computing in _recomputing(problem, budget, options):
            moves = capped(problem, computing, budget)
            placed = None if moves is None else place(problem, computing, moves, budget, options.platform)
            if placed is not None:
                best = min(best, Graded(placed), key=lambda each: each.rank)
        return best.found(problem)


def _recomputing(chain: Chain, budget: int, options: Options) -> Iterator[tuple[Operation, ...]]:
    """Different persistent schedules for amounts of memory from the budget up."""
    most = max(SavedChain.own(chain).peak_bytes, budget)
    sweep = Sweep(chain, most, options.slots)
    seen = set()
    for number in range(AMOUNTS):
        amount = budget + (most - budget) * number // (AMOUNTS - 1)
        options.progress(number / AMOUNTS)
        if amount >= sweep.least_bytes:
            schedule = sweep.schedule(amount)
            if schedule not in seen:
                seen.add(schedule)
                yield schedule


def capped(chain: Chain, computing: Sequence[Operation], budget: int) -> list[Move] | None:
    """The values to move so that the peak is within the budget; None if that is not enough."""
    levels = levels_without_moves(chain, computing)
    values = sorted(_values(chain, computing), key=lambda value: value.number)
    moves: list[Move] = []
    while levels[peak := int(levels.argmax())] > budget:
        idle = ((value, gap) for value in values if (gap := value.gap_around(peak)) is not None)
        chosen = next(idle, None)
        if chosen is None:
            return None
        value, (since, until) = chosen
        values.remove(value)
        levels[since:until] -= value.bytes
        moves.append(Move(value.at, value.what, value.made, until))
    return moves


@dataclass(eq=False)
class _Value:
    """A value while it is stored: made by an operation (-1: there from the start) and read by others."""

    at: int
    what: Literal["input", "all"]
    bytes: int
    made: int
    readers: list[int] = field(default_factory=list)

    @property
    def number(self) -> int:
        """Which activation it is, or holds."""
        return self.at - 1 if self.what == "input" else self.at

    def gap_around(self, operation: int) -> tuple[int, int] | None:
        """The operations from one that reads it up to the next that does, this one among them."""
        times = [self.made, *self.readers]
        for before, after in pairwise(times):
            if before < operation < after:
                return before + 1, after
        return None


def _values(chain: Chain, computing: Sequence[Operation]) -> Iterator[_Value]:
    """All values that a schedule stores, one after the other."""
    stored: dict[tuple[str, int], _Value] = {("input", 1): _Value(1, "input", chain.input_bytes, -1)}
    for index, operation in enumerate(computing):
        assert isinstance(operation, Forward | Backward)
        at = operation.at
        assert isinstance(at, int)
        inside = ("all", at - 1) in stored
        stored["all" if inside else "input", at - inside].readers.append(index)
        if isinstance(operation, Backward):
            stored["all", at].readers.append(index)
            yield stored.pop(("all", at))
            if not inside:
                yield stored.pop(("input", at))
        elif operation.save == "all":
            if ("input", at + 1) in stored:
                yield stored.pop(("input", at + 1))
            size = chain.stages[at - 1].ways[operation.way].saved_bytes
            stored["all", at] = _Value(at, "all", size, index)
        else:
            if operation.save == "nothing" and not inside:
                yield stored.pop(("input", at))
            size = chain.output_bytes[at]
            stored["input", at + 1] = _Value(at + 1, "input", size, index)
