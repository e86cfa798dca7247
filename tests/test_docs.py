"""What the documents say runs as printed."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "choosing-a-solver.md").read_text()
USING_FIT = (ROOT / "docs" / "using-fit.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [content for kind, content in fenced if kind == language]


CODE = [code for code in blocks(README, "python") if not code.startswith("# train.py")]
(FACTORY,) = [code for code in blocks(README, "python") if code.startswith("# train.py")]
COMMANDS = [line for block in blocks(README, "") for line in block.splitlines() if line.startswith("elbowroom ")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's project: the factory of the README, the examples, and a place of its own for measurements."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "train.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELBOWROOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("train", None)


def run(code: list[str], folder: Path) -> None:
    """Run blocks as one script: each knows what those before it have made."""
    script = folder / "script.py"
    script.write_text("\n".join(code))
    runpy.run_path(str(script), run_name="__main__")


def test_the_quick_start_keeps_its_budget(folder, capsys):
    pytest.importorskip("torch")
    run(CODE[:-1], folder)
    out = capsys.readouterr().out
    assert "runs again" in out
    predicted, measured = map(int, re.search(r"predicted (\d+), measured (\d+) bytes", out).groups())
    assert measured == pytest.approx(predicted, rel=0.01)
    (plain,) = re.search(r"Plainly this step takes ([\d.]+ MiB)", README).groups()
    assert f"plain peak      {plain}" in out


def test_the_ten_lines_of_the_core_run(tmp_path, capsys):
    run(CODE[-1:], tmp_path)
    out = capsys.readouterr().out
    assert out.startswith("18.2 24 auto picked floating")
    assert "['backward', 1]" in out


def test_the_guide_to_fit_runs(folder):
    pytest.importorskip("torch")
    code = blocks(USING_FIT, "python")
    assert len(code) > 5
    run(code, folder)


def test_the_commands_of_the_readme_run(elbowroom, folder):
    pytest.importorskip("torch")
    assert {shlex.split(command)[1] for command in COMMANDS} == {"plan", "explain", "sweep", "verify", "solve"}
    for command in COMMANDS:  # in order: one reads what another has saved
        outcome = elbowroom(*shlex.split(command)[1:])
        saved = "plan: plan.json\n" if "--out" in command else ""
        assert (outcome.status, outcome.err) == (0, saved), command


def test_the_commands_of_the_guide_to_methods_run(elbowroom, folder):
    commands = [line for block in blocks(GUIDE, "") for line in block.splitlines() if line.startswith("elbowroom ")]
    assert commands
    for command in commands:
        outcome = elbowroom(*shlex.split(command)[1:])
        assert (outcome.status, outcome.err) == (0, ""), command


def test_the_figures_of_the_guide_are_what_methods_find():
    """The example within 220 bytes, over three links; and the least budgets of all methods for it."""
    from elbowroom.problem import Platform, problem_from_json
    from elbowroom.solve import METHODS, Options, solve

    text = json.loads((ROOT / "examples" / "offload.json").read_text())
    link = Platform(bandwidth=text.pop("bandwidth"))
    chain = problem_from_json(text)
    everything = solve(chain, None, "store-all")
    assert f"takes {everything.peak_bytes} bytes and {everything.time:.1f} seconds" in GUIDE
    found = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", GUIDE, flags=re.MULTILINE)
    assert len(found) == 3
    for rate, *times in found:
        for name, time in zip(("floating", "offload-best", "combined"), times, strict=True):
            result = solve(chain, 220, name, platform=Platform(bandwidth=float(rate)))
            assert f"{result.time:.1f}" == time, (rate, name)
    least = {
        name: METHODS[name].least_budget(chain, Options(platform=link))
        for name in METHODS
        if "chain" in METHODS[name].kinds
    }
    rows = re.findall(
        r"^\| (.*) \| .* \| (\d+)(?: \(.*\))? \|$", GUIDE.partition("**Least budgets.**")[2], flags=re.MULTILINE
    )
    told = {name: int(bytes_) for names, bytes_ in rows for name in re.findall(r"`([\w-]+)`", names)}
    assert told == {name: least[name] for name in told}
    only = {name for name in METHODS if METHODS[name].needs_link} - set(told)
    assert {least[name] for name in only} == {188}


def test_every_link_leads_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_design_note_is_in_their_list():
    notes = ROOT / "docs" / "design"
    listed = (notes / "README.md").read_text()
    assert [page.name for page in notes.glob("*.md") if page.name != "README.md" and page.name not in listed] == []


def test_every_method_is_in_the_guide():
    from elbowroom.solve import METHODS

    assert [name for name in METHODS if f"`{name}`" not in GUIDE] == []
