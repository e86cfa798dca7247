"""A plan for people: what the step takes, what happens to each module of the model, and memory over the step.

Modules that differ only in an index of their path (`transformer.h.0`, `transformer.h.1`) and of which the plan says
the same become one row. Deep submodules are gathered into their parents until the table is short enough to read.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from rich.console import Console
from rich.table import Table

from elbowroom.plan.plan import Plan
from elbowroom.plan.words import copying_in_words, link_in_words, method_in_words, reason_in_words, sizes_in_words
from elbowroom.report.picture import memory_picture
from elbowroom.report.tables import exactly, facts_table
from elbowroom.units import format_bytes, format_seconds

MOST_ROWS = 40
WIDTH = 118  # of tables that are not printed on a terminal
_ALIKE = 0.2  # by how much the times of modules in one row may differ

Part: TypeAlias = str | tuple[int, ...]  # of a module's path: a name, or the indices that a row stands for


@dataclass(frozen=True)
class Row:
    """One or several modules alike; the figures are of all of them together.

    `itself`: only what the module does outside its submodules, which have rows of their own.
    """

    path: tuple[Part, ...]
    itself: bool
    count: int
    saved_bytes: int
    reruns: int  # most often that one of the operators runs again
    forward_time_s: float
    rerun_time_s: float
    moved_bytes: int

    @property
    def label(self) -> str:
        name = ".".join(part if isinstance(part, str) else _ranges(part) for part in self.path) or "(the model)"
        return f"{name} itself" if self.itself and self.path else name


def plan_text(plan: Plan, depth: int | None = None, width: int = WIDTH) -> str:
    """Header and table as plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    print_plan(console, plan, depth)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def print_plan(console: Console, plan: Plan, depth: int | None = None) -> None:
    console.print(plan_facts(plan))
    console.print()
    console.print(plan_table(plan, depth))


def plan_facts(plan: Plan) -> Table:
    """Budget, prediction and what fills it, one fact per row."""
    table = facts_table()
    there = {name: size for name, size in plan.resident.items() if not (plan.late_gradients and name == "gradients")}
    resident = sizes_in_words([(name, size) for name, size in there.items() if size])
    gradients = f", gradients of {format_bytes(plan.resident['gradients'])} included" if plan.late_gradients else ""
    device = plan.setting.get("name", plan.setting.get("device", "an unknown device"))
    share = f", {plan.peak_bytes / plan.budget_bytes:.0%} of the budget" if plan.budget_bytes else ""
    table.add_row("budget", exactly(plan.budget_bytes))
    table.add_row("predicted peak", f"{exactly(plan.peak_bytes)}{share}")
    table.add_row("  all the time", f"{format_bytes(plan.start_bytes)}: {resident or 'nothing'}")
    table.add_row("  for the step", f"{format_bytes(plan.peak_bytes - plan.start_bytes)}{gradients}")
    table.add_row("plain peak", f"{exactly(plan.plain_peak_bytes)}, without a plan: everything saved")
    table.add_row("extra time", f"{plan.extra_time:.1%} ({_times(plan)})")
    if plan.traffic:
        _add_moves(table, plan)
    _add_reasons(table, plan)
    if len(plan.regions) > 1:
        table.add_row("graphs", f"the model runs as {len(plan.regions)}, planned together")
    table.add_row("made for", f"{plan.inputs or 'no tensors'} on {device}")
    for note in plan.notes:
        table.add_row("note", note)
    return table


def _add_moves(table: Table, plan: Plan) -> None:
    """What goes to the host and back, what it takes there, and how much of the copying costs time."""
    out, back = plan.moved_bytes("to host"), plan.moved_bytes("from host")
    count = sum(len(traffic.values) for traffic in plan.traffic)
    moved = f"{format_bytes(out)} to the host{'' if out == back else f', {format_bytes(back)}'} and back"
    limit = plan.host_budget_bytes
    table.add_row("moved", f"{moved}, {count} tensor{'' if count == 1 else 's'}")
    table.add_row("on the host", exactly(plan.host_bytes) + ("" if limit is None else f" of {exactly(limit)}"))
    table.add_row("copying", copying_in_words(plan.copying_s, plan.waits_s))
    if plan.platform is not None:
        table.add_row("link", link_in_words(plan.platform))


