"""What moving values to the host would gain, planned without a GPU: with no link, and with links of some rates.

    python benchmarks/planned_moves.py [--models unet …] [--kernels inductor] [--shares 0.5 0.35] [--json FILE]
    python benchmarks/planned_moves.py --tiny

Models are traced and their times estimated as in `planned.py`. The links are those of an H200, which carries 55 GB/s
in each direction and 51 while the other is busy, and one whose directions take turns at 12.2 GB/s. Nothing that runs
programs can move values yet, so this is what the time line says, on a host with memory without end.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cases import GRAPH_MODELS, MODELS, TINY_GRAPH_MODELS, TINY_MODELS, Case
from planned import KERNELS, estimated, percent, traced
from row_tables import show
from rows import check_models

from elbowroom.capture.traced_values import tensor_bytes
from elbowroom.plan.planner import Planner
from elbowroom.plan.values.least import Least
from elbowroom.plan.values.move_search import MoveSearch
from elbowroom.problem import Platform
from elbowroom.session.planning import surroundings
from elbowroom.units import format_bytes

LINKS = {
    "55 GB/s each way": Platform(to_host=55e9, from_host=55e9, duplex=51e9),
    "12.2 GB/s, in turns": Platform(bandwidth=12.2e9),
}
HEADINGS = "model", "kernels, share", "link", "without", "least", "with moves", "least", "waits", "on the host", "s"


@dataclass(frozen=True)
class Row:
    """The extra time of plans and the least possible, as shares of the time with everything saved, without a link and
    with one; what of it is waiting, and what lies on the host. None where nothing fits."""

    model: str
    kernels: str
    share: float
    link: str
    without: float | None
    without_least: float
    moving: float | None
    moving_least: float
    waits: float
    host_bytes: int
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS, help="only these")
    parser.add_argument(
        "--shares", nargs="+", type=float, default=[0.5, 0.35], help="of the peak with everything saved"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all rows here")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script")
    options = parser.parse_args()
    known = {**TINY_MODELS, **TINY_GRAPH_MODELS} if options.tiny else {**MODELS, **GRAPH_MODELS}
    check_models(parser, options.models or list(known), known)
    rows: list[Row] = []
    for name in options.models or known:
        for kernels in options.kernels:
            try:
                rows += planned(name, known[name], kernels, options.shares)
            except ModuleNotFoundError as missing:
                print(f"{name} is left out: {missing.name} is not installed", file=sys.stderr, flush=True)
    show([cells(row) for row in rows], HEADINGS)
    print("Extra time over saving everything, as predicted within a share of its peak; –: does not fit.")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return int(not rows)


def planned(name: str, make: Callable[[], Case], kernels: str, shares: list[float]) -> Iterator[Row]:
    """One row for each share and link. The search for moves begins where the planner's does."""
    step = estimated(traced(make(), fused=kernels == "inductor"))
    graph = step.captured.graph
    late = {i: tensor_bytes(step.captured.nodes[i]) for i in graph.parameters}
    around = replace(surroundings(step, loss_inside=True, late={}), late=late)
    planner = Planner(graph, around)
    plain = planner.everything.prediction
    for share in shares:
        room = int(share * plain.peak_bytes)
        best = planner.best(room)
        for link, platform in LINKS.items():
            started = time.perf_counter()
            least_s = Least(graph, around, platform).seconds(room)
            starts = [planner.everything.predicted, (best or planner.least).predicted]
            programs = MoveSearch(graph, around, platform).programs(starts, room, least_s)
            found = min(programs, key=lambda moved: moved.time_s, default=None)
            moves = found is not None and (best is None or found.time_s < best.time_s)
            moving_s = found.time_s if moves else best.time_s if best else None
            yield Row(
                model=name,
                kernels=kernels,
                share=share,
                link=link,
                without=best.time_s / plain.time_s - 1 if best else None,
                without_least=planner.least_s(room) / plain.time_s - 1,
                moving=None if moving_s is None else moving_s / plain.time_s - 1,
                moving_least=least_s / plain.time_s - 1,
                waits=found.waits_s / plain.time_s if moves else 0.0,
                host_bytes=found.prediction.host_bytes if moves else 0,
                seconds=time.perf_counter() - started,
            )


def cells(row: Row) -> list[str]:
    """A row as a line of the table with `HEADINGS`."""
    extra = [percent(each) for each in (row.without, row.without_least, row.moving, row.moving_least, row.waits)]
    host = format_bytes(row.host_bytes) if row.host_bytes else "–"
    return [row.model, f"{row.kernels} {row.share:.0%}", row.link, *extra, host, f"{row.seconds:.1f}"]


if __name__ == "__main__":
    sys.exit(main())
