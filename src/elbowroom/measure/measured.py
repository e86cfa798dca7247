"""A captured graph with what its operators cost, ready to be planned and run."""

from __future__ import annotations

from dataclasses import dataclass

from elbowroom.capture.joint_graph import Captured
from elbowroom.measure.plain_operators import Given, measure_operators
from elbowroom.measure.random_state import random_state_kept
from elbowroom.progress import progress_bar


@dataclass(frozen=True)
class Measured:
    """`captured` has times and workspaces; `channels_last` is how a compiled program lays out its images."""

    captured: Captured
    channels_last: bool = False

    @property
    def is_fused(self) -> bool:
        """Whether its operators are what a fusing compiler makes of the traced ones."""
        return self.captured.cones is not None


def measured(
    captured: Captured, *, given: Given | None = None, estimate: bool = False, free_bytes: int | None = None
) -> Measured:
    """Measure a graph's operators on the device that will run them, or estimate them.

    `free_bytes` is what measuring may take: training may be under way.
    """
    with random_state_kept(), progress_bar("measuring operators") as report:
        if captured.cones is None:
            found = measure_operators(captured, given=given, estimate=estimate, free_bytes=free_bytes, report=report)
            return Measured(found)
        from elbowroom.measure.fused_operators import measure_fused  # the compiler takes seconds to import

        return Measured(*measure_fused(captured, given=given, estimate=estimate, report=report))
