"""What a network looks like to somebody who would cut it into stages: a word, and a sentence that says why.

Only what flows counts (`plan/stages/flow.py`), and shares are of the forward's time. Plans do not depend on the
word: the planner tries its ways to cut and takes the fastest program. The word tells people what kind of network was
found, and the sentence what a tool for chains would have to live with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from elbowroom.plan.stages.cuts import places
from elbowroom.plan.stages.flow import flowing, moments, single_crossings
from elbowroom.plan.stages.independent_towers import Independent, find_towers
from elbowroom.step.graph import StepGraph

Kind = Literal["chain", "skips", "dense", "towers", "graph"]

_LARGE = 0.3  # the share of a part that no single value divides, from which on it is more than a block of a chain
_ALONE = 0.9  # of a part's time, for an operator with little around it
_FAR = 0.1  # of the time, between where a value is made and where it is read last: it skips ahead
_SPACING = 0.01  # of the time, between two reads that are not one
_OFTEN = 3  # reads of a value, and values read so often, that make a network dense


@dataclass(frozen=True)
class Structure:
    """`chain`: one value at a time goes on. `skips`: values are read again much later; `dense`: many, and often.
    `towers`: large parts do not depend on one another. `graph`: none of these.
    """

    kind: Kind
    why: str


def structure_of(graph: StepGraph) -> Structure:
    """Nearly linear in the size of the graph."""
    kind, why = _seen(graph)
    results = len(graph.arriving)
    return Structure(kind, f"{why}; {results} results get gradients" if results > 1 else why)


def _seen(graph: StepGraph) -> tuple[Kind, str]:
    shares = _shares(graph)
    if (towers := _towers(graph, shares)) is not None:
        return "towers", _about_towers(graph, towers)
    place = places(graph)
    part = _largest_part(shares, single_crossings(graph, place))
    if part < _LARGE:
        return "chain", _about_chain(part)
    spans = list(_spans(graph, moments(graph, place), [0.0, *accumulate(shares)]))
    skips = [span for span in spans if span.share >= _FAR]
    often = [span for span in skips if span.reads >= _OFTEN]
    if len(often) >= max(_OFTEN, len(skips) / 2):
        return "dense", _about_dense(often, spans)
    if skips:
        return "skips", _about_skips(skips, spans)
    return (
        "graph",
        f"{part:.0%} of the forward is one part, which no place divides where one value alone is passed on",
    )


def _shares(graph: StepGraph) -> list[float]:
    """Of the forward's time, operator by operator; of their number if times are not known."""
    times = [graph.ops[op].time for op in graph.forward]
    total = sum(times)
    return [time / total if total else 1 / len(times) for time in times]


def _largest_part(shares: Sequence[float], singles: Set[int]) -> float:
    """The largest share between places that one value crosses; an operator alone is none, for nothing divides it."""
    largest = part = most = 0.0
    for i, share in enumerate(shares):
        part, most = part + share, max(most, share)
        if i in singles or i == len(shares) - 1:
            if most < _ALONE * part:
                largest = max(largest, part)
            part = most = 0.0
    return largest


def _about_chain(part: float) -> str:
    block = f"; the largest block takes {part:.0%} of the forward" if round(part, 2) else ""
    return f"each step reads what the one before it made{block}"


# --- towers --------------------------------------------------------------------------------------------------


def _towers(graph: StepGraph, shares: Sequence[float]) -> Independent | None:
    """Towers of the flow; operators are named by their number in the step graph."""
    flow = flowing(graph)
    number = {op: i for i, op in enumerate(flow)}
    share = dict(zip(graph.forward, shares, strict=True))
    reads = [[number[read] for read in graph.ops[op].rerun_reads if read in number] for op in flow]
    towers = find_towers(reads, [share[op] for op in flow])
    return towers and Independent(towers.shares, None if towers.meet is None else flow[towers.meet])


def _about_towers(graph: StepGraph, towers: Independent) -> str:
    *rest, last = (f"{share:.0%}" for share in towers.shares)
    sizes = f"{len(towers.shares)} towers of {', '.join(rest)} and {last} of the forward"
    if towers.meet is None:
        return f"{sizes} lead to results of their own"
    op = graph.ops[towers.meet]
    return f"{sizes} meet at {op.name}{f' in {op.module}' if op.module else ''}"


# --- skips ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Span:
    """A value from where it is made to where it is read last: its share of the time, and how often it is read."""

    bytes: int
    share: float
    reads: int


def _spans(graph: StepGraph, read_at: dict[int, list[int]], clock: Sequence[float]) -> Iterator[_Span]:
    for storage, (made, *reads) in read_at.items():
        latest, count = clock[made + 1], 0
        for place in sorted(reads):
            if clock[place] >= latest + _SPACING:
                latest, count = clock[place], count + 1
        last = max(reads, default=made)
        yield _Span(graph.storage_bytes.get(storage, 0), max(0.0, clock[last] - clock[made + 1]), count)


def _about_skips(skips: Sequence[_Span], spans: Sequence[_Span]) -> str:
    each = "a value skips" if len(skips) == 1 else f"{len(skips)} values skip"
    farthest = max(span.share for span in skips)
    return f"{each} ahead, by up to {farthest:.0%} of the forward: {_crossing(skips, spans)}"


def _about_dense(often: Sequence[_Span], spans: Sequence[_Span]) -> str:
    most = max(span.reads for span in often)
    return f"{len(often)} values are read {_OFTEN} times or more, up to {most} times: {_crossing(often, spans)}"


def _crossing(some: Sequence[_Span], spans: Sequence[_Span]) -> str:
    """The share of some values in all bytes that wait to be read, each for as long as it does."""
    total = sum(span.bytes * span.share for span in spans)
    share = sum(span.bytes * span.share for span in some) / total if total else 0.0
    return f"{share:.0%} of the bytes that wait to be read"
