"""The benchmark scripts run; what they measure is for people to look at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SOLVERS = Path(__file__).parents[1] / "benchmarks" / "solvers.py"


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
