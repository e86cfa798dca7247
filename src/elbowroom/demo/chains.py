"""The demonstration: two networks, every chain method, several budgets; a table and a picture of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from elbowroom.devices import ACCELERATOR
from elbowroom.problem import Chain
from elbowroom.problem.networks import NOTE, gpt, resnet101
from elbowroom.report.picture import print_picture
from elbowroom.schedule.timeline import TimeLine
from elbowroom.solve import Progress, Result, solve
from elbowroom.units import format_bytes, format_seconds

SHARES = (100, 75, 50, 35, 25)
PICTURED = 50  # the share whose time line is drawn
SHOWN = ("store-all", "sequential", "sqrt", "revolve", "least-peak", "persistent", "floating")


@dataclass(frozen=True)
class Demo:
    """One network, its memory when everything is saved, and each method's result at each share of that."""

    title: str
    chain: Chain
    everything: Result
    results: Mapping[tuple[str, int], Result]

    def budget(self, share: int) -> int:
        return self.everything.peak_bytes * share // 100


def run_demo(progress: Progress) -> list[Demo]:
    networks = {
        "ResNet-101, 32 images of 224 × 224, float32": resnet101(),
        "GPT, 24 blocks of width 1024, 8 × 1024 tokens, bfloat16": gpt(),
    }
    demos: list[Demo] = []
    steps = len(networks) * len(SHOWN) * len(SHARES)
    for title, chain in networks.items():
        demo = Demo(title, chain, solve(chain, solver="store-all"), results := {})
        for name in SHOWN:
            for share in SHARES:
                results[name, share] = solve(chain, demo.budget(share), name)
                progress((len(demos) * len(SHOWN) * len(SHARES) + len(results)) / steps)
        demos.append(demo)
    return demos


def show_demo(demos: list[Demo], console: Console) -> None:
    for demo in demos:
        console.print(_table(demo))
        best = demo.results["persistent", PICTURED]
        if best.simulation is not None:
            console.print(f"memory over the step, persistent within {PICTURED} %:", highlight=False)
            print_picture(console, best.simulation.timeline, best.budget)
        console.print()
    console.print(
        f"Each cell: time and peak, relative to saving everything. {NOTE.capitalize()} ({ACCELERATOR.name}); "
        "parameters, gradients and optimizer state are not counted. '–': that method cannot go so low.",
        highlight=False,
    )


def demo_json(demos: list[Demo]) -> dict[str, Any]:
    return {
        "note": NOTE,
        "networks": [
            {
                "name": demo.title,
                "stages": len(demo.chain),
                "store_all": {"time": demo.everything.time, "peak_bytes": demo.everything.peak_bytes},
                "results": [
                    {
                        "solver": name,
                        "budget": demo.budget(share),
                        "feasible": result.feasible,
                        **({"time": result.time, "peak_bytes": result.peak_bytes} if result.feasible else {}),
                        "least_budget": result.least_budget,
                    }
                    for (name, share), result in demo.results.items()
                ],
            }
            for demo in demos
        ],
    }


def demo_panels(demos: list[Demo]) -> dict[str, dict[str, tuple[TimeLine, int | None]]]:
    """Lines for the saved plot: everything saved, and the best schedule at two budgets."""
    panels = {}
    for demo in demos:
        lines: dict[str, tuple[TimeLine, int | None]] = {}
        if demo.everything.simulation is not None:
            lines["store-all"] = (demo.everything.simulation.timeline, None)
        for share in (PICTURED, 35):
            result = demo.results["persistent", share]
            if result.simulation is not None:
                lines[f"persistent within {share} %"] = (result.simulation.timeline, demo.budget(share))
        panels[demo.title] = lines
    return panels


def _table(demo: Demo) -> Table:
    everything = demo.everything
    title = (
        f"{demo.title}: {len(demo.chain)} stages, {format_bytes(everything.peak_bytes)} and "
        f"{format_seconds(everything.time)} a step when everything is saved"
    )
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("within")
    for share in SHARES:
        table.add_column(f"{share} %\n{format_bytes(demo.budget(share))}", justify="right")
    table.add_column("least\nbudget", justify="right")
    for name in SHOWN:
        cells = [_cell(demo.results[name, share], everything) for share in SHARES]
        least = demo.results[name, SHARES[0]].least_budget
        table.add_row(name, *cells, "" if least is None else format_bytes(least))
    return table


def _cell(result: Result, everything: Result) -> str:
    if not result.feasible:
        return "–"
    return f"{result.time / everything.time:.3f} {result.peak_bytes / everything.peak_bytes:4.0%}"
