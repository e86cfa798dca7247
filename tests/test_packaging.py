"""The package as others get it: imports without torch or numba, and a wheel that works in a clean environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HIDE = """
import importlib, pkgutil, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden!r}:
            raise ImportError(name + " is hidden")

sys.meta_path.insert(0, Hidden())
import elbowroom
for module in pkgutil.walk_packages(elbowroom.__path__, "elbowroom."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert not set({hidden!r}) & set(sys.modules)
print(elbowroom.solve(elbowroom.Join((2, 2), 1, 1, 1, (0, 0)), 6).time)
"""


@pytest.mark.parametrize("hidden", [["torch"], ["torch", "numba"], ["torch", "matplotlib"]])
def test_everything_imports_with_these_hidden(hidden):
    """So far the whole package is planning core; the executors will be the exception."""
    done = subprocess.run(
        [sys.executable, "-c", HIDE.format(hidden=hidden)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "9"


def run(*command: object, **options) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_works_in_a_clean_environment(tmp_path):
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path / "dist", ROOT)
    (wheel,) = (tmp_path / "dist").glob("elbowroom-*.whl")
    venv.create(tmp_path / "clean", with_pip=True)
    python = tmp_path / "clean" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = tmp_path / "clean" / "bin" / "elbowroom"
    names = [m["name"] for m in json.loads(run(command, "solve", "--list", "--json", env=environment, cwd=tmp_path))]
    assert "floating" in names
    problem = ROOT / "examples" / "chain.json"
    answer = json.loads(run(command, "solve", problem, "--budget", 28, "--json", env=environment, cwd=tmp_path))
    assert answer["feasible"] is True
    where = run(python, "-c", "import elbowroom; print(elbowroom.__file__)", env=environment, cwd=tmp_path)
    assert str(tmp_path) in where
    assert "py.typed" in {path.name for path in Path(where.strip()).parent.iterdir()}
