"""Where a step's time goes, operator by operator: as it was predicted, and as the profiler saw it.

    python benchmarks/gpu_ops.py --models pspnet [--room MIB] [--most 20]
    python benchmarks/gpu_ops.py --tiny

For plans with PyTorch's kernels, where each operator runs by itself; with everything saved, or within a room above
the resident state. The largest differences come first: they are what to explain.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import gpu_fit
import torch
from cases import GRAPH_MODELS, MODELS, TINY_GRAPH_MODELS, TINY_MODELS, Case
from gpu_fit import MIB, NO_LIMIT, WARM_UPS, Device, check_models, device_for, number

STEPS = 3
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
        gpu_fit.show(told, HEADINGS)
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
    """Each kind of operator: how often it runs, and its milliseconds in a step, predicted and measured."""
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
    """How often each kind of operator runs, and its seconds."""
    runs: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    (entry,) = session.entries.values()
    for region in entry.regions:
        ops = region.captured.graph.ops
        for instruction in (*region.program.forward, *region.program.backward):
            if ops[instruction.op].time and instruction.viewed_in is None:
                name = profilers_name(ops[instruction.op].target)
                runs[name] += 1
                seconds[name] += ops[instruction.op].time
    return runs, seconds


def profilers_name(target: str) -> str:
    namespace, _, name = target.partition(".")
    return f"{namespace}::{name.partition('.')[0]}"


def profiled(call: Any, device: Device) -> Counter[str]:
    """Seconds of a step by operator. What one calls inside counts as its own, and under its own name, too."""
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
