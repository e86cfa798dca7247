"""Where a step's time goes, operator by operator: as it was predicted, and as the profiler saw it.

    python benchmarks/gpu_ops.py --models pspnet [--room MIB] [--most 20]
    python benchmarks/gpu_ops.py --tiny

The plan is one with PyTorch's kernels, where each operator runs by itself. It saves everything, or with `--room` it
stays within so many MiB above the resident state. The largest differences come first: they are what to explain.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from cases import GRAPH_MODELS, MODELS, TINY_GRAPH_MODELS, TINY_MODELS, Case
from row_tables import number, show
from rows import MIB, NO_LIMIT, check_models
from step_costs import WARM_UPS, Device, device_for

STEPS = 3  # that the profiler watches
HEADINGS = "model", "operator", "runs", "predicted ms", "measured ms", "difference"


def main() -> int:
    options = parse()
    device = device_for("gpu_ops", tiny=options.tiny)
    if device is None:
        return 2
    known = all_models(options.tiny)
    for name in options.models:
        torch.manual_seed(0)
        with torch.device(device.kind):
            case = known[name]()
        rows = sorted(compared(case, device, options.room), key=lambda row: -abs(row[2] - row[3]))
        told = [[name, op, str(runs), *map(number, (p, m, p - m))] for op, runs, p, m in rows[: options.most]]
        total = [sum(row[place] for row in rows) for place in (1, 2, 3)]
        told.append([name, "all", str(total[0]), *map(number, (*total[1:], total[1] - total[2]))])
        show(told, HEADINGS)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", metavar="NAME", default=[], help="which")
    parser.add_argument("--room", type=float, metavar="MIB", help="above the resident state (default: no limit)")
    parser.add_argument("--most", type=int, default=15, help="operators to show")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU, to try the script")
    options = parser.parse_args()
    known = all_models(options.tiny)
    options.models = options.models or (["tiny-cnn"] if options.tiny else [])
    check_models(parser, options.models, known)
    if not options.models:
        parser.error(f"--models: name some of {', '.join(known)}")
    return options


def all_models(tiny: bool) -> dict[str, Any]:
    return {**TINY_MODELS, **TINY_GRAPH_MODELS} if tiny else {**MODELS, **GRAPH_MODELS}


def compared(case: Case, device: Device, room_mib: float | None) -> Iterator[tuple[str, int, float, float]]:
    """By kind of operator: its name, how often it runs, its milliseconds in a step as predicted and as measured."""
    from elbowroom.api import fit

    case.model.train()
    for parameter in case.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    budget = NO_LIMIT if room_mib is None else device.resident_bytes(case) + int(room_mib * MIB)
    with device.autocast():
        model = fit(case.model, *case.inputs, case.target, budget=budget, loss=case.loss, kernels="torch")
    measured = profiled(partial(step, model, case, device), device)
    runs, predicted = predictions(model.elbowroom)
    for op, count in runs.items():
        yield op, count, 1e3 * predicted[op], 1e3 * measured[op]


def step(model: Any, case: Case, device: Device) -> None:
    with device.autocast():
        loss = model(*case.inputs, case.target)
    loss.backward()


def predictions(session: Any) -> tuple[Counter[str], Counter[str]]:
    """By kind of operator, how often it runs in a step and the seconds that this was predicted to take."""
    runs: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    (entry,) = session.entries.values()
    for graph in entry.graphs:
        ops, program = graph.measured.captured.graph.ops, graph.region.program
        for run in (*program.forward_runs, *program.backward_runs):
            if ops[run.op].time and run.viewed_in is None:
                name = profilers_name(ops[run.op].target)
                runs[name] += 1
                seconds[name] += ops[run.op].time
    return runs, seconds


def profilers_name(target: str) -> str:
    """What the profiler calls an operator: `aten::mm` for `aten.mm.default`."""
    namespace, _, name = target.partition(".")
    return f"{namespace}::{name.partition('.')[0]}"


def profiled(call: Any, device: Device) -> Counter[str]:
    """Seconds of a step by operator. An operator that another one calls counts twice: for its caller, and itself."""
    for _ in range(WARM_UPS):
        call()
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(
        activities=[activity.CPU, *([activity.CUDA] if device.kind == "cuda" else [])]
    ) as seen:
        for _ in range(STEPS):
            call()
        if device.kind == "cuda":
            torch.cuda.synchronize()
    time = "device_time_total" if device.kind == "cuda" else "cpu_time_total"
    return Counter({event.key: getattr(event, time) / 1e6 / STEPS for event in seen.key_averages()})


if __name__ == "__main__":
    sys.exit(main())
