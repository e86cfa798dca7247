"""The commands that take a model, with values that move to the host and back."""

from __future__ import annotations

import json
import sys

import pytest

torch = pytest.importorskip("torch")

FACTORY = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy


def build():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(32, 5)), (torch.randn(256, 32), torch.randint(5, (256,))), cross_entropy
"""
BUILD = "moving_here:build"
MOVING = ("--times", "estimate", "--offload", "always", "--link", "50MB/s", "--host-budget", "8MiB")


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    (tmp_path / "moving_here.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELBOWROOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("moving_here", None)


@pytest.fixture
def budget(elbowroom):
    """Two thirds of what the step takes plainly."""
    plain = json.loads(elbowroom("plan", BUILD, "--budget", "1GiB", *MOVING, "--json").out)
    assert (plain["moved_bytes"], plain["host_bytes"]) == (0, 0)
    resident = sum(plain["resident"].values())
    return resident + (plain["peak_bytes"] - resident) * 2 // 3


def test_a_plan_says_what_moves_and_so_does_its_file(elbowroom, budget, project):
    pytest.importorskip("matplotlib")
    asked = ("--budget", budget, *MOVING)
    status, out, err = elbowroom("plan", BUILD, *asked, "--out", "plan.json")
    assert (status, err) == (0, "plan: plan.json\n")
    for word in ("moved", "on the host", "of 8 MiB (8388608)", "copying", "50 MB/s to the host, 50 MB/s back"):
        assert word in out
    status, explained, err = elbowroom("explain", "plan.json", "--plot", "memory.png")
    assert (status, err) == (0, "picture: memory.png\n")
    assert explained.startswith(out)
    for lane in (" computing │", "   to host │", " from host │"):
        assert lane in explained
    assert (project / "memory.png").stat().st_size > 5_000
    answer = json.loads(elbowroom("explain", BUILD, *asked, "--json", "--source").out)
    assert answer["link"]["to_host"] == answer["link"]["from_host"] == 50e6
    assert 0 < answer["moved_bytes"] == answer["host_bytes"] <= answer["host_budget_bytes"] == 8 * 2**20
    assert answer["copying_s"] >= answer["waits_s"] >= 0
    assert answer["regions"][0]["traffic"]["values"]
    assert "offload" in answer["source"][0]


def test_a_sweep_says_what_moves(elbowroom):
    pytest.importorskip("matplotlib")
    status, out, _ = elbowroom("sweep", BUILD, "--points", 4, *MOVING, "--json")
    points = json.loads(out)["points"]
    assert status == 0
    assert any(point["moved_bytes"] for point in points)
    assert all(point["moved_bytes"] == point["host_bytes"] for point in points)
    assert points[-1]["moved_bytes"] == 0
    still = json.loads(elbowroom("sweep", BUILD, "--points", 4, *MOVING[:2], "--json").out)
    assert json.loads(out)["least_budget"] <= still["least_budget"]
    assert "moved" in elbowroom("sweep", BUILD, "--points", 4, *MOVING).out.splitlines()[1]
    assert "moved" not in elbowroom("sweep", BUILD, "--points", 4, *MOVING[:2]).out


def test_a_verification_counts_what_is_on_the_host(elbowroom, budget):
    status, out, err = elbowroom("verify", BUILD, "--budget", budget, *MOVING, "--json")
    answer = json.loads(out)
    assert (status, err) == (0, "")
    assert answer["identical"]
    assert answer["within_budget"]
    assert answer["host_as_planned"]
    assert 0 < answer["measured_host_bytes"] == answer["predicted_host_bytes"] <= answer["host_budget"] == 8 * 2**20
    status, out, _ = elbowroom("verify", BUILD, "--budget", budget, *MOVING)
    assert status == 0
    for word in ("identical to eager", "planned on the host", "measured there", "of 8 MiB (8388608)"):
        assert word in out
    assert out.rstrip().endswith("within budget")


def test_a_verification_fails_if_more_is_on_the_host_than_planned(elbowroom, budget, monkeypatch):
    from elbowroom.session import checking

    measured = checking.measured_step

    def more(*arguments):
        taken = measured(*arguments)
        return taken._replace(host_bytes=taken.host_bytes + 1024)

    monkeypatch.setattr(checking, "measured_step", more)
    status, out, _ = elbowroom("verify", BUILD, "--budget", budget, *MOVING)
    assert status == 1
    assert "within budget, and on the host 1 KiB more than planned" in " ".join(out.split())
    status, out, _ = elbowroom("verify", BUILD, "--budget", budget, *MOVING, "--json")
    assert (status, json.loads(out)["host_as_planned"]) == (1, False)


def test_a_host_budget_binds(elbowroom, budget):
    """With nothing on the host nothing moves, and the step still fits by computing again."""
    asked = ("--budget", budget, "--times", "estimate", "--offload", "always", "--link", "50MB/s", "--host-budget", 0)
    answer = json.loads(elbowroom("plan", BUILD, *asked, "--json").out)
    assert (answer["feasible"], answer["moved_bytes"], answer["host_budget_bytes"]) == (True, 0, 0)
