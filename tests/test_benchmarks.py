"""The benchmark scripts run; what they measure is for people to look at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SOLVERS = BENCHMARKS / "solvers.py"


def test_the_solver_benchmark_runs(tmp_path):
    plot, numbers = tmp_path / "solvers.png", tmp_path / "solvers.json"
    command = [sys.executable, SOLVERS, "--quick", "--method", "sqrt", "--method", "join"]
    done = subprocess.run([*command, "--plot", plot, "--json", numbers], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads(numbers.read_text())["measurements"]
    assert {m["point"]["method"] for m in measured} == {"sqrt", "join"}
    assert all(m["seconds"] > 0 for m in measured)
    assert plot.stat().st_size > 10_000
    assert "Again: python" in done.stdout


@pytest.mark.parametrize(
    ("script", "options", "says"),
    [
        ("joins.py", ["--figure", "9"], "4.67 at 41 (2464 against 528)"),
        ("checkpoint_selection.py", ["--table", "2", "--networks", "VGG-19", "--batches", "128"], "4,777.5"),
        ("lower_sets.py", ["--networks", "VGG19", "U-Net"], "VGG19: 4.79 GB, 44% below plain"),
    ],
)
def test_the_papers_figures_can_be_made_again(script, options, says, tmp_path):
    if script == "lower_sets.py":
        pytest.importorskip("torch")
    numbers = tmp_path / "numbers.json"
    command = [sys.executable, BENCHMARKS / "papers" / script, *options, "--json", numbers]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert says in done.stdout
    assert json.loads(numbers.read_text())
