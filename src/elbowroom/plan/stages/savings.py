"""What a stage may save: everything its backward reads, or less, recomputing the rest when its backward runs.

For a price of memory, the cheapest choice is a minimum cut. Every value that the backward needs is either saved
(price × bytes) or recomputed (its time), and what recomputation reads must itself be saved or recomputed:

    available(v) → recomputed(v)   capacity: the price of saving v
    recomputed(v) → sink           capacity: the time of v
    recomputed(v) → available(u)   infinite, for every u that v reads
    source → available(v)          infinite, for every v that the backward reads

Sweeping the price gives the stage's ways to save that no other beats. Values that cross a border of the stage are
there anyway and cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from elbowroom.plan.stages.cuts import Section
from elbowroom.step.graph import StepGraph

MOST_WAYS = 8  # of a stage: the dynamic program's time grows with their number
# Of a byte, as multiples of what makes saving everything as dear as running everything again: four times more or less
# each, over seven orders of magnitude. Every price costs one minimum cut.
_PRICES = tuple(4.0**k for k in range(-6, 7))
_SCALE = 10**8  # capacities are whole numbers that must stay well within 32 bits
_INFINITE = 2**30


@dataclass(frozen=True, slots=True)
class Way:
    """One way to save: the values kept, and the time to recompute the others."""

    saved: frozenset[int]
    bytes: int
    time: float


def ways_to_save(graph: StepGraph, section: Section, most: int = MOST_WAYS) -> list[Way]:
    """From saving everything (first) down to saving least; each saves less and takes longer."""
    there = _there_anyway(graph, section)
    inside = set(section.forward)
    needs = [op for op in section.needs if op in inside]
    everything = _way(graph, section, frozenset(needs), there)
    found = {everything.saved: everything}
    total_time = sum(graph.ops[op].time for op in section.forward)
    if everything.bytes and total_time:
        for price in _PRICES:
            saved = _cheapest(graph, section, needs, there, price * total_time / everything.bytes)
            found.setdefault(saved, _way(graph, section, saved, there))
    return _frontier(list(found.values()), everything, most)


def recomputed(graph: StepGraph, wanted: list[int], have: set[int]) -> list[int]:
    """Forward operators to run, in order, so that `wanted` exist, given what there is."""
    missing: set[int] = set()
    stack = [op for op in wanted if op not in have]
    while stack:
        op = stack.pop()
        if op in missing or op in have or op in graph.kept or graph.ops[op].kind != "forward":
            continue
        missing.add(op)
        stack.extend(graph.ops[op].rerun_reads)
    return sorted(missing)


def _there_anyway(graph: StepGraph, section: Section) -> set[int]:
    """Storages that are in memory while the stage's backward runs, whatever it saves."""
    return {storage for op in (*section.enters, *section.leaves) for storage in graph.storages(op)}


def _way(graph: StepGraph, section: Section, saved: frozenset[int], there: set[int]) -> Way:
    storages = {storage for op in saved for storage in graph.storages(op)} - there
    have = {*saved, *section.enters, *section.leaves}
    again = recomputed(graph, [op for op in section.needs if op in set(section.forward)], have)
    return Way(saved, graph.bytes_of(storages), sum(graph.ops[op].time for op in again))


def _cheapest(graph: StepGraph, section: Section, needs: list[int], there: set[int], price: float) -> frozenset[int]:
    """The minimum cut at one price, in seconds per byte."""
    number = {op: i for i, op in enumerate(section.forward)}
    count = len(number)
    source, sink = 2 * count, 2 * count + 1
    total = sum(graph.ops[op].time for op in section.forward) or 1.0
    unit = _SCALE / total
    rows, columns, capacities = [], [], []

    def edge(a: int, b: int, capacity: float) -> None:
        rows.append(a)
        columns.append(b)
        capacities.append(min(_INFINITE, int(capacity)))

    border = {*section.enters, *section.leaves}
    for op, i in number.items():
        entry = graph.ops[op]
        cost = price * graph.bytes_of(set(graph.storages(op)) - there)
        edge(2 * i, 2 * i + 1, cost * unit if entry.storable else _INFINITE)
        # A whole unit even for free views: between equal cuts, save the value itself rather than its base.
        edge(2 * i + 1, sink, 1 + entry.time * unit if op not in graph.kept else _INFINITE)
        for read in entry.rerun_reads:
            if read in number and read not in border:
                edge(2 * i + 1, 2 * number[read], _INFINITE)
    for op in needs:
        if op not in border:
            edge(source, 2 * number[op], _INFINITE)
    size = 2 * count + 2
    network = csr_array(
        (np.array(capacities, dtype=np.int32), (np.array(rows), np.array(columns))), shape=(size, size)
    )
    network.sum_duplicates()
    flow = maximum_flow(network, source, sink).flow
    residual = csr_array(network - flow)
    residual.data = np.maximum(residual.data, 0)
    residual.eliminate_zeros()
    reached = np.zeros(size, dtype=bool)
    reached[breadth_first_order(residual, source, return_predecessors=False)] = True
    return frozenset(op for op, i in number.items() if reached[2 * i] and not reached[2 * i + 1])


def _frontier(ways: list[Way], everything: Way, most: int) -> list[Way]:
    """Everything first, then ways that save less, each faster than any that saves no more; thinned evenly."""
    ways.sort(key=lambda way: (way.time, way.bytes))
    kept: list[Way] = [everything]
    for way in ways:
        if way.bytes < kept[-1].bytes:
            kept.append(way)
    if len(kept) > most:
        chosen = np.linspace(0, len(kept) - 1, most).round().astype(int)
        kept = [kept[i] for i in dict.fromkeys(chosen.tolist())]
    return kept
