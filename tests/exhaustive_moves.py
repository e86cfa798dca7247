"""Programs of small steps, with every choice of what is kept, computed again and moved, and their times.

Slow and obvious: what may move goes at all places there are. The referee's time line grades them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

from elbowroom.step.operations import Await, Offload, Prefetch, Release, Run
from elbowroom.step.program import make_program, reads_of
from elbowroom.step.timeline import time_line
from moving import may_move
from stepgraphs import Step, every_single_recomputation, graph_of


def chain(*layers: tuple[int, int]):
    """Layers of some bytes and seconds, each of whose backwards reads what went into it, and takes twice as long."""
    steps = [
        Step("plain", (1,), (size, 1), time, 2 * time, 0, False, False, False, False, True, False)
        for size, time in layers
    ]
    return graph_of(steps, inputs=(True, False, False))


def every_program(graph):
    """Every set of values kept, others computed again once, and of those kept every set that moves, with copies that
    begin and end at every place there is for the first of these and as early and late as can be for others."""
    for order in every_single_recomputation(graph):
        program = make_program(graph, order)
        may = may_move(graph, program)
        for size in range(min(len(may), 3) + 1):
            for moved in combinations(may, size):
                yield from with_moves(graph, program, moved)


def with_moves(graph, program, moved):
    """Each where the moves of each value take all places, or two of them where several values move."""
    places = [places_of(graph, program, value, every=len(moved) == 1) for value in moved]
    for chosen in product(*places):
        gaps = {}
        for value, (begin, give, ask, wait) in zip(moved, chosen, strict=True):
            gaps.setdefault(("forward", begin), []).append(Offload(value))
            gaps.setdefault(("forward", give), []).append(Release(value))
            gaps.setdefault(("backward", ask), []).append(Prefetch(value))
            gaps.setdefault(("backward", wait), []).append(Await(value))
        halves = {}
        for half in ("forward", "backward"):
            operations = [*getattr(program, half), None]
            halves[half] = tuple(
                each for n, run in enumerate(operations) for each in (*gaps.get((half, n), ()), run) if each
            )
        saved = tuple(op for op in program.saved if op not in moved)
        yield replace(program, **halves, saved=saved)


def places_of(graph, program, value, *, every):
    forward, backward = program.forward, program.backward
    made = next(n for n, run in enumerate(forward) if run.op == value) + 1
    last = max([made, *(n + 1 for n, run in enumerate(forward) if value in reads_of(graph, run))])
    first = next(n for n, run in enumerate(backward) if isinstance(run, Run) and value in reads_of(graph, run))
    gives = range(last, len(forward) + 1) if every else {last, len(forward)}
    asks = range(first + 1) if every else {0, first // 2, first}
    for give in gives:
        for begin in range(made, give + 1) if every else [last if give >= last else made]:
            yield from ((begin, give, ask, first) for ask in asks)


def the_fastest(programs, graph, around, link):
    """By peak, the time of the fastest program that the host has room for."""
    fastest: dict[int, float] = {}
    for program in programs:
        held = sum(graph.value_bytes(each.value) for each in program.moves if isinstance(each, Offload))
        if link.host_bytes is None or held <= link.host_bytes:
            line = time_line(graph, program, around, link)
            fastest[line.peak_bytes] = min(line.time, fastest.get(line.peak_bytes, float("inf")))
    return fastest
