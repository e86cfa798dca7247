"""A failing case made smaller while it fails in the same way, and written down as a script that runs on its own."""

from __future__ import annotations

import ast
import inspect
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from pprint import pformat
from types import ModuleType
from typing import Any

from campaign.cases import Case
from campaign.models import IMPORTS, Block, source
from campaign.working import Result, Worker


def shrink(case: Case, result: Result, worker: Worker, patience_s: float = 90.0) -> tuple[Case, Result]:
    """The smallest case found that fails in the same way."""
    end = time.perf_counter() + patience_s
    again = True
    while again:
        again = False
        for smaller in simpler(case):
            if time.perf_counter() > end:
                return case, result
            found = worker.judge(smaller)
            if found.kind == result.kind:
                case, result, again = smaller, found, True
                break
    return case, result


def simpler(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the largest things first."""
    recipe = case.recipe
    if len(case.events) > 1:
        for i in range(len(case.events)):
            yield replace(case, events=case.events[:i] + case.events[i + 1 :])
    if len(recipe.blocks) > 3:
        half = len(recipe.blocks) // 2
        yield replace(case, recipe=replace(recipe, blocks=recipe.blocks[:half]))
        yield replace(case, recipe=replace(recipe, blocks=recipe.blocks[half:]))
    if case.events:
        yield replace(case, events=())
    for i in range(len(recipe.blocks)):
        yield replace(case, recipe=replace(recipe, blocks=recipe.blocks[:i] + recipe.blocks[i + 1 :]))
    changes: dict[str, Any] = {"output": "tensor", "loss": "mean square", "width": 8, "length": 8, "classes": 4}
    flat = tuple(Block(block.feature) for block in recipe.blocks)
    for name, value in {"blocks": flat, **changes}.items():
        if getattr(recipe, name) != value:
            yield replace(case, recipe=replace(recipe, **{name: value}))
    changes = {"loss_inside": False, "optimizer": "", "strict": False, "batch": 8, "checks": 2}
    for name, value in changes.items():
        if getattr(case, name) != value:
            yield replace(case, **{name: value})


def write_script(case: Case, result: Result, folder: Path) -> Path:
    """`repro_<seed>.py`: the model, the case, and only those functions of the campaign that it needs."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"repro_{case.seed}.py"
    path.write_text(script(case, result))
    return path


def script(case: Case, result: Result) -> str:
    happens = ", then ".join(name.replace("_", " ") for name in case.events) or "nothing"
    after = f"What happens after fit: {happens}.\nPrints what is wrong and exits with status 1."
    head = f'"""{result}\n\n{after}\n"""\n'
    fields = pformat(vars(case.trial), sort_dicts=False, width=100)
    main = f"""
TRIAL = Trial(**{fields})

if __name__ == "__main__":
    torch.set_num_threads(1)
    verdict = judge(TRIAL, sys.modules[__name__], [{", ".join(case.events)}])
    for failure in verdict.failures:
        print(failure)
    print("nothing is wrong" if not verdict.failures else "")
    sys.exit(bool(verdict.failures))
"""
    model = source(case.recipe).replace(IMPORTS, "")
    imports, needed = _needed({"judge", "Trial", "torch", "sys", *case.events}, _names(model))
    title = "# --- the model "
    parts = [head, "from __future__ import annotations\n", "import sys", *sorted(imports)]
    parts += ["\n\n" + title.ljust(100, "-"), model, "# --- how it is judged ".ljust(100, "-"), *needed, main]
    return "\n".join(parts)


def _modules() -> list[ModuleType]:
    from campaign import bystander, changes, comparing, events, judging, metering, pair

    return [comparing, metering, pair, bystander, judging, changes, events]


def _needed(wanted: set[str], by_model: set[str]) -> tuple[set[str], list[str]]:
    """The imports and the text of all definitions that the wanted names reach, in an order in which they run."""
    imports: dict[str, str] = {}
    definitions: dict[str, tuple[str, set[str]]] = {}
    for line in IMPORTS.splitlines():
        if line:
            for alias in ast.parse(line).body[0].names:  # type: ignore[attr-defined]
                imports[(alias.asname or alias.name).partition(".")[0] + (alias.name.count(".") * "!")] = line
    for module in _modules():
        text = inspect.getsource(module)
        for node in ast.parse(text).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                _note_imports(node, imports)
                continue
            for name in _defined(node):
                definitions[name] = (_text_of(node, text), _names(ast.unparse(node)))
    reached: set[str] = set()
    ahead = [*wanted, *by_model]
    while ahead:
        name = ahead.pop()
        if name not in reached:
            reached.add(name)
            ahead += definitions.get(name, ("", set()))[1]
    own = [text for name, (text, _) in definitions.items() if name in reached and name != "EVENTS"]
    lines = {line for name, line in imports.items() if name.rstrip("!") in reached}
    return lines, list(dict.fromkeys(own))


def _note_imports(node: ast.Import | ast.ImportFrom, imports: dict[str, str]) -> None:
    module = getattr(node, "module", None) or ""
    if module.partition(".")[0] in ("campaign", "__future__"):
        return
    for alias in node.names:
        line = f"from {module} import " if isinstance(node, ast.ImportFrom) else "import "
        imports[alias.asname or alias.name] = line + alias.name + (f" as {alias.asname}" if alias.asname else "")


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    return []


def _text_of(node: ast.stmt, text: str) -> str:
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
    lines = text.splitlines()[first - 1 : node.end_lineno]
    return "\n".join(lines) + ("\n\n" if isinstance(node, ast.FunctionDef | ast.ClassDef) else "")


def _names(text: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
