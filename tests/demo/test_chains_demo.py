"""The demonstration that only plans: two networks, computed from their layer shapes, with every method."""

from __future__ import annotations

import json

import pytest


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
