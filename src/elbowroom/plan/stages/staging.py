"""Stages as the planner sees them: a `Chain` with sizes and times played on the step graph.

Two accounts of the same stages. `"full"` counts everything that crosses a cut at that cut, so a tensor that crosses
several is counted at each. `"once"` counts it where it is made only, as if whatever an earlier checkpoint holds were
always held. The first suits long chains, the second dense skips. Neither is exact, nor even a bound: while a backward
runs, what it still needs of later stages is in neither. The planner tries both and lets the exact prediction judge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from elbowroom.plan.stages.cuts import Section
from elbowroom.plan.stages.savings import MOST_WAYS, Way, recomputed, ways_to_save
from elbowroom.problem import Chain, Saving, Stage
from elbowroom.step.graph import StepGraph
from elbowroom.step.program import play_alone

Account = Literal["full", "once"]


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Bytes and seconds of one stage. Peaks include everything that crosses its borders."""

    enters: int
    leaves: int
    through: int  # crosses both borders
    gradient_in: int
    gradient_out: int
    forward_time: float
    backward_time: float
    last_time: float  # of the backward, and right before it of what it needs from what enters
    plain_peak: int
    saved: tuple[int, ...]  # per way to save: bytes kept beyond what enters
    saving_peaks: tuple[int, ...]
    backward_peaks: tuple[int, ...]


@dataclass(frozen=True)
class Staged:
    """A step graph cut into stages, with the ways each may save and what they cost."""

    graph: StepGraph
    sections: Sequence[Section]
    ways: Sequence[Sequence[Way]]
    costs: Sequence[StageCosts]
    looks: Sequence[int]  # equal numbers: the same stage repeated

    def chain(self, account: Account, outside_bytes: int) -> Chain:
        """The chain to plan; one more stage stands for what happens between forward and backward."""
        stages = [_stage(k, self.costs[k], self.ways[k], account) for k in range(len(self.sections))]
        outside = Stage("outside", 0.0, 0.0, 0, 0, 0, outside_bytes, outside_bytes)
        return Chain(0, 0, (*stages, outside))

    @property
    def last_times(self) -> list[float]:
        """Of each stage of that chain: to run it again and at once its backward."""
        return [*(costs.last_time for costs in self.costs), 0.0]


def stage(graph: StepGraph, sections: Sequence[Section], most_ways: int = MOST_WAYS) -> Staged:
    """Work out every stage's ways to save and their costs, identical stages once."""
    gradients = _gradients_crossing(graph, sections)
    first: dict[object, int] = {}  # what a stage looks like → the first stage that does
    looks: list[int] = []
    ways: list[Sequence[Way]] = []
    costs: list[StageCosts] = []
    for k, section in enumerate(sections):
        twin = first.setdefault(_look(graph, section, gradients[k], gradients[k + 1]), k)
        looks.append(twin)
        if twin == k:
            ways.append(ways_to_save(graph, section, most_ways))
            costs.append(_costs(graph, section, ways[k], gradients[k], gradients[k + 1]))
        else:
            same = dict(zip(sections[twin].forward, section.forward, strict=True))
            ways.append([Way(frozenset(same[op] for op in w.saved), w.bytes, w.time) for w in ways[twin]])
            costs.append(costs[twin])
    return Staged(graph, sections, ways, costs, looks)


def backward_order(graph: StepGraph, section: Section, have: set[int]) -> list[int]:
    """A stage's backward operators, each preceded by the forward ones it misses. Adds what there is then to `have`.

    What it reads of later stages is there since their backward: two towers meet in a loss, and the gradient of the
    first needs the output of the second. What earlier stages will read of it is made last, if it was not needed.
    """
    order = []
    have.update(section.made_later)
    for op in section.backward:
        again = recomputed(graph, list(graph.ops[op].reads), have)
        order.extend(again)
        have.update(again)
        order.append(op)
    lingering = recomputed(graph, list(section.lingers), have)
    have.update(lingering)
    return [*order, *lingering]


def _gradients_crossing(graph: StepGraph, sections: Sequence[Section]) -> list[tuple[int, ...]]:
    """For every border, first to last: the gradients made after it and read before it (or returned at the end)."""
    stage_of = dict.fromkeys(graph.arriving, len(sections))
    for k, section in enumerate(sections):
        stage_of.update(dict.fromkeys(section.backward, k))
    returned = {gradient for i, gradient in graph.gradients if i not in graph.parameters}
    lowest = {op: -1 if op in returned else stage for op, stage in stage_of.items()}
    for op in graph.backward:
        for read in graph.ops[op].reads:
            if read in lowest:
                lowest[read] = min(lowest[read], stage_of[op])
    crossing: list[list[int]] = [[] for _ in range(len(sections) + 1)]
    for op, made in stage_of.items():
        for border in range(lowest[op] + 1, made + 1):
            crossing[border].append(op)
    return [tuple(sorted(ops)) for ops in crossing]


