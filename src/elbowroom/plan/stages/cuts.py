"""Cuts the forward, in its order, where few bytes cross; backward operators follow the forward they belong to.

A value crosses a cut when it is made before and read after it, by the forward or by the backward of a later stage.
Several values may cross (a U-Net's skips do); all of them together are the activation between two stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from elbowroom.plan.stages.flow import single_crossings
from elbowroom.step.graph import Operator, StepGraph

MOST_STAGES = 120  # more stages hardly improve plans and cost solving time


@dataclass(slots=True)
class Section:
    """One stage of the step graph: its operators, and the values that cross into and out of it."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    enters: tuple[int, ...]  # forward values crossing the cut before it
    leaves: tuple[int, ...]  # forward values crossing the cut after it
    needs: tuple[int, ...] = field(
        default=()
    )  # forward values that its backward has to have, but for those made later
    made_later: tuple[int, ...] = field(default=())  # made in later stages, and read by its backward all the same
    lingers: tuple[int, ...] = field(default=())  # made here, and read by the backward of an earlier stage


def cut(graph: StepGraph, *, divide: bool = True, single: bool = False, most: int = MOST_STAGES) -> list[Section]:
    """Cut a step graph into at most `most` stages: at the lowest crossings only, or (`divide`) finely.

    `single`: wherever one value alone goes on and nowhere else, as tools for chains do.
    """
    place = places(graph)
    spans = _spans(graph, place)
    never = _inside_tuples(graph, spans)
    if single:
        cuts = _filled(_needed_bytes(graph), (single_crossings(graph, place) - never).__contains__)
    else:
        cuts = _choose(graph, _crossing_bytes(graph, spans), never, divide)
    return _sections(graph, place, spans, _thin(graph, place, cuts, most - 1))


def places(graph: StepGraph) -> dict[int, int]:
    """Where in the forward's order every operator belongs: forward ones count up, backward ones go with them.

    A backward operator belongs with the forward operator that autograd derived it from; failing that with the last
    forward value it reads, or with its gradient. It never comes before (in backward's order) what it reads.
    """
    place = {op: i for i, op in enumerate(graph.forward)}
    by_sequence: dict[int, int] = {}
    for op in graph.forward:
        for sequence in _sequences(graph.ops[op]):
            by_sequence.setdefault(sequence, place[op])  # later ones only ran before autograd counted on
    last = len(graph.forward) - 1
    for op in graph.backward:
        entry = graph.ops[op]
        # What is kept is there all the time, and tells nothing.
        seen = [place[r] for r in entry.reads if graph.ops[r].kind == "forward" and r not in graph.kept]
        gradients = [place[read] for read in entry.reads if graph.ops[read].kind == "backward"]
        own = [by_sequence[sequence] for sequence in _sequences(entry) if sequence in by_sequence]
        where = max([*seen, *own[:1]], default=None)
        if where is None:
            where = min(gradients, default=last)
        place[op] = min([where, *gradients])
    return place


def _sequences(entry: Operator) -> tuple[int, ...]:
    return entry.fused_sequences if entry.sequence is None else (entry.sequence, *entry.fused_sequences)


def _spans(graph: StepGraph, place: dict[int, int]) -> dict[int, tuple[int, int]]:
    """For every forward value that is not free: the place it is made and the last place it is read."""
    spans = {op: (place[op], place[op]) for op in graph.forward}
    for op in (*graph.forward, *graph.backward):
        for read in graph.ops[op].reads:
            if read in spans:
                made, until = spans[read]
                spans[read] = (made, max(until, place[op]))
    return spans


def _crossing_bytes(graph: StepGraph, spans: dict[int, tuple[int, int]]) -> list[int]:
    """Bytes of the storages that cross the cut after each place."""
    reach: dict[int, tuple[int, int]] = {}  # storage → made, last read through any of its views
    for op, (made, until) in spans.items():
        for storage in graph.storages(op):
            first, last = reach.get(storage, (made, until))
            reach[storage] = (min(first, made), max(last, until))
    change = [0] * (len(graph.forward) + 1)
    for storage, (made, until) in reach.items():
        size = graph.storage_bytes.get(storage, 0)
        if until > made:
            change[made] += size
            change[until] -= size
    crossing, now = [], 0
    for step in change[:-1]:
        now += step
        crossing.append(now)
    return crossing


def _inside_tuples(graph: StepGraph, spans: dict[int, tuple[int, int]]) -> set[int]:
    """Places where a tuple crosses: it cannot be kept, only what is taken out of it."""
    tuples = (span for op, span in spans.items() if not graph.ops[op].storable)
    return {place for made, until in tuples for place in range(made, until)}


def _choose(graph: StepGraph, crossing: Sequence[int], never: set[int], divide: bool) -> list[int]:
    """Places after which to cut: the valleys of the crossing bytes, and more inside stages that stay too large."""
    needed = _needed_bytes(graph)
    cuts = _filled(needed, lambda i: i not in never and _is_valley(crossing, i))
    return _divide(cuts, needed, crossing, never) if divide else _lowest(cuts, needed, crossing)


def _filled(needed: Sequence[int], may_cut: Callable[[int], bool]) -> list[int]:
    """The first places that may be cut after something was made that a backward reads."""
    cuts: list[int] = []
    fresh = 0
    for i, size in enumerate(needed[:-1]):
        fresh += size
        if fresh and may_cut(i):
            cuts.append(i)
            fresh = 0
    return cuts


