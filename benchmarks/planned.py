"""What plans of whole models promise, without a GPU: as a chain, by stages, value by value, and the least possible.

    python benchmarks/planned.py [--models unet t5-base …] [--kernels inductor] [--shares 0.5 0.35] [--json FILE]
    python benchmarks/planned.py --tiny

Models are traced at full size on the CPU, and nothing of them runs. Operators' times are estimated as for a GPU, from
their FLOPs and the bytes that they move. So the table has no milliseconds, but the extra time over saving everything,
as predicted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from unittest import mock

import torch
from cases import GRAPH_MODELS, MODELS, TINY_GRAPH_MODELS, TINY_MODELS, Case
from row_tables import show
from rows import check_models

from elbowroom import devices
from elbowroom.capture.backend import make_backend
from elbowroom.capture.joint_graph import Captured
from elbowroom.capture.settings import capture_settings
from elbowroom.capture.traced_values import tensor_bytes
from elbowroom.execute.region import Looks, Region
from elbowroom.measure.measured import Measured, measured
from elbowroom.plan.planner import Planned, Planner
from elbowroom.plan.values.search import Refiner
from elbowroom.session.planning import surroundings

KERNELS = "torch", "inductor"
HEADINGS = "model", "kernels, share", "chain", "stages", "value by value", "least", "stages s", "values s"


@dataclass(frozen=True)
class Row:
    """The extra time of each kind of plan, as a share of the time with everything saved; None where none fits.

    `least` is what no plan can go below. `stages_s` and `values_s` are the seconds that planning took.
    """

    model: str
    kernels: str
    share: float
    chain: float | None
    stages: float | None
    values: float | None
    least: float
    stages_s: float
    values_s: float
    method: str


def main() -> int:
    options = parse()
    rows: list[Row] = []
    for name in options.models:
        try:
            for kernels in options.kernels:
                for row in planned(name, options.known[name], kernels, options.shares):
                    rows.append(row)
                    print(f"{row.model}, {row.kernels}, {row.share:.0%}", file=sys.stderr, flush=True)
        except ModuleNotFoundError as missing:
            print(f"{name} is left out: {missing.name} is not installed", file=sys.stderr, flush=True)
    show([cells(row) for row in rows], HEADINGS)
    print("Extra time over saving everything, as predicted within a share of its peak; –: does not fit.\n")
    print("\n".join(summary(rows)))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return int(not rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS, help="only these")
    parser.add_argument(
        "--shares", nargs="+", type=float, default=[0.5, 0.35], help="of the peak with everything saved"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all rows here")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script")
    options = parser.parse_args()
    options.known = {**TINY_MODELS, **TINY_GRAPH_MODELS} if options.tiny else {**MODELS, **GRAPH_MODELS}
    options.models = options.models or list(options.known)
    check_models(parser, options.models, options.known)
    return options


# --- planning ------------------------------------------------------------------------------------------------


def planned(name: str, make: Callable[[], Case], kernels: str, shares: list[float]) -> Iterator[Row]:
    """One row for each share of the peak with everything saved. Gradients come late: steps begin without them."""
    step = estimated(traced(make(), fused=kernels == "inductor"))
    graph = step.captured.graph
    late = {i: tensor_bytes(step.captured.nodes[i]) for i in graph.parameters}
    around = replace(surroundings(step, loss_inside=True, late={}), late=late)
    for share in shares:
        planner, by_stages = Planner(graph, around), Planner(graph, around)
        plain = planner.everything.prediction
        room = int(share * plain.peak_bytes)

        def extra(plan: Planned | None, plain_s: float = plain.time_s) -> float | None:
            return None if plan is None else plan.prediction.time_s / plain_s - 1

        without, stages_s = timed(by_stages, room, refine=False)
        best, values_s = timed(planner, room, refine=True)
        chain = Planner(graph, around, as_chain=True).best(room)
        least = Refiner(graph, around).least_s(room) / plain.time_s - 1
        method = "" if best is None else best.method
        yield Row(name, kernels, share, extra(chain), extra(without), extra(best), least, stages_s, values_s, method)


def traced(case: Case, *, fused: bool) -> Captured:
    """The only graph of a training step."""
    torch._dynamo.reset()
    graphs: list[Captured] = []
    looks = Looks()
    looks.begin(ends=False)  # from now on regions compute outputs only, to look at the model

    def unrun(captured: Captured) -> Region:
        """A region that seems to run out of memory when it is looked at: then its outputs are zeros, at once."""
        region = Region(captured, looks)
        region._look = out_of_memory
        return region

    def step(*batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return case.loss(case.model(*batch[:-1]), batch[-1])

    case.model.train()
    backend = make_backend(unrun, lambda region: graphs.append(region.traced), refused, fused=fused)
    with capture_settings(8):
        torch.compile(step, backend=backend, dynamic=False)(*case.inputs, case.target)
    (graph,) = graphs
    return graph


def out_of_memory(arguments: list[object]) -> list[object]:
    raise torch.OutOfMemoryError


def refused(why: str) -> None:
    raise RuntimeError(why)


def estimated(graph: Captured) -> Measured:
    """The graph with the times that its operators would take on a GPU."""
    with as_on_a_gpu():
        return measured(graph, estimate=True)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Have the CPU, where the models are traced, counted as fast as a GPU."""
    with mock.patch.dict(devices.KINDS, cpu=devices.KINDS["cuda"]):
        yield


def timed(planner: Planner, room: int, *, refine: bool) -> tuple[Planned | None, float]:
    """The best plan within a room, and the seconds that it took to find."""
    started = time.perf_counter()
    return planner.best(room, refine=refine), time.perf_counter() - started


# --- showing -------------------------------------------------------------------------------------------------


def cells(row: Row) -> list[str]:
    """A row as a line of the table with `HEADINGS`."""
    extra = [percent(each) for each in (row.chain, row.stages, row.values, row.least)]
    return [row.model, f"{row.kernels} {row.share:.0%}", *extra, f"{row.stages_s:.1f}", f"{row.values_s:.1f}"]


def percent(extra: float | None) -> str:
    return "–" if extra is None else f"{extra:+.1%}"


def summary(rows: list[Row]) -> Iterator[str]:
    fitting = [row for row in rows if row.stages is not None and row.values is not None]
    if not fitting:
        yield "Nothing fits."
        return
    gains = [(1 + row.stages) / (1 + row.values) - 1 for row in fitting]
    above = [(1 + row.values) / (1 + row.least) - 1 for row in fitting]
    before = [(1 + row.stages) / (1 + row.least) - 1 for row in fitting]
    yield f"Value by value, plans are {mean(gains):.1%} faster than by stages on average, at most {max(gains):.1%}"
    yield f"Above the least possible: by stages {mean(before):.1%} on average, value by value {mean(above):.1%}"


if __name__ == "__main__":
    sys.exit(main())
