"""Graphs that run one after another: planned together, each within its share of the memory."""

from __future__ import annotations

import pytest

from elbowroom.plan.planner import Planner
from elbowroom.plan.together import peak_together, plan_together


def test_graphs_in_a_row_are_refined_together():
    """Each is refined within its share; what they save must still fit beside each other."""
    pytest.importorskip("torch")
    from captured import captured

    planners = [Planner(*captured("siamese", fused=True)), Planner(*captured("unet"))]
    for share in (0.5, 0.6, 0.7):
        room = int(share * peak_together([planner.everything for planner in planners]))
        plans = plan_together([planners[0], planners[1], planners[0]], room)
        assert plans[0] is plans[2]
        assert peak_together(plans) <= room
    assert any(plan.method.endswith("then value by value") for plan in plans)