def _needed_bytes(graph: StepGraph) -> list[int]:
    """Bytes that each place makes and some backward operator reads."""
    read = {read for op in graph.backward for read in graph.ops[op].reads}
    wanted = {storage for op in read for storage in graph.storages(op)}
    return [sum(size for s, size in graph.ops[op].makes if s in wanted) for op in graph.forward]


def _is_valley(crossing: Sequence[int], i: int) -> bool:
    """Whether every much lower place lies beyond a hill, on both sides."""
    low, high = _LOWER * crossing[i], _HIGHER * crossing[i]
    for places in (range(i - 1, -1, -1), range(i + 1, len(crossing) - 1)):
        for j in places:
            if crossing[j] > high:
                break
            if crossing[j] < low:
                return False
    return True


# A place is much lower than another if it has less than 0.9 times its bytes, and a hill if it has more than 1.2 times
# as many: smaller differences are no reason to cut elsewhere.
_LOWER, _HIGHER = 0.9, 1.2


def _lowest(cuts: list[int], needed: Sequence[int], crossing: Sequence[int]) -> list[int]:
    """Give up cuts between two lower ones, highest first, as long as no stage grows beyond its share."""
    share = sum(needed) / _COARSE_SHARES
    until = [0]
    for size in needed:
        until.append(until[-1] + size)
    kept = list(cuts)
    for i in sorted(cuts, key=lambda i: -crossing[i]):
        at = kept.index(i)
        if not 0 < at < len(kept) - 1:
            continue
        left, right = kept[at - 1], kept[at + 1]
        lower_left = any(crossing[j] < _LOWER * crossing[i] for j in kept[:at])
        lower_right = any(crossing[j] < _LOWER * crossing[i] for j in kept[at + 1 :])
        if lower_left and lower_right and until[right + 1] - until[left + 1] <= share:
            kept.pop(at)
    return kept


_COARSE_SHARES = 12  # half as many as there are at least where stages are divided: see below


def _divide(cuts: list[int], needed: Sequence[int], crossing: Sequence[int], never: set[int]) -> list[int]:
    """Cut stages that would save more than their share where least crosses, as long as that is worth keeping."""
    share = sum(needed) / _FEWEST_SHARES
    waiting = list(zip([-1, *cuts], [*cuts, len(crossing) - 1], strict=True))
    found = list(cuts)
    while waiting:
        start, end = waiting.pop()
        total = sum(needed[start + 1 : end + 1])
        if total <= share:
            continue
        before, best = 0, None
        for i in range(start + 1, end):
            before += needed[i]
            if before and total - before and i not in never and crossing[i] <= total / 2:
                score = (crossing[i], abs(total - 2 * before))
                best = min(best, (score, i)) if best else (score, i)
        if best:
            found.append(best[1])
            waiting += [(start, best[1]), (best[1], end)]
    return sorted(found)


_FEWEST_SHARES = 24  # a stage holds at most this fraction of everything, where it can be cut


def _thin(graph: StepGraph, place: dict[int, int], cuts: list[int], most: int) -> list[int]:
    """Remove cuts until few enough are left, each time joining the two neighbours that take the least time."""
    taken = [0.0] * (len(graph.forward) + 1)
    for op, where in place.items():
        taken[where] += graph.ops[op].time
    until = [0.0]
    for seconds in taken:
        until.append(until[-1] + seconds)
    cuts = list(cuts)
    while len(cuts) > most:
        ends = [-1, *cuts, len(graph.forward) - 1]
        joined = [until[ends[k + 2] + 1] - until[ends[k] + 1] for k in range(len(cuts))]
        cuts.pop(joined.index(min(joined)))
    return cuts


def _sections(
    graph: StepGraph, place: dict[int, int], spans: dict[int, tuple[int, int]], cuts: list[int]
) -> list[Section]:
    ends = [*cuts, len(graph.forward) - 1]
    stage_of: list[int] = []
    for stage, end in enumerate(ends):
        stage_of.extend([stage] * (end + 1 - len(stage_of)))
    forward: list[list[int]] = [[] for _ in ends]
    backward: list[list[int]] = [[] for _ in ends]
    crossing: list[list[int]] = [[] for _ in range(len(ends) + 1)]
    for op in graph.forward:
        forward[stage_of[place[op]]].append(op)
        made, until = spans[op]
        for stage in range(stage_of[made], stage_of[until]):
            crossing[stage + 1].append(op)
    for op in graph.backward:
        backward[stage_of[place[op]]].append(op)
    made_later: list[list[int]] = [[] for _ in ends]
    needs: list[list[int]] = [[] for _ in ends]
    lingers: list[dict[int, None]] = [{} for _ in ends]
    for k, ops in enumerate(backward):
        for read in _forward_reads(graph, ops):
            made = stage_of[place[read]]
            if made > k:
                made_later[k].append(read)
                lingers[made][read] = None
            else:
                needs[k].append(read)
    return [
        Section(
            forward=tuple(forward[k]),
            backward=tuple(backward[k]),
            enters=tuple(crossing[k]),
            leaves=tuple(crossing[k + 1]),
            needs=tuple(dict.fromkeys((*needs[k], *lingers[k]))),
            made_later=tuple(made_later[k]),
            lingers=tuple(lingers[k]),
        )
        for k in range(len(ends))
    ]


def _forward_reads(graph: StepGraph, backward: list[int]) -> list[int]:
    reads = dict.fromkeys(read for op in backward for read in graph.ops[op].reads)
    return [read for read in reads if graph.ops[read].kind == "forward"]