def _look(graph: StepGraph, section: Section, leaving: Sequence[int], arriving: Sequence[int]) -> object:
    """Equal for stages whose operators, shapes and connections are the same."""
    names: dict[int, object] = {}
    parts = {
        "forward": section.forward,
        "backward": section.backward,
        "enters": section.enters,
        "made_later": section.made_later,
    }
    for kind, ops in parts.items():
        names.update({op: (kind, i) for i, op in enumerate(ops)})
    for i, op in enumerate(arriving):
        names.setdefault(op, ("arrives", i))

    def shown(op: int) -> object:
        entry = graph.ops[op]
        reads = tuple(names.get(read, "elsewhere") for read in entry.reads)
        return entry.key, reads, tuple(size for _, size in entry.makes), entry.time

    return (
        tuple(map(shown, (*section.forward, *section.backward))),
        tuple(names.get(op) for op in section.leaves),
        tuple(names.get(op) for op in section.lingers),
        tuple(names.get(op) for op in leaving),
        tuple(graph.bytes_of(set(graph.storages(op))) for op in (*section.enters, *section.made_later, *arriving)),
    )


def _costs(
    graph: StepGraph, section: Section, ways: Sequence[Way], leaving: Sequence[int], arriving: Sequence[int]
) -> StageCosts:
    enters, leaves = _storages(graph, section.enters), _storages(graph, section.leaves)
    saved, saving_peaks, backward_peaks = [], [], []
    for way in ways:
        kept = (*section.leaves, *way.saved)
        saved.append(graph.bytes_of(_storages(graph, kept) - enters))
        saving_peaks.append(play_alone(graph, section.forward, section.enters, (*kept, *section.enters))[0])
        have = (*section.enters, *kept)
        order = backward_order(graph, section, set(have))
        there, afterwards = (*have, *section.made_later, *arriving), (*leaving, *section.enters, *section.lingers)
        backward_peaks.append(play_alone(graph, order, dict.fromkeys(there), afterwards)[0])
    return StageCosts(
        enters=graph.bytes_of(enters),
        leaves=graph.bytes_of(leaves),
        through=graph.bytes_of(enters & leaves),
        gradient_in=graph.bytes_of(_storages(graph, arriving)),
        gradient_out=graph.bytes_of(_storages(graph, leaving)),
        forward_time=sum(graph.ops[op].time for op in section.forward),
        backward_time=sum(graph.ops[op].time for op in section.backward),
        last_time=sum(graph.ops[op].time for op in backward_order(graph, section, set(section.enters))),
        plain_peak=play_alone(graph, section.forward, section.enters, (*section.leaves, *section.enters))[0],
        saved=tuple(saved),
        saving_peaks=tuple(saving_peaks),
        backward_peaks=tuple(backward_peaks),
    )


def _stage(k: int, costs: StageCosts, ways: Sequence[Way], account: Account) -> Stage:
    """One stage of the chain. Overheads are what the peak leaves after the sizes the chain knows of."""
    again = costs.through if account == "full" else 0
    output = costs.leaves - costs.through + again
    entering = costs.enters
    savings = []
    plain_overhead = max(0, costs.plain_peak - entering - output)
    for way, saved, peak, backward_peak in zip(
        ways, costs.saved, costs.saving_peaks, costs.backward_peaks, strict=True
    ):
        kept = saved + again
        # The planner relies on no saving forward being cheaper in memory than the plain one.
        overhead = max(0, peak - entering - kept, output + plain_overhead - kept)
        around = entering + kept + costs.gradient_in + costs.gradient_out
        savings.append(
            Saving(
                costs.forward_time,
                costs.backward_time + way.time,
                kept,
                overhead,
                max(0, backward_peak - around),
            )
        )
    own, *others = savings
    return Stage(
        name=str(k + 1),
        forward_time=own.forward_time,
        backward_time=own.backward_time,
        output_bytes=output,
        saved_bytes=own.saved_bytes,
        gradient_bytes=costs.gradient_in,
        forward_overhead_bytes=max(own.forward_overhead_bytes, plain_overhead),
        backward_overhead_bytes=own.backward_overhead_bytes,
        alternatives=tuple(others),
    )


def _storages(graph: StepGraph, ops: Iterable[int]) -> set[int]:
    return {storage for op in ops for storage in graph.storages(op)}
