"""Fig. 3 of paper 002: seconds of a step against the batch, on a device that may give 11.4 GB and no more.

    python benchmarks/papers/batch_sizes.py [--networks ResNet152 …] [--json FILE] [--seconds 110] [--tiny]
    python benchmarks/papers/batch_sizes.py --show FILE [--plot FILE]

Real steps of the paper's networks (networks.py), float32 without TF32, forward and backward. Three ways: plain;
Chen's, which is PyTorch's `checkpoint_sequential` with √n segments over the longest row of modules in the network
(U-Net has none, so it has no such rows); and ours, which is `elbowroom.fit` with PyTorch's kernels. The cap is set on
PyTorch's allocator; ours gets 95 % of it as its budget, because the allocator may hold more than is allocated.
Batches are the paper's of Table 1, where the plain run takes 7 to 9 GB, times 0.5 to 4. A row is written as soon as
it is measured; no row is begun after `--seconds`, and `--json` with rows in it goes on where it stopped.
`--tiny` tries this on the CPU, without a cap.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from chain_files import RESULTS
from networks import NETWORKS, Network, Trained, UNet, convolution
from real_steps import clean, measured
from tables import markdown, save
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import elbowroom
from elbowroom.errors import BudgetTooSmall

STORED = RESULTS / "paper-002-batches-h200.json"
CAP_BYTES = 11_400_000_000
BUDGET = 0.95
CHOSEN = ("ResNet152", "PSPNet", "DenseNet161", "U-Net")
TIMES = (0.5, 1, 1.5, 2, 3, 4)
PLAIN, CHEN, OURS = "plain", "Chen's", "ours"
TINY = {
    "tiny chain": Network(
        lambda: Trained(
            *(convolution(3 if n == 0 else 8, 8) for n in range(6)), nn.Flatten(), nn.Linear(8 * 256, 10)
        ),
        4,
        16,
    ),
    "tiny U-Net": Network(lambda: UNet((4, 8), 2), 2, 44, lambda batch: (batch, 28, 28)),
}


def main() -> int:
    options = parse()
    if options.show:
        return show(json.loads(options.show.read_text())["rows"], options.plot)
    device = "cpu" if options.tiny else "cuda"
    if options.tiny:
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        print("batch_sizes: there is no CUDA device here; --tiny tries it on the CPU", file=sys.stderr)
        return 2
    else:
        torch.cuda.set_per_process_memory_fraction(CAP_BYTES / torch.cuda.get_device_properties(0).total_memory)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
    started = time.perf_counter()
    for name, batch, way in cells(TINY if options.tiny else {n: NETWORKS[n] for n in options.networks}):
        if any((row["network"], row["batch"], row["way"]) == (name, batch, way) for row in rows):
            continue
        if time.perf_counter() - started > options.seconds:
            print("time is up; the same call goes on from here")
            break
        networks = TINY if options.tiny else NETWORKS
        rows.append({"network": name, "batch": batch, "way": way, **row_of(networks[name], batch, way, device)})
        head = {"device": torch.cuda.get_device_name() if device == "cuda" else "CPU, tried"}
        lines = ",\n".join(map(json.dumps, rows))
        options.json.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n')
        print(f"{time.perf_counter() - started:6.1f} s  {rows[-1]}", flush=True)
    return show(rows, options.plot)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(CHOSEN), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"default: {STORED}")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no row after so long")
    parser.add_argument("--tiny", action="store_true", help="small networks on the CPU, to try the script")
    parser.add_argument("--show", type=Path, metavar="FILE", help="the table of earlier rows")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw them here")
    options = parser.parse_args()
    if options.json is None:
        if options.tiny:
            parser.error("--tiny: say with --json where the figures go; they are not for the results")
        options.json = STORED
    return options


def cells(networks: dict[str, Network]) -> Iterator[tuple[str, int, str]]:
    """Those first that every curve begins with, so that a run that is cut short has some of each network."""
    for times in (1, 2, 0.5, 1.5, 4, 3):
        for name, network in networks.items():
            batch = max(1, round(times * network.batch))
            if times <= 1.5:
                yield name, batch, PLAIN
            if times >= 1:
                if "U-Net" not in name:
                    yield name, batch, CHEN
                yield name, batch, OURS


def row_of(network: Network, batch: int, way: str, device: str) -> dict[str, Any]:
    try:
        with torch.device(device):
            torch.manual_seed(0)
            model = network.build().train()
            images = torch.randn(batch, 3, network.side, network.side)
            labels = torch.zeros(network.labels(batch), dtype=torch.int64)
        started = time.perf_counter()
        call = called(model, way, (images, labels), device)
        prepared = time.perf_counter() - started

        def step() -> None:
            for parameter in model.parameters():
                parameter.grad = None
            call(images, labels).backward()

        row = measured(step, device)
        return row if way != OURS else {**row, "prepared_s": round(prepared, 2)}
    except BudgetTooSmall as refusal:
        return {"error": f"needs {refusal.least_budget / 1e9:.2f} GB"}
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    except Exception as failure:  # one row less must not cost the others, which a device was lent for
        return {"error": f"{type(failure).__name__}: {failure!s:.120}"}
    finally:
        model = images = labels = call = step = None  # the last references, before the memory is given back
        torch._dynamo.reset()
        clean(device)


def called(model: nn.Module, way: str, example: tuple[Tensor, Tensor], device: str) -> Callable[..., Any]:
    if way == OURS:
        budget = int(BUDGET * CAP_BYTES)
        return elbowroom.fit(model, *example, budget=budget, kernels="torch")
    if way == CHEN:
        parts = max((m for m in model.modules() if isinstance(m, nn.Sequential)), key=len)
        segments = round(math.sqrt(len(parts)))
        parts.forward = lambda x: checkpoint_sequential(list(parts), segments, x, use_reentrant=False)
    return model


def how_many(rows: Sequence[dict[str, Any]]) -> str:
    asked = list(cells({name: NETWORKS[name] for name in CHOSEN}))
    there = sum((row["network"], row["batch"], row["way"]) in asked for row in rows)
    if there == len(asked):
        return f"All {there} measurements are there."
    return (
        f"Only {there} of {len(asked)} measurements are there: the device was lent for too short a time for the "
        "others. So this says little of large batches, which are what the figure is about."
    )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each network and batch, a column for each way."""
    lines = []
    for name, batch in sorted({(row["network"], row["batch"]) for row in rows}):
        line = [name, str(batch)]
        for way in (PLAIN, CHEN, OURS):
            found = [row for row in rows if (row["network"], row["batch"], row["way"]) == (name, batch, way)]
            line.append("–" if not found else found[0].get("error") or shown(found[0]))
        lines.append(line)
    return markdown(["network", "batch", PLAIN, CHEN, OURS], lines)


