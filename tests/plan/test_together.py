"""Graphs that run one after another: planned together, each within its share of the memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest

from elbowroom.plan.planner import Planner
from elbowroom.plan.together import least_together, peak_together, plan_together
from elbowroom.problem import Platform
from elbowroom.step.referee import Surroundings
from stepgraphs import Step, graph_of


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


@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
def test_values_of_graphs_in_a_row_move(share):
    """What stays between them keeps less room for each than it has alone."""
    graph = graph_of([Step("plain", (1,), (8, 1), 4, 8, 0, True, False, False, False, True, False)] * 12)
    planner = Planner(graph, Surroundings(), platform=Platform(bandwidth=16.0))
    room = int(share * peak_together([planner.everything] * 2))
    still, moving = (plan_together([planner] * 2, room, moves=moves) for moves in (False, True))
    assert not any(plan.program.moves for plan in still)
    assert all(plan.program.moves for plan in moving)
    assert peak_together(moving) <= room
    assert sum(plan.time_s for plan in moving) < sum(plan.time_s for plan in still)


class Found:
    """A planner that has found programs of these times, peaks and saved bytes, that of the lowest peak first."""

    def __init__(self, *programs):
        self.made = [SimpleNamespace(time_s=time, prediction=Sizes(*sizes)) for time, *sizes in programs]
        self.least = self.made[0]


class Sizes(NamedTuple):
    peak_bytes: int
    saved_bytes: int


@pytest.mark.parametrize(
    ("programs", "taken"),
    [
        ([(1.0, 10, 5), (2.0, 10, 2)], 11),  # as low, faster, and saves more: what a search for a budget finds
        ([(1.0, 10, 5), (2.0, 11, 2)], 11),
        ([(1.0, 10, 1), (2.0, 11, 0)], 10),
    ],
)
def test_the_least_row_is_not_of_the_lowest_peaks(programs, taken):
    first, last = Found(*programs), Found((1.0, 9, 0))
    assert peak_together(least_together([first, last])) == taken


def test_a_graph_that_comes_twice_has_one_program_in_the_least_row():
    first, other = Found((1.0, 10, 5), (2.0, 11, 2)), Found((1.0, 9, 0))
    plans = least_together([first, other, first, other])
    assert plans[0] is plans[2]
    assert peak_together(plans) == 13
