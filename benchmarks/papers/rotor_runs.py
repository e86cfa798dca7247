"""Four networks of 001 ch. 2, run: images per second and peak of real steps, beside what the chains predict.

    python benchmarks/papers/rotor_runs.py [--only "resnet101 1000 8" …] [--json FILE] [--seconds 100]
                                           [--tiny | --show FILE | --count FILE]

Float32 without TF32, eager, on a CUDA device. Rows: everything saved; `checkpoint_sequential` with some of the
thesis' numbers of segments; `persistent` and `revolve` within parts of the plain memory, planned on the stored chains
and executed stage by stage. Peaks are above what is there before a step, and the images count. A row is written as
soon as it is measured, and `--json` with rows in it goes on where it stopped. `--tiny` tries this on the CPU.
`--count` adds to rows that lack them how many forwards and backwards of stages their schedules have.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from answers import chain_file, path_there
from chain_files import RESULTS
from estimated_chains import estimated
from real_steps import clean, measured
from tables import markdown, percent
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential
from vision_networks import BUILDERS
from vision_settings import TINY, Setting

from elbowroom.execute.by_stages.runner import ChainRunner
from elbowroom.problem import Chain
from elbowroom.schedule import Backward, Forward, Schedule, simulate
from elbowroom.solve import solve
from elbowroom.solve.persistent import Sweep

STORED = RESULTS / "paper-001-rotor-h200.json"
SETTINGS = [Setting.named(name) for name in ("resnet101 1000 8", "densenet201 500 16", "inception_v3 1000 8")]
SETTINGS.append(Setting("resnet1001", 224, 1))
SEGMENTS = (2, 4, 8, 16)
OPTIMAL = (0.15, 0.3, 0.45, 0.6, 0.8)  # parts of the plain memory
REVOLVE = (0.15, 0.3)
LONG = 200  # stages: without numba, which the device may not have, a table of more takes too long of its time
SLOTS = 500
SHORT_S = 0.65e-3  # operations in which the host may have more to do than the device: see `in_words`


def main() -> int:
    options = parse()
    if options.show:
        print(table(json.loads(options.show.read_text())["rows"]))
        return 0
    if options.count:
        return count(options.count)
    if not options.tiny and not torch.cuda.is_available():
        print("rotor_runs: there is no CUDA device here; --tiny tries it on the CPU", file=sys.stderr)
        return 2
    device = "cpu" if options.tiny else "cuda"
    if options.tiny:
        torch.set_num_threads(1)  # the steps are too small for more
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
    started = time.perf_counter()
    for setting in [TINY[0]] if options.tiny else SETTINGS:
        if options.only and setting.name not in options.only:
            continue
        for row in rows_of(setting, device, {(row["setting"], row["how"]) for row in rows}):
            rows.append(row)
            save(options.json, torch.cuda.get_device_name() if device == "cuda" else "CPU, tried", rows)
            print(f"{time.perf_counter() - started:6.1f} s  {row}", flush=True)
            if time.perf_counter() - started > options.seconds:
                print("time is up; the same call goes on from here")
                return 0
    print(table(rows))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="SETTING", help="network, side and batch, as in the rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"default: {STORED}")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no row after so long")
    parser.add_argument("--tiny", action="store_true", help="a small network on the CPU, to try the script")
    parser.add_argument("--show", type=Path, metavar="FILE", help="the table of earlier rows")
    parser.add_argument("--count", type=Path, metavar="FILE", help="add the number of operations to earlier rows")
    options = parser.parse_args()
    if options.json is None:
        if options.tiny:
            parser.error("--tiny: say with --json where the figures go; they are not for the results")
        options.json = STORED
    return options


def save(path: Path, device: str, rows: Sequence[dict[str, Any]]) -> None:
    lines = ",\n".join(map(json.dumps, rows))
    path.write_text(f'{json.dumps({"device": device})[:-1]}, "rows": [\n{lines}\n]}}\n')


def count(path: Path) -> int:
    data = json.loads(path.read_text())
    counted = {}
    for name in dict.fromkeys(row["setting"] for row in data["rows"] if "operations" not in row):
        for how, told, _ in ways(chain_for(Setting.named(name), "cuda")):
            counted[name, how, told["predicted_s"]] = told["operations"]
    for row in data["rows"]:
        key = row["setting"], row["how"], row["predicted_s"]
        if key in counted:  # else its chain was another one
            row["operations"] = counted[key]
    save(path, data["device"], data["rows"])
    print(table(data["rows"]))
    return 0


def rows_of(setting: Setting, device: str, known: set[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """The rows of one network that are not known yet."""
    chain = chain_for(setting, device)
    todo = [way for way in ways(chain) if (setting.name, way[0]) not in known]
    if not todo:
        return
    with torch.device(device):
        torch.manual_seed(0)
        stages = [stage.train() for stage in BUILDERS[setting.network]()]
        images = torch.randn(setting.batch, 3, setting.side, setting.side)
    loss, body = stages[-1], nn.Sequential(*stages[:-1])
    for parameter in body.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for how, predicted, placed in todo:
        call = placed(stages[:-1])

        def step(call: Callable[[Any], Any] = call) -> None:
            loss(call(images)).backward()

        try:
            found = measured(step, device)
        except Exception as failure:  # one row less must not cost the others, which a device was lent for
            found = {"error": f"{type(failure).__name__}: {failure!s:.120}"}
        if "peak_bytes" in found:
            found["peak_bytes"] += images.untyped_storage().nbytes()
        yield {"setting": setting.name, "how": how, **predicted, **found}
    call = step = stages = body = loss = images = parameter = None  # the last references to the network
    clean(device)


def chain_for(setting: Setting, device: str) -> Chain:
    found = chain_file(path_there())
    if device == "cpu":
        found.chains[setting.name] = estimated(setting)
    return found.chain(setting.name)


Way = tuple[str, dict[str, Any], Callable[[Sequence[nn.Module]], Callable[[Any], Any]]]


def ways(chain: Chain) -> Iterator[Way]:
    """Each way with what the chain predicts of it, and a function from the stages before the loss to a forward."""
    plain = solve(chain, None, "store-all")
    yield "everything saved", predicted(chain, plain.schedule), lambda stages: nn.Sequential(*stages)
    for k in SEGMENTS:
        if k < len(chain) - 1:
            segments = solve(chain, None, "sequential", segments=k).schedule
            yield f"sequential, {k}", predicted(chain, segments), partial(segmented, k)
    sweep = Sweep(chain, int(max(OPTIMAL) * plain.peak_bytes), SLOTS)  # one table for all budgets
    for part in OPTIMAL:
        budget = int(part * plain.peak_bytes)
        if budget >= sweep.least_bytes:
            schedule = sweep.schedule(budget)
            run = partial(ChainRunner, schedule=schedule)
            yield f"persistent, {part:.0%}", {**predicted(chain, schedule), "budget": budget}, run
    for part in REVOLVE if len(chain) < LONG else ():
        result = solve(chain, int(part * plain.peak_bytes), "revolve", slots=SLOTS)
        if result.feasible:
            run = partial(ChainRunner, schedule=result.schedule)
            yield f"revolve, {part:.0%}", {**predicted(chain, result.schedule), "budget": result.budget}, run


def predicted(chain: Chain, schedule: Schedule) -> dict[str, Any]:
    found = simulate(chain, schedule)
    operations = sum(isinstance(operation, Forward | Backward) for operation in schedule)
    time_s = float(f"{found.time:.4g}")
    return {"predicted_s": time_s, "predicted_bytes": found.peak_bytes, "operations": operations}


def segmented(k: int, stages: Sequence[nn.Module]) -> Callable[[Any], Any]:
    body = nn.Sequential(*stages)
    return lambda x: checkpoint_sequential(body, k, x, use_reentrant=False)


def in_words(rows: Sequence[dict[str, Any]]) -> str:
    """How far off the prediction is, for what PyTorch runs by itself and for what is run stage by stage."""
    rows = [row for row in rows if "seconds" in row and "operations" in row]
    ours = [row for row in rows if row["how"].startswith(("persistent", "revolve"))]
    short = [row for row in ours if row["predicted_s"] < SHORT_S * row["operations"]]

    def off(chosen: Sequence[dict[str, Any]]) -> str:
        more = [row["seconds"] / row["predicted_s"] - 1 for row in chosen]
        return _range(more) if more else "–"

    peaks = [row["peak_bytes"] / row["predicted_bytes"] - 1 for row in rows]
    each = [1e3 * row["seconds"] / row["operations"] for row in short]
    paces = f"{min(each):.2f} to {max(each):.2f}" if each else "–"
    return (
        f"Measured peaks differ from predicted ones by {_range(peaks)}. Measured times differ by "
        f"{off([row for row in rows if row not in ours])} where PyTorch runs the step by itself (everything saved, "
        f"sequential); by {off([row for row in ours if row not in short])} where `ChainRunner` runs it stage by "
        f"stage and an operation, which is a forward or a backward of one stage, is predicted to take "
        f"{1e3 * SHORT_S:g} ms or more on average; and by {off(short)} where it is predicted to take less. In these "
        f"last rows an operation was measured at {paces} ms."
    )


def _range(parts: Sequence[float]) -> str:
    return f"{100 * min(parts):+.1f} % to {100 * max(parts):+.1f} %".replace("-", "−")


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        setting = Setting.named(row["setting"])
        line = [f"{setting.network}, {setting.side}², {setting.batch}", row["how"]]
        line.append(f"{1e3 * row['predicted_s'] / row['operations']:.2f}" if "operations" in row else "–")
        line += [f"{row['predicted_bytes'] / 2**30:.2f}", f"{setting.batch / row['predicted_s']:.2f}"]
        if "error" in row:
            line += [row["error"], "–", "–", "–"]
        else:
            more = row["peak_bytes"] / row["predicted_bytes"] - 1
            line += [f"{row['peak_bytes'] / 2**30:.2f}", percent(more, 1)]
            line += [f"{setting.batch / row['seconds']:.2f}", percent(row["seconds"] / row["predicted_s"] - 1, 1)]
        lines.append(line)
    header = [
        "network, image, batch",
        "way",
        "predicted: ms an operation",
        "GiB",
        "images/s",
        "measured: GiB",
        "more",
    ]
    return markdown([*header, "images/s", "time more"], lines)


if __name__ == "__main__":
    sys.exit(main())
