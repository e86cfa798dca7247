"""What the documents say runs as printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [content for kind, content in fenced if kind == language]


def test_the_ten_lines_of_the_readme_run(capsys):
    (code,) = blocks(README, "python")
    exec(compile(code, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert out.startswith("18.2 24 auto picked floating")
    assert "['backward', 1]" in out


COMMANDS = [line for block in blocks(README, "") for line in block.splitlines() if line.startswith("elbowroom ")]


def test_there_are_commands():
    assert len(COMMANDS) >= 4


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_readme_run(elbowroom, monkeypatch, command):
    monkeypatch.chdir(ROOT)
    outcome = elbowroom(*shlex.split(command)[1:])
    assert (outcome.status, outcome.err) == (0, "")


def test_every_link_leads_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_method_is_in_the_guide():
    from elbowroom.solve import METHODS

    guide = (ROOT / "docs" / "choosing-a-solver.md").read_text()
    assert [name for name in METHODS if f"`{name}`" not in guide] == []
