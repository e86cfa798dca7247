"""What people see."""

from __future__ import annotations

import json

import pytest

from elbowroom.problem import Chain, Stage
from elbowroom.report.picture import columns, memory_picture
from elbowroom.schedule import Backward, Forward, simulate

CHAIN = Chain(1, 1, (Stage("a", 3, 0, 2, 4, 2), Stage("b", 1, 2, 1, 8, 1)))
RUN = simulate(CHAIN, [Forward(1, "all"), Forward(2, "all"), Backward(2), Backward(1)])


def test_columns_follow_time():
    assert columns(RUN.spans, 6) == [6, 6, 6, 14, 16, 16]


def test_columns_of_a_step_without_time():
    still = Chain(1, 1, (Stage("a", 0, 0, 2, 4, 2),))
    assert columns(simulate(still, [Forward(1, "all"), Backward(1)]).spans, 4) == [7, 7, 8, 8]


def test_the_picture_shows_the_peak():
    picture = memory_picture(RUN, budget=32, width=12, height=4)
    lines = picture.splitlines()
    assert len(lines) == 6
    assert "█" not in lines[0]  # the budget is twice the peak, so the upper half stays empty
    assert "█" in lines[2]
    assert "peak 16 B of 32 B" in lines[-1]


def test_demo_for_machines(elbowroom, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "memory.png"
    status, out, _ = elbowroom("demo", "--chains", "--json", "--plot", plot)
    answer = json.loads(out)
    assert status == 0
    assert plot.stat().st_size > 10_000
    assert "not measurements" in answer["note"]
    for network in answer["networks"]:
        times: dict[str, list[float]] = {}
        for result in network["results"]:
            if result["feasible"]:
                assert result["peak_bytes"] <= result["budget"]
                times.setdefault(result["solver"], []).append(result["time"])
        assert times["persistent"] == sorted(times["persistent"])
        assert times["persistent"][0] <= network["store_all"]["time"]
        for name in ("sequential", "revolve", "sqrt"):
            assert all(
                ours <= other * (1 + 1e-9) for ours, other in zip(times["persistent"], times[name], strict=False)
            )


def test_demo_for_people(elbowroom):
    out = elbowroom("demo", "--chains").out
    for word in ("ResNet-101", "GPT", "persistent", "not measurements", "█"):
        assert word in out.replace("\n", " ")