def shown(row: dict[str, Any]) -> str:
    return f"{row['seconds']:.3f} s, {(row['before_bytes'] + row['peak_bytes']) / 1e9:.2f} GB"


def show(rows: Sequence[dict[str, Any]], plot: Path | None) -> int:
    print(table(rows))
    if plot:
        save_plot(rows, plot)
    return 0


def save_plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["network"] for row in rows))
    figure, axes = pyplot.subplots(1, len(names), figsize=(3.2 * len(names), 3), squeeze=False)
    for name, axis in zip(names, axes.flat, strict=True):
        for way, style in ((PLAIN, "C0-o"), (CHEN, "C2-s"), (OURS, "C3-^")):
            these = [row for row in rows if row["network"] == name and row["way"] == way and "seconds" in row]
            these.sort(key=lambda row: row["batch"])
            axis.plot([row["batch"] for row in these], [row["seconds"] for row in these], style, label=way)
            if way == PLAIN and these:  # what it would take with more memory, as in the paper
                last, most = these[-1], max(row["batch"] for row in rows if row["network"] == name)
                longer = [last["seconds"], last["seconds"] * most / last["batch"]]
                axis.plot([last["batch"], most], longer, "C0:")
        seconds = [row["seconds"] for row in rows if row["network"] == name and "seconds" in row]
        batches = [row["batch"] for row in rows if row["network"] == name]
        limits = {"ylim": (0, 1.15 * max(seconds, default=1)), "xlim": (0, 1.15 * max(batches))}
        axis.set(title=name, xlabel="batch", ylabel="seconds", **limits)
        axis.legend(fontsize=7, loc="lower left")
    figure.tight_layout()
    save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
