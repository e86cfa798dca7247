"""Readings of a captured step as a chain: by which cut and account, and what a stage is charged that runs again.

Several ways to cut are tried: only where little crosses, more finely inside large stages, and where one value
crosses. The last is what tools for chains do; here it is one cut among others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from elbowroom.plan.stages.cuts import Section, cut
from elbowroom.plan.stages.savings import MOST_WAYS
from elbowroom.plan.stages.staging import Account, Staged, stage
from elbowroom.problem import Chain
from elbowroom.solve.persistent import Sweep
from elbowroom.step.graph import StepGraph


class Reading(NamedTuple):
    """One reading: the number of its cut, its account, and its charge.

    A stage that runs again right before its backward takes less than a forward, because nobody wants its output then:
    `spares_outputs` charges it so. But programs spare operators in more ways than one, and with the plain charge the
    dynamic program may happen upon a better one.
    """

    cut: int
    account: Account
    spares_outputs: bool


class Cut(NamedTuple):
    """A way to cut, and the accounts that are tried with it."""

    staged: Staged
    accounts: tuple[Account, ...]
    is_chain: bool  # cut wherever one value crosses, and nowhere else
    copies_parts: bool = True  # parts of gradients are copied where that lets the rest go


class Readings:
    """All readings of one graph, with the tables of the dynamic program that were filled for them.

    For comparison only: `as_chain` reads as tools for chains do, cut where one value crosses and nowhere else, and
    with `whole_stages` every stage is saved whole or not at all.
    """

    def __init__(self, graph: StepGraph, outside_bytes: int, *, as_chain: bool, whole_stages: bool) -> None:
        self.graph = graph
        self.as_chain = as_chain
        self._outside_bytes = outside_bytes
        most_ways = 1 if whole_stages else MOST_WAYS
        plannable = graph.forward and graph.backward
        self.cuts = list(_cuts(graph, as_chain, most_ways)) if plannable else []
        if plannable and graph.part_copies:
            viewed = _cuts(graph.with_parts_viewed(), as_chain, most_ways)
            self.cuts += [each._replace(copies_parts=False) for each in viewed]
        self._sweeps: dict[Reading, list[Sweep]] = {}

    def __iter__(self) -> Iterator[Reading]:
        charges = (False,) if self.as_chain else (True, False)
        for number, each in enumerate(self.cuts):
            for account in each.accounts:
                for spares in charges:
                    yield Reading(number, account, spares)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def sweep(self, reading: Reading, most_bytes: int) -> Sweep:
        """A table that reaches `most_bytes`, and not so far beyond that its slots are coarse."""
        sweeps = self._sweeps.setdefault(reading, [])
        for sweep in sweeps:
            if (
                most_bytes <= sweep.most_bytes <= 2 * most_bytes
                or sweep.most_bytes == sweep.useful_bytes <= most_bytes
            ):
                return sweep
        sweeps.append(self.new_sweep(reading, most_bytes))
        return sweeps[-1]

    def new_sweep(self, reading: Reading, most_bytes: int) -> Sweep:
        last_times = self.cuts[reading.cut].staged.last_times if reading.spares_outputs else None
        return Sweep(self._chain(reading), most_bytes, last_times=last_times)

    def method(self, reading: Reading) -> str:
        """What a plan made with it says of how it was made."""
        each = self.cuts[reading.cut]
        where = " where one value crosses" if each.is_chain else ""
        parts = ", parts of gradients apart" if each.copies_parts and self.graph.part_copies else ""
        return f"persistent, {len(each.staged.sections)} stages{where}, {reading.account} account{parts}"

    def is_plain_chain(self, reading: Reading) -> bool:
        """Whether it reads the graph as tools for chains do."""
        return self.cuts[reading.cut].is_chain and reading.account == "full" and not reading.spares_outputs

    def _chain(self, reading: Reading) -> Chain:
        return self.cuts[reading.cut].staged.chain(reading.account, self._outside_bytes)


def _cuts(graph: StepGraph, as_chain: bool, most_ways: int) -> Iterator[Cut]:
    single = cut(graph, single=True)
    by_bytes = {} if as_chain else {_ends(sections): sections for sections in _cut_by_bytes(graph)}
    for ends, sections in by_bytes.items():
        yield Cut(stage(graph, sections, most_ways), ("full", "once"), ends == _ends(single))
    if _ends(single) not in by_bytes:  # little crosses two cuts, so the accounts are nearly the same
        yield Cut(stage(graph, single, most_ways), ("full",), True)


def _cut_by_bytes(graph: StepGraph) -> Iterator[list[Section]]:
    coarse, fine = cut(graph, divide=False), cut(graph, divide=True)
    if len(coarse) > 1:
        yield coarse
    yield fine


def _ends(sections: Sequence[Section]) -> tuple[int, ...]:
    return tuple(section.forward[-1] for section in sections)
