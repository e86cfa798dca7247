"""The house: folders import downwards only, no imports form a ring, torch stays above the core, files stay short.

All imports count: those inside functions, and those for type checkers alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "elbowroom"

# From the bottom to the top. A folder may import what stands before it, and itself.
FLOORS = (
    "errors", "units", "devices", "progress", "showing", "problem", "schedule", "solve", "step", "plan",
    "capture", "measure", "execute", "session", "api", "pipeline", "integrations",
    "report", "demo", "cli", "__main__",
)  # fmt: skip
FIRST_WITH_TORCH = FLOORS.index("capture")
LONGEST_FILE, LONGEST_FUNCTION = 450, 60


@cache
def imports() -> dict[str, set[str]]:
    """Every module of the package by its dotted name below it, and what it imports: modules of ours, or packages."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found[name] = set(_imported(ast.parse(path.read_text())))
    return found


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            module = node.module or ""
            yield module
            if module.startswith("elbowroom"):
                yield from (f"{module}.{alias.name}" for alias in node.names)


def own(name: str) -> set[str]:
    """What a module imports of the package itself."""
    known = imports()
    ours = {each.removeprefix("elbowroom.") for each in imports()[name] if each.startswith("elbowroom.")}
    return {each for each in ours if each in known} - {name}


def floor(name: str) -> int:
    return FLOORS.index(name.partition(".")[0])


def modules() -> list[str]:
    return [name for name in imports() if name]  # the package itself imports what it exports


@pytest.mark.parametrize("name", modules())
def test_a_module_imports_from_its_own_floor_or_below(name):
    above = {each for each in own(name) if floor(each) > floor(name)}
    assert not above, f"{name} imports from above: {sorted(above)}"


def test_nothing_imports_the_package_as_a_whole_but_the_command_line():
    whole = {name for name in modules() if "elbowroom" in imports()[name]}
    assert {name.partition(".")[0] for name in whole} <= {"cli"}


def test_no_imports_go_round_in_a_ring():
    graph = networkx.DiGraph((name, each) for name in modules() for each in own(name))
    assert not [ring for ring in networkx.strongly_connected_components(graph) if len(ring) > 1]


@pytest.mark.parametrize("name", [name for name in modules() if floor(name) < FIRST_WITH_TORCH])
def test_the_core_knows_nothing_of_torch(name):
    assert not {each for each in imports()[name] if each.partition(".")[0] in ("torch", "numba")} - allowed(name)


def allowed(name: str) -> set[str]:
    """The switch between numba and numpy."""
    return {"numba"} if name == "solve.kernels.compiling" else set()


def test_every_floor_that_is_named_exists_or_is_to_come():
    to_come = {"pipeline", "integrations"}
    there = {name.partition(".")[0] for name in modules()}
    assert there == set(FLOORS) - to_come


def test_no_two_files_of_one_name_mean_different_things():
    """A name may come again in folders that mirror each other: a problem, its referee, its method, its kernel."""
    mirrors = {"problem", "schedule", "solve", "solve.offload", "solve.kernels"}
    folders: dict[str, set[str]] = {}
    for name in modules():
        folder, _, last = name.rpartition(".")
        if folder.rpartition(".")[2] != last:  # the main file of a folder has its name
            folders.setdefault(last, set()).add(folder)
    twice = {last: where for last, where in folders.items() if len(where - mirrors) + bool(where & mirrors) > 1}
    # One type and who makes it; the graph of a problem and of a step; the operations of a schedule and of a program.
    known = {"timeline", "graph", "operations"}
    assert set(twice) <= known, twice


def test_no_two_files_of_tests_have_one_name():
    """pytest knows them by their names alone, and collects the first."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks"])
def test_files_and_functions_can_be_held_in_the_head(folder):
    long_files, long_functions = [], []
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text()
        if text.count("\n") > LONGEST_FILE:
            long_files.append(str(path.relative_to(ROOT)))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    long_functions.append(f"{path.relative_to(ROOT)}: {node.name} has {length} lines")
    assert not long_files
    assert not long_functions