def _add_reasons(table: Table, plan: Plan) -> None:
    """What the network looks like, how it was planned and why so; of several graphs, what differs."""
    structures = [f"{s.kind}: {s.why}" for region in plan.regions if (s := region.structure) is not None]
    methods = [method_in_words(region.method) for region in plan.regions]
    reasons = [reason_in_words(region.why) for region in plan.regions if region.why]
    for name, said in (("structure", structures), ("method", methods), ("why", reasons)):
        if said:
            table.add_row(name, "; ".join(dict.fromkeys(said)))


def plan_table(plan: Plan, depth: int | None = None) -> Table:
    """What is saved, what moves and what runs again, module by module; the last row is the plan's total."""
    rows = module_rows(plan, depth)
    titles = ["", "saved", *(["moved"] if plan.traffic else []), "runs again", "forward", "recomputation"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("module", overflow="fold")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)

    def add(label: str, cells: dict[str, str], style: str | None = None) -> None:
        table.add_row(label, *(cells[title] for title in titles), style=style)

    for row in rows:
        add(row.label, _cells(row))
    nothing = dict.fromkeys(titles, "–")
    if unnamed := unnamed_bytes(plan):
        add("outputs, random states, copies of buffers", nothing | {"": "", "saved": format_bytes(unnamed)})
    table.add_section()
    total = {
        "": "",
        "saved": format_bytes(sum(row.saved_bytes for row in rows) + unnamed_bytes(plan)),
        "moved": format_bytes(plan.moved_bytes("to host")),
        "runs again": "",
        "forward": format_seconds(sum(row.forward_time_s for row in rows)),
        "recomputation": format_seconds(sum(row.rerun_time_s for row in rows)),
    }
    add("total", total, style="bold")
    return table


def _cells(row: Row) -> dict[str, str]:
    return {
        "": f"×{row.count}" if row.count > 1 else "",
        "saved": format_bytes(row.saved_bytes) if row.saved_bytes else "–",
        "moved": format_bytes(row.moved_bytes) if row.moved_bytes else "–",
        "runs again": f"{row.reruns}×" if row.reruns else "–",
        "forward": format_seconds(row.forward_time_s) if row.forward_time_s else "–",
        "recomputation": format_seconds(row.rerun_time_s) if row.rerun_time_s else "–",
    }


def unnamed_bytes(plan: Plan) -> int:
    """What lies between forward and backward without being a module's: outputs, generator states, buffers' copies."""
    saved = sum(region.saved_bytes for region in plan.regions)
    return saved - sum(module.saved_bytes for region in plan.regions for module in region.modules)


# --- rows ----------------------------------------------------------------------------------------------------


def module_rows(plan: Plan, depth: int | None = None) -> list[Row]:
    """Rows of modules at most `depth` names deep; as deep as fits into a readable table if it is not given."""
    rows = _rows(plan)
    if depth is not None:
        return _folded(_gathered(rows, max(1, depth)))
    deepest = max((len(row.path) for row in rows), default=1)
    for level in range(max(1, deepest), 0, -1):  # a model without submodules has the empty path
        folded = _folded(_gathered(rows, level))
        if len(folded) <= MOST_ROWS:
            break
    return folded


def _rows(plan: Plan) -> list[Row]:
    """One row per module that has operators, in the order of the forward; a module of several graphs is one."""
    modules = [module for region in plan.regions for module in region.modules]
    rows = [
        Row(
            _path(module.module),
            False,
            1,
            module.saved_bytes,
            module.reruns,
            module.forward_time_s,
            module.rerun_time_s,
            module.moved_bytes,
        )
        for module in modules
    ]
    return _merged_by_path(rows)


