"""Measure the chains of 001 ch. 2–4 on a CUDA device, once for all figures: times and bytes of every stage, the link.

    python benchmarks/papers/measured_chains.py [--only resnet50 densenet121 …] [--json FILE] [--seconds 280] [--tiny]

Float32 without TF32, eager. A stage runs on a random input of its shape; stages that are alike are measured once. Its
times are medians over runs that wait in the device's queue, so that the device and not the host sets the pace. Bytes
are the allocator's: what a forward without saving takes, what one with saving leaves and takes, what the backward
takes, all beside the input, the parameters and their gradients. The link is measured with pinned memory, each way
alone and both at once. The file is written after every chain, and a second call leaves out what is there; so does one
that failed, as where memory runs out.
`--tiny` tries this on the CPU with a small network, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from chain_files import MEASURED, ChainFile, StageRow
from estimated_chains import name_of, size_of
from torch import Tensor, nn
from vision_networks import BUILDERS
from vision_settings import CHAPTER_2, CHAPTER_3, TINY, Setting

QUEUED_CYCLES = 3e7  # the device sleeps so long (some 15 ms) while the host fills its queue
COPY_BYTES = 2**28
COPIES = 10
ORDER = (500, 224, 1000)  # sides of images: first what most figures need, if time is short


def main() -> int:
    options = parse()
    device: Cpu | Gpu
    if options.tiny:
        device, settings = Cpu(), TINY
    elif torch.cuda.is_available():
        device = Gpu()
        settings = [each for each in CHAPTER_2 if not options.only or each.network in options.only]
    else:
        print("measured_chains: there is no CUDA device here; --tiny tries it on the CPU", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    gc.disable()  # what older garbage frees must not count as freed by a stage
    started = time.perf_counter()
    found = ChainFile("measured", device.name, device.link(), {})
    if options.json.exists() and (before := ChainFile.load(options.json)).device == found.device:
        found.chains |= before.chains
    known: Known = {}
    for setting in sorted(settings, key=lambda each: ORDER.index(each.side) if each in CHAPTER_3 else len(ORDER)):
        if setting.name in found.chains:
            continue
        if time.perf_counter() - started > options.seconds:
            print("time is up; the same call goes on from here")
            break
        try:
            found.chains[setting.name] = measured(setting, device, options.reps, known)
            chain = found.chain(setting.name)
            seconds = sum(stage.forward_time + stage.backward_time for stage in chain.stages)
            told = f"{len(chain)} stages, {setting.batch / seconds:.2f} images/s"
        except Exception as failure:  # one chain less must not cost the others, which a device was lent for
            told = f"left out, {type(failure).__name__}: {failure!s:.120}"
        device.clean()
        found.save(options.json)
        print(f"{time.perf_counter() - started:6.1f} s  {setting.name}: {told}", flush=True)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[name for name in BUILDERS if name != "tiny"], metavar="NETWORK")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"default: {MEASURED}")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no chain after so long")
    parser.add_argument("--reps", type=int, default=7, help="timed runs of each stage")
    parser.add_argument("--tiny", action="store_true", help="a small network on the CPU, to try the script")
    options = parser.parse_args()
    if options.reps < 1:
        parser.error("--reps: must be at least 1")
    if options.json is None:
        if options.tiny:
            parser.error("--tiny: say with --json where the figures go; they are not for the results")
        options.json = MEASURED
    return options


# --- stages --------------------------------------------------------------------------------------------------

Known = dict[tuple[str, torch.Size, bool], tuple[StageRow, torch.Size]]


def measured(setting: Setting, device: Cpu | Gpu, reps: int, known: Known) -> list[StageRow]:
    with torch.device("meta"):
        stages = BUILDERS[setting.network]()
    shape = torch.Size((setting.batch, 3, setting.side, setting.side))
    rows = [StageRow.of_input(input_bytes(shape))]
    for number, stage in enumerate(stages):
        key = str(stage), shape, number > 0
        if key not in known:
            known[key] = measured_stage(stage, shape, device, reps, needs_gradient=number > 0)
        row, shape = known[key]
        rows.append(row)
    return rows


def input_bytes(shape: Sequence[int]) -> int:
    with torch.device("meta"):
        return size_of([torch.empty(tuple(shape))])


def measured_stage(
    stage: nn.Module, shape: torch.Size, device: Cpu | Gpu, reps: int, needs_gradient: bool
) -> tuple[StageRow, torch.Size]:
    """What a stage costs for an input of such a shape, and the shape of its output."""
    stage = stage.to_empty(device=device.kind).train()
    for module in stage.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x = torch.randn(shape, device=device.kind).requires_grad_(needs_gradient)
    with torch.no_grad():
        gradient = torch.ones_like(stage(x))
    run = Runs(stage, x, gradient)
    for _ in range(2):  # workspaces and algorithms are chosen by the first
        run.backward(run.saving())
    levels = device.levels(run)
    forwards, backwards = device.times(run, reps)
    output_bytes = size_of([gradient])
    row = StageRow(
        stages=1,
        name=name_of(stage),
        forward_s=statistics.median(forwards),
        backward_s=statistics.median(backwards),
        output_bytes=output_bytes,
        saved_bytes=levels.saved,
        gradient_bytes=0 if gradient.dim() == 0 else output_bytes,
        plain_overhead_bytes=max(0, levels.plain_peak - output_bytes),
        saving_overhead_bytes=max(0, levels.saving_peak - levels.saved),
        backward_overhead_bytes=max(0, levels.backward_peak - levels.saved - needs_gradient * size_of([x])),
    )
    stage.to("meta")
    return row, gradient.shape


@dataclass(frozen=True)
class Runs:
    """A stage with an input and a gradient, and its three kinds of run."""

    stage: nn.Module
    x: Tensor
    gradient: Tensor

    def plain(self) -> Tensor:
        with torch.no_grad():
            return self.stage(self.x)

    def saving(self) -> Tensor:
        return self.stage(self.x)

    def backward(self, output: Tensor) -> None:
        output.backward(self.gradient)
        self.x.grad = None


@dataclass(frozen=True)
class Levels:
    """Bytes beside what was there before: the most during each kind of run, and what saving leaves."""

    plain_peak: int
    saving_peak: int
    saved: int
    backward_peak: int


# --- devices -------------------------------------------------------------------------------------------------


class Gpu:
    kind = "cuda"

    def __init__(self) -> None:
        self.name = torch.cuda.get_device_name()
        a = torch.randn(4096, 4096, device="cuda")
        started = time.perf_counter()
        while time.perf_counter() - started < 2:  # until its clocks are those of a device at work
            a = (a @ a).clamp_(-1, 1)
            torch.cuda.synchronize()

    def clean(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def levels(self, run: Runs) -> Levels:
        def peak(call: Callable[[], Any]) -> tuple[Any, int, int]:
            torch.cuda.reset_peak_memory_stats()
            made = call()
            return made, torch.cuda.max_memory_allocated() - start, torch.cuda.memory_allocated() - start

        start = torch.cuda.memory_allocated()
        _, plain_peak, _ = peak(run.plain)
        _ = None
        output, saving_peak, saved = peak(run.saving)
        _, backward_peak, _ = peak(partial(run.backward, output))
        return Levels(plain_peak, saving_peak, saved, backward_peak)

    def times(self, run: Runs, reps: int) -> tuple[list[float], list[float]]:
        marks: list[tuple[torch.cuda.Event, ...]] = []
        torch.cuda._sleep(int(QUEUED_CYCLES))
        for _ in range(reps):
            before, between, after = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            before.record()
            output = run.saving()
            between.record()
            run.backward(output)
            after.record()
            marks.append((before, between, after))
            del output
        torch.cuda.synchronize()
        forwards = [before.elapsed_time(between) / 1e3 for before, between, _ in marks]
        return forwards, [between.elapsed_time(after) / 1e3 for _, between, after in marks]

    def link(self) -> dict[str, float]:
        """Bytes a second each way alone, and of each when both run."""
        out, back = torch.cuda.Stream(), torch.cuda.Stream()
        here = [torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
        there = [torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

        def copies(ways: str) -> float:
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(COPIES):
                if "o" in ways:
                    with torch.cuda.stream(out):
                        there[0].copy_(here[0], non_blocking=True)
                if "b" in ways:
                    with torch.cuda.stream(back):
                        here[1].copy_(there[1], non_blocking=True)
            torch.cuda.synchronize()
            return COPIES * COPY_BYTES / (time.perf_counter() - started)

        def rate(ways: str) -> float:
            return float(f"{statistics.median(copies(ways) for _ in range(5)):.4g}")

        copies("ob")  # warm-up
        return {"to_host": rate("o"), "from_host": rate("b"), "both": rate("ob")}


class Cpu:
    """For trying the script: times of the CPU, bytes as the allocator reports them; there is no link."""

    kind, name = "cpu", "CPU, tried"

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def clean(self) -> None:
        gc.collect()

    def levels(self, run: Runs) -> Levels:
        from elbowroom.execute.by_stages.measuring import observe

        cpu = torch.device("cpu")
        _, [plain] = observe(cpu, lambda _: run.plain())
        _, [saving, back] = observe(cpu, lambda _: run.saving(), run.backward)
        return Levels(plain.peak, saving.peak, saving.end, back.peak)

    def times(self, run: Runs, reps: int) -> tuple[list[float], list[float]]:
        forwards, backwards = [], []
        for _ in range(reps):
            with timed(forwards):
                output = run.saving()
            with timed(backwards):
                run.backward(output)
        return forwards, backwards

    def link(self) -> dict[str, float]:
        return {}


@contextmanager
def timed(into: list[float]) -> Iterator[None]:
    started = time.perf_counter()
    yield
    into.append(time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
