"""What flows through a forward: values that depend on the batch, get a gradient and lead to a result.

Everything else could be handed to any part of the network from outside, as the batch is: masks, positions and rotary
tables get no gradient, weights in another precision and position biases need no batch, running statistics lead
nowhere. So none of that ties one part of a network to another, however often it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from elbowroom.joint import Joint


def flowing(joint: Joint) -> list[int]:
    """The forward operators whose values flow, in order."""
    of_batch = set(joint.inputs) - joint.parameters
    with_gradient = {i for i, _ in joint.gradients}
    for op in joint.forward:
        reads = joint.ops[op].replay_reads
        if not of_batch.isdisjoint(reads):
            of_batch.add(op)
        if not with_gradient.isdisjoint(reads):
            with_gradient.add(op)
    wanted = set(joint.results)
    for op in reversed(joint.forward):
        if op in wanted:
            wanted.update(joint.ops[op].replay_reads)
    return [op for op in joint.forward if op in of_batch and op in with_gradient and op in wanted]


def moments(joint: Joint, place: Mapping[int, int]) -> dict[int, list[int]]:
    """For every storage that flows: the place where it is made, then those where it is read, also by the backward.

    `place` says where in the forward's order operators belong.
    """
    flow = flowing(joint)
    found = {storage: [place[op]] for op in flow for storage, _ in joint.ops[op].makes}
    values = set(flow)
    for op in (*flow, *joint.backward):
        for read in joint.ops[op].replay_reads:
            if read in values:
                for storage in joint.storages(read):
                    if storage in found:
                        found[storage].append(place[op])
    return found


def single_crossings(joint: Joint, place: Mapping[int, int]) -> set[int]:
    """Places after which no more than one storage that flows is still to be read: where a chain could be cut."""
    change = [0] * (len(joint.forward) + 1)
    for made, *reads in moments(joint, place).values():
        until = max(reads, default=made)
        if until > made:
            change[made] += 1
            change[until] -= 1
    return {i for i, crossing in enumerate(accumulate(change[:-1])) if crossing <= 1}