def _path(module: str) -> tuple[Part, ...]:
    """Parts of a path, without the first, which is the traced step's own name for the model."""
    first, *rest = module.split(".")
    parts = rest if first == "model" else [first, *rest]
    return tuple((int(part),) if part.isdecimal() else part for part in parts if part)


def _gathered(rows: Iterable[Row], depth: int) -> list[Row]:
    """Rows cut to `depth` parts, what falls together added up."""
    gathered = _merged_by_path([replace(row, path=row.path[:depth]) for row in rows])
    parents = {row.path[:n] for row in gathered for n in range(len(row.path))}
    return [replace(row, itself=row.path in parents) for row in gathered]


def _merged_by_path(rows: Iterable[Row]) -> list[Row]:
    merged: dict[tuple[Part, ...], Row] = {}
    for row in rows:
        merged[row.path] = _sum(merged[row.path], row, row.path, 1) if row.path in merged else row
    return list(merged.values())


def _folded(rows: list[Row]) -> list[Row]:
    """Repeats into one row, outer indices first."""
    for position in range(max((len(row.path) for row in rows), default=0)):
        rows = _folded_at(rows, position)
    return rows


def _folded_at(rows: Sequence[Row], position: int) -> list[Row]:
    kept: list[Row] = []
    places: dict[object, list[int]] = {}  # everything that must be equal → rows that have it
    for row in rows:
        if len(row.path) <= position or isinstance(row.path[position], str):
            kept.append(row)
            continue
        around = (row.path[:position], row.path[position + 1 :])
        figures = row.count, row.saved_bytes, row.reruns, row.moved_bytes
        alike = places.setdefault((around, row.itself, figures), [])
        place = next((place for place in alike if _times_alike(kept[place], row)), None)
        if place is None:
            alike.append(len(kept))
            kept.append(row)
        else:
            kept[place] = _joined(kept[place], row, position)
    return kept


def _times_alike(a: Row, b: Row) -> bool:
    pairs = ((a.forward_time_s, b.forward_time_s), (a.rerun_time_s, b.rerun_time_s))
    each = [(x / a.count, y / b.count) for x, y in pairs]
    return all(abs(x - y) <= _ALIKE * max(x, y) for x, y in each)


def _joined(a: Row, b: Row, position: int) -> Row:
    indices = tuple(sorted({*a.path[position], *b.path[position]}))  # type: ignore[arg-type]
    return _sum(a, b, (*a.path[:position], indices, *a.path[position + 1 :]), a.count + b.count)  # type: ignore[arg-type]


def _sum(a: Row, b: Row, path: tuple[Part, ...], count: int) -> Row:
    return Row(
        path,
        a.itself,
        count,
        a.saved_bytes + b.saved_bytes,
        max(a.reruns, b.reruns),
        a.forward_time_s + b.forward_time_s,
        a.rerun_time_s + b.rerun_time_s,
        a.moved_bytes + b.moved_bytes,
    )


# --- memory over the step ------------------------------------------------------------------------------------


def plan_picture(plan: Plan, width: int = 72, height: int = 8) -> str:
    """Memory over the step as predicted, with everything resident in it; all operators are drawn equally wide."""
    return memory_picture(plan.timeline, budget=plan.budget_bytes, width=width, height=height)


# --- words ---------------------------------------------------------------------------------------------------


def _times(plan: Plan) -> str:
    modules = [module for region in plan.regions for module in region.modules]
    forward, again = sum(m.forward_time_s for m in modules), sum(m.rerun_time_s for m in modules)
    backward = max(0.0, plan.time_s - forward - again - plan.waits_s)
    parts = f"forward {format_seconds(forward)}, backward {format_seconds(backward)}"
    parts += f", recomputation {format_seconds(again)}" if again else ", nothing runs again"
    return f"{parts}, waiting for the link {format_seconds(plan.waits_s)}" if plan.waits_s else parts


def _ranges(indices: Sequence[int]) -> str:
    """`(0, 1, 2, 5)` → `0–2,5`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
