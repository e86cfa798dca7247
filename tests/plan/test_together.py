"""Graphs that run one after another: planned together, each within its share of the memory."""

from __future__ import annotations

from itertools import product

import pytest

from elbowroom.plan.planner import Planner
from elbowroom.plan.together import least_together, peak_together, plan_together
from elbowroom.step.referee import peak_in_a_row


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


def test_the_least_of_graphs_in_a_row_is_that_of_all_programs_found():
    """Also where a program of a higher peak saves less for those that come later."""
    pytest.importorskip("torch")
    from captured import captured

    planners = [Planner(*captured("siamese")), Planner(*captured("unet")), Planner(*captured("gpt2"))]
    for planner in planners:
        low, high = planner.least.prediction.peak_bytes, planner.everything.prediction.peak_bytes
        for share in (0.1, 0.3, 0.5, 0.8):
            planner.best(int(low + share * (high - low)))
    lowest = least_together(planners)
    found = product(*(sorted({_sizes(plan) for plan in planner.found}) for planner in planners))
    assert peak_together(lowest) == min(map(peak_in_a_row, found))
    assert plan_together(planners, peak_together(lowest)) is not None


def _sizes(plan):
    return plan.prediction.peak_bytes, plan.prediction.saved_bytes
