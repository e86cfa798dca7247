"""Memory over a step, drawn with characters."""

from __future__ import annotations

from elbowroom.problem import Chain, Stage
from elbowroom.report.picture import columns, memory_picture
from elbowroom.schedule import Backward, Forward, simulate

CHAIN = Chain(1, 1, (Stage("a", 3, 0, 2, 4, 2), Stage("b", 1, 2, 1, 8, 1)))
RUN = simulate(CHAIN, [Forward(1, "all"), Forward(2, "all"), Backward(2), Backward(1)])


def test_columns_follow_time():
    assert columns(RUN.timeline.spans, 6) == [6, 6, 6, 14, 16, 16]


def test_columns_of_a_step_without_time():
    still = Chain(1, 1, (Stage("a", 0, 0, 2, 4, 2),))
    assert columns(simulate(still, [Forward(1, "all"), Backward(1)]).timeline.spans, 4) == [7, 7, 8, 8]


def test_the_picture_shows_the_peak():
    picture = memory_picture(RUN.timeline, budget=32, width=12, height=4)
    lines = picture.splitlines()
    assert len(lines) == 6
    assert "█" not in lines[0]  # the budget is twice the peak, so the upper half stays empty
    assert "█" in lines[2]
    assert "peak 16 B of 32 B" in lines[-1]
