"""What flows through a forward: values that depend on the batch, get a gradient and lead to a result.

Everything else could be handed to any part of the network from outside, as the batch is: masks, positions and rotary
tables get no gradient, weights in another precision and position biases need no batch, running statistics lead
nowhere. So none of that ties one part of a network to another, however often it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from elbowroom.step.graph import StepGraph


def flowing(graph: StepGraph) -> list[int]:
    """The forward operators whose values flow, in order."""
    of_batch = set(graph.inputs) - graph.parameters
    with_gradient = {i for i, _ in graph.gradients}
    for op in graph.forward:
        reads = graph.ops[op].rerun_reads
        if not of_batch.isdisjoint(reads):
            of_batch.add(op)
        if not with_gradient.isdisjoint(reads):
            with_gradient.add(op)
    wanted = set(graph.results)
    for op in reversed(graph.forward):
        if op in wanted:
            wanted.update(graph.ops[op].rerun_reads)
    return [op for op in graph.forward if op in of_batch and op in with_gradient and op in wanted]


def moments(graph: StepGraph, place: Mapping[int, int]) -> dict[int, list[int]]:
    """For every storage that flows: the place where it is made, then those where it is read, also by the backward.

    `place` says where in the forward's order operators belong.
    """
    flow = flowing(graph)
    found = {storage: [place[op]] for op in flow for storage, _ in graph.ops[op].makes}
    values = set(flow)
    for op in (*flow, *graph.backward):
        for read in graph.ops[op].rerun_reads:
            if read in values:
                for storage in graph.storages(read):
                    if storage in found:
                        found[storage].append(place[op])
    return found


def single_crossings(graph: StepGraph, place: Mapping[int, int]) -> set[int]:
    """Places after which no more than one storage that flows is still to be read: where a chain could be cut."""
    change = [0] * (len(graph.forward) + 1)
    for made, *reads in moments(graph, place).values():
        until = max(reads, default=made)
        if until > made:
            change[made] += 1
            change[until] -= 1
    return {i for i, crossing in enumerate(accumulate(change[:-1])) if crossing <= 1}
