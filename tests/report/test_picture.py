"""Memory over a step, drawn with characters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elbowroom.problem import Chain, Platform, Stage
from elbowroom.report.picture import busy, columns, lanes, memory_picture, save_plot
from elbowroom.schedule import Backward, Forward, Offload, Prefetch, TimeLine, simulate
from elbowroom.schedule.timeline import Span

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


# --- lanes ---------------------------------------------------------------------------------------------------

MOVING = simulate(
    CHAIN,
    [Forward(1, "all"), Offload(1, "all"), Forward(2, "all"), Backward(2), Prefetch(1, "all"), Backward(1)],
    platform=Platform(to_host=4, from_host=2),
)
# Four operations of which the third waits, one value on its way out during the second and back during the third.
UNITS = TimeLine.of_levels(
    [1, 3, 2, 4], 0, [Span(1.0, 2.0, 3, 1, "to host", 8), Span(2.0, 3.0, 2, 2, "from host", 8)], {2}
)


def test_a_step_that_moves_nothing_has_no_lanes():
    assert lanes(RUN.timeline) == {}
    assert "to host" not in memory_picture(RUN.timeline)


def test_lanes_show_what_is_done_beside_what():
    rows = memory_picture(UNITS, width=8, height=2).splitlines()
    assert rows[-4:-1] == [
        " computing │████  ██",
        "   to host │  ██    ",
        " from host │    ██  ",
    ]
    assert len({len(row) for row in rows[:-1]}) == 1
    assert memory_picture(UNITS, width=1, height=2).splitlines()[-4:-1] == [
        " computing │▓",
        "   to host │░",
        " from host │░",
    ]


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0.001, 3)), max_size=5), st.integers(1, 30))
def test_lanes_are_as_dark_as_they_are_busy(pieces, width):
    spans, now = [], 0.0
    for gap, length in pieces:
        spans.append(Span(now + gap, now + gap + length, 0, 0))
        now += gap + length
    shares = busy(spans, max(now, 1.0), width)
    assert len(shares) == width
    assert sum(shares) * max(now, 1.0) / width == pytest.approx(sum(length for _, length in pieces))


def test_a_schedule_that_moves_is_drawn_with_lanes_as_an_image_too(tmp_path):
    computing, out, back = lanes(MOVING.timeline).values()
    assert (len(out), len(back)) == (1, 1)
    assert sum(span.end - span.start for span in computing) == MOVING.time - MOVING.stall_time < MOVING.time
    pytest.importorskip("matplotlib")
    panels = {"moves": {"a": (MOVING.timeline, 20)}, "still": {"b": (RUN.timeline, None)}}
    save_plot(panels, tmp_path / "both.png")
    save_plot({"still": panels["still"]}, tmp_path / "still.png")
    assert (tmp_path / "both.png").stat().st_size > (tmp_path / "still.png").stat().st_size > 5_000
