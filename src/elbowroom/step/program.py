"""Programs: which operations the forward and the backward of a step perform, in order.

A backward program may run a forward operator any number of times. Every reader takes the latest copy, and a copy is
freed after its last reader. So an order of operators says everything: what must be handed from forward to backward,
when each storage is freed, and the peak. `make_program` writes such an order down as operations; the referee
(`step/referee.py`) plays them, and the emitted source does the same with real tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from elbowroom.step.graph import StepGraph
from elbowroom.step.operations import Move, Operation, Run
from elbowroom.step.storages import Memory


@dataclass(frozen=True)
class Program:
    """One step. `saved` is handed from forward to backward; `reseeded` are random operators that draw again."""

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    saved: tuple[int, ...]
    reseeded: tuple[int, ...]

    @cached_property
    def forward_runs(self) -> tuple[Run, ...]:
        return tuple(each for each in self.forward if isinstance(each, Run))

    @cached_property
    def backward_runs(self) -> tuple[Run, ...]:
        return tuple(each for each in self.backward if isinstance(each, Run))

    @property
    def moves(self) -> tuple[Move, ...]:
        """What it does with values besides running operators."""
        return tuple(each for each in (*self.forward, *self.backward) if not isinstance(each, Run))

    @property
    def copies_parts(self) -> bool:
        """Whether all parts of gradients that may be copied are: none stays a view of the whole."""
        return all(run.viewed_in is None for run in self.backward_runs)

    @property
    def reruns(self) -> dict[int, int]:
        """How often each forward operator runs again."""
        counts: dict[int, int] = {}
        for run in self.backward_runs:
            if run.again:
                counts[run.op] = counts.get(run.op, 0) + 1
        return counts


def reads_of(graph: StepGraph, run: Run) -> tuple[int, ...]:
    entry = graph.ops[run.op]
    return entry.rerun_reads if run.again else entry.reads


def make_program(graph: StepGraph, order: Sequence[int], *, copies_parts: bool = True) -> Program:
    """The program whose backward runs `order`, less what nobody reads; its forward runs what is needed once."""
    accumulated: dict[int, list[int]] = {}
    for i, gradient in graph.gradients:
        if i in graph.parameters and graph.ops[gradient].kind == "backward":
            accumulated.setdefault(gradient, []).append(i)
    returned = [gradient for i, gradient in graph.gradients if i not in accumulated.get(gradient, ())]
    backward, needed = _draft(graph, order, returned, accumulated, again=True)
    if numbers := _not_storable(graph, needed):
        backward, needed = _draft(graph, [*numbers, *order], returned, accumulated, again=True)
    arriving = set(graph.arriving)
    saved = tuple(sorted(op for op in needed if op not in arriving))
    kept = (*graph.results, *graph.updates, *saved)
    # Random operators draw in the forward even if only the backward reads them: the stream goes on as it would.
    drawing = [op for op in graph.forward if graph.ops[op].random]
    effects: dict[int, list[int]] = {op: [] for op in (*graph.effects, *drawing)}
    forward, _ = _draft(graph, graph.forward, kept, effects, again=False)
    memory = Memory(graph, 0)
    memory.bring_inputs()
    forward_runs = _reusing(memory, forward, views_parts=False)
    for op in (*saved, *graph.arriving):
        memory.bring(op)
    backward_runs = _reusing(memory, backward, views_parts=not copies_parts)
    rerun = {op for op, again, *_ in backward if again}
    reseeded = tuple(op for op in graph.forward if op in rerun and graph.ops[op].random)
    return Program(forward_runs, backward_runs, saved, reseeded)


def _not_storable(graph: StepGraph, needed: Iterable[int]) -> list[int]:
    """Those of the forward's values that cannot be kept for the backward, numbers mostly, and what makes them."""
    found: set[int] = set()
    waiting = list(needed)
    while waiting:
        op = waiting.pop()
        if op not in found and not graph.ops[op].storable and graph.ops[op].kind == "forward":
            found.add(op)
            waiting.extend(graph.ops[op].rerun_reads)
    return sorted(found)


def forward_only(graph: StepGraph) -> Program:
    """Computes the results and saves nothing; inputs stay as they are, because everything runs as a second time."""
    drafts, _ = _draft(graph, graph.forward, graph.results, {}, again=True)
    runs = (Run(op, again, frees, None, into, last_draw) for op, again, frees, into, last_draw in drafts)
    return Program(tuple(runs), (), (), ())


def play_alone(graph: StepGraph, order: Sequence[int], have: Iterable[int], kept: Iterable[int]) -> tuple[int, int]:
    """Peak and final bytes of running some operators again, given values there before, until others are left."""
    accumulated = {gradient: [i] for i, gradient in graph.gradients if i in graph.parameters}
    drafts, _ = _draft(graph, order, kept, accumulated, again=True)
    memory = Memory(graph, 0)
    for op in have:
        memory.bring(op)
    peak = memory.now
    for draft in drafts:
        peak = max(peak, memory.run(_run(memory, draft, views_parts=False)))
    return peak, memory.now


# What is known of a run before it is known what it may write over: its operator, whether it runs again, what it
# frees, what it is added to, whether it draws for the last time.
_Draft: TypeAlias = tuple[int, bool, tuple[int, ...], tuple[int, ...], bool]


def _draft(
    graph: StepGraph,
    order: Sequence[int],
    kept: Iterable[int],
    accumulated: Mapping[int, Sequence[int]],
    *,
    again: bool,
) -> tuple[list[_Draft], set[int]]:
    """Runs for an order, and the values that must exist before the first. Walks back from the end."""
    alive = set(kept)
    wanted = alive | accumulated.keys()
    inputs = set(graph.inputs)
    drawn: set[int] = set()
    drafts = []
    ops = graph.ops
    for op in reversed(order):
        if op not in wanted:
            continue
        entry = ops[op]
        reruns = again and entry.kind == "forward"
        reads = entry.rerun_reads if reruns else entry.reads
        once = reads if len(reads) < 2 else dict.fromkeys(reads)
        frees = tuple([value for value in (*once, op) if value not in alive and value not in inputs])
        into = tuple(accumulated[op]) if op in accumulated else ()
        last_draw = reruns and entry.random and op not in drawn
        drafts.append((op, reruns, frees, into, last_draw))
        drawn.add(op)
        alive.discard(op)
        wanted.discard(op)
        alive.update(reads)
        wanted.update(reads)
    drafts.reverse()
    return drafts, alive


def _reusing(memory: Memory, drafts: Iterable[_Draft], *, views_parts: bool) -> tuple[Run, ...]:
    """The runs, writing outputs over values that die, where that is safe."""
    runs = []
    for draft in drafts:
        run = _run(memory, draft, views_parts=views_parts)
        memory.run(run)
        runs.append(run)
    return tuple(runs)


def _run(memory: Memory, draft: _Draft, *, views_parts: bool) -> Run:
    """A copy of a part may stay a view; but what becomes a parameter's gradient is alone in its storage."""
    op, again, frees, accumulates, last_draw = draft
    graph = memory.graph
    entry = graph.ops[op]
    reuses = viewed_in = None
    if views_parts and op in graph.part_copies and not accumulates:
        viewed_in = entry.reads[0]
    elif entry.reusable:
        reads = entry.rerun_reads if again else entry.reads
        for read in entry.reusable:
            if memory.may_write_over(read, frees, reads):
                reuses = read
                break
    key = (op, again, frees, reuses, accumulates, last_draw, viewed_in)
    made = graph.runs_made.get(key)
    if made is None:
        made = graph.runs_made[key] = Run(*key)
    assert isinstance(made, Run)
    return made
