"""The package as others get it: what imports without torch or numba, and a wheel that works on its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

import elbowroom

ROOT = Path(__file__).parents[1]

# Modules and folders that may; everything else is planning core.
NEED_TORCH = ("api", "capture", "measure", "execute", "session", "demo.models", "demo.training")

HIDE = """
import importlib, pkgutil, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
import elbowroom
"""

IMPORT = """
core = 0
for module in pkgutil.walk_packages(elbowroom.__path__, "elbowroom."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
        core += 1
    except ModuleNotFoundError as missing:
        assert missing.name == "torch", (module.name, missing)
        assert any((module.name + ".").startswith("elbowroom." + name + ".") for name in {need_torch!r}), module.name
assert core > 80
assert not set({hidden!r}) & set(sys.modules)
print(elbowroom.solve(elbowroom.Join((2, 2), 1, 1, 1, (0, 0)), 6).time)
"""

ASK = """
for name in ("fit", "plan", "measure"):
    try:
        getattr(elbowroom, name)
    except elbowroom.ElbowroomError as refusal:
        print(refusal)
try:
    elbowroom.fitt
except AttributeError as refusal:
    print(refusal)
"""


def hiding(hidden: list[str], code: str) -> str:
    script = (HIDE + code).format(hidden=hidden, need_torch=NEED_TORCH)
    return run(sys.executable, "-c", script)


def run(*command: object, **options) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("hidden", [["torch"], ["torch", "numba"], ["torch", "matplotlib"]])
def test_the_planning_core_imports_and_solves_with_these_hidden(hidden):
    assert hiding(hidden, IMPORT).strip() == "9"


def test_what_needs_torch_says_so_in_one_sentence():
    *refusals, unknown = hiding(["torch"], ASK).splitlines()
    needs = "needs PyTorch 2.11 or newer: pip install torch"
    assert refusals == [f"elbowroom.{name} {needs}" for name in ("fit", "plan", "measure")]
    assert unknown == "module 'elbowroom' has no attribute 'fitt'"


def test_another_missing_module_is_not_blamed_on_torch(monkeypatch):
    def import_module(name):
        raise ModuleNotFoundError("No module named 'rich'", name="rich")

    monkeypatch.setattr(elbowroom, "import_module", import_module)
    with pytest.raises(ModuleNotFoundError, match="rich"):
        elbowroom.__getattr__("fit")


def test_the_wheel_works_in_a_clean_environment(tmp_path):
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path / "dist", ROOT)
    (wheel,) = (tmp_path / "dist").glob("elbowroom-*.whl")
    check_metadata(wheel)
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
    refused = subprocess.run(
        [command, "demo"], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "pip install 'elbowroom[torch]'" in refused.stderr


def check_metadata(wheel: Path) -> None:
    """Torch is an extra, the planning core does without it, and torch.compile finds the backend by its name."""
    with ZipFile(wheel) as opened:
        files = {name.rpartition("/")[2]: name for name in opened.namelist() if ".dist-info/" in name}
        metadata = Parser().parsestr(opened.read(files["METADATA"]).decode())
        entry_points = opened.read(files["entry_points.txt"]).decode().splitlines()
    assert "torch" in metadata.get_all("Provides-Extra")
    of_torch = [wanted for wanted in metadata.get_all("Requires-Dist") if wanted.startswith("torch")]
    assert any(wanted.startswith("torch>=2.11") and "extra == 'torch'" in wanted for wanted in of_torch)
    assert all("extra ==" in wanted for wanted in of_torch)
    at = entry_points.index("[torch_dynamo_backends]")
    assert entry_points[at + 1] == "elbowroom = elbowroom.session.compile_backend:elbowroom"
