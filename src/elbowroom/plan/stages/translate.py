"""From a schedule over stages to the order in which the backward program runs operators.

Follows the schedule operation by operation with the values it keeps at each moment. What an operation needs and
nothing keeps is run again, and nothing else: values that happen to be there are used.
"""

from __future__ import annotations

from elbowroom.plan.stages.savings import recomputed
from elbowroom.plan.stages.staging import Staged, backward_order
from elbowroom.schedule.operations import Backward, Forward, Schedule


def order_of(staged: Staged, schedule: Schedule) -> list[int]:
    """The backward program's, for a schedule whose last stage stands for what happens outside."""
    sections, graph = staged.sections, staged.graph
    kept = _Kept(staged)
    order: list[int] = []
    turned = False  # whether the first forward sweep is over
    for operation in schedule:
        stage = operation.at if isinstance(operation, Forward | Backward) else None
        if not isinstance(stage, int):
            continue
        if stage == len(sections) + 1:
            turned = True
        elif isinstance(operation, Forward):
            if turned:
                have = kept.values()
                wanted = set(sections[stage - 1].leaves)
                if operation.save == "all":
                    wanted |= staged.ways[stage - 1][operation.way].saved
                order.extend(recomputed(graph, sorted(wanted), have))
            kept.forward(operation)
        else:
            order.extend(backward_order(graph, sections[stage - 1], kept.values()))
            kept.backward(stage)
    return order


class _Kept:
    """What a schedule holds at a moment, as the referee does: inputs, saved sets, and the activation just made."""

    def __init__(self, staged: Staged) -> None:
        self.staged = staged
        self.inputs: set[int] = {1}
        self.saved: dict[int, int] = {}
        self.loose = 0  # the stage whose output was made last and is held by nothing else

    def forward(self, operation: Forward) -> None:
        stage = operation.at
        assert isinstance(stage, int)
        if operation.save != "nothing":
            self.inputs.add(stage)
        elif stage > 1:
            self.inputs.discard(stage)
        if operation.save == "all":
            self.saved[stage] = operation.way
        self.loose = stage

    def backward(self, stage: int) -> None:
        self.saved.pop(stage, None)
        self.inputs.discard(stage)
        self.loose = 0

    def values(self) -> set[int]:
        """A new set of the forward values that are there."""
        sections = self.staged.sections
        have = {op for stage in self.inputs for op in sections[stage - 1].enters}
        for stage, way in self.saved.items():
            have.update(self.staged.ways[stage - 1][way].saved)
            have.update(sections[stage - 1].leaves)
            have.update(sections[stage - 1].enters)
        if self.loose:
            have.update(sections[self.loose - 1].leaves)
        return have
