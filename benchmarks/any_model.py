"""Any model: N of them drawn by a number, fitted at three budgets and held to plain execution.

    python benchmarks/any_model.py --models 40 --seed 1 [--jobs 2] [--json FILE] [--page FILE]
    python benchmarks/any_model.py --name transformers:gpt2:GPT2LMHeadModel      (one of them, again)
    python benchmarks/any_model.py --show FILE…

The budgets are what plain execution takes, half of the way from there to the least, and the least. At each, three
steps are compared with plain ones that draw the same random numbers: loss, gradients, buffers. What a step takes is
read from the allocator. A model is judged in a process of its own; what cannot be built or run plainly is told at the
end, and another is drawn in its place.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import random
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drawn_models import CannotBuild, Drawn, build, first_numbers, names
from torch import nn

import elbowroom
from elbowroom.errors import BudgetTooSmall

SHARES = {"as plain": 1.0, "half": 0.5, "the least": 0.0}
STEPS = 3
CLOSE = 1e-3  # of the largest number: fused kernels, and those that are not deterministic, round otherwise
GOOD = "kept"


@dataclass(frozen=True)
class Judged:
    """One model: how it is planned, how each budget went, and what it took."""

    name: str
    parameters: int = 0
    planned: str = ""
    budgets: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    plain_bytes: int = 0
    least_bytes: int = 0
    plain_s: float = 0.0
    fitted_s: float = 0.0  # a step at the budget of plain execution
    fit_s: float = 0.0
    unbuilt: str = ""  # why the rule could not make it
    failed: str = ""

    @property
    def is_good(self) -> bool:
        return (
            not self.failed and self.planned in ("whole", "in parts") and set(self.budgets.values()) <= {GOOD, "said"}
        )


def main() -> int:
    options = arguments()
    if options.show:
        rows = [Judged(**row) for file in options.show for row in json.loads(file.read_text())]
        print(summary(rows))
        return 0
    if options.name and not options.apart:
        print(json.dumps(asdict(judged(options.name, options.device, options.kernels))), flush=True)
        return 0
    rows = []
    for row in all_judged(options):
        rows.append(row)
        if not row.unbuilt:
            print(line(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps([asdict(each) for each in rows], indent=1) + "\n")
    print(f"\n{summary(rows)}")
    if options.page:
        options.page.write_text(page(rows, options))
    return int(any(not row.is_good for row in rows if not row.unbuilt))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=40, help="so many that can be built and run plainly")
    parser.add_argument("--seed", type=int, default=0, help="tells which")
    parser.add_argument("--source", choices=["all", "transformers", "timm"], default="all")
    parser.add_argument("--name", help="this one alone")
    parser.add_argument("--apart", action="store_true", help="with --name: in a process of its own, as in a run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernels", choices=["torch", "inductor", "auto"], default="auto")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one model")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no model later than that")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all rows, as they come")
    parser.add_argument("--page", type=Path, metavar="FILE", help="a page of Markdown with the summary")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="the summary of earlier rows")
    return parser.parse_args()


# --- many ----------------------------------------------------------------------------------------------------


def all_judged(options: argparse.Namespace) -> Iterator[Judged]:
    """Rows as they come, until enough models could be built; those that could not are among them."""
    ahead = iter([options.name]) if options.name else names(options.seed, options.source)
    end = time.monotonic() + 60 * options.minutes
    wanted = options.models
    with ThreadPoolExecutor(options.jobs) as pool:
        while wanted > 0 and time.monotonic() < end:
            batch = list(itertools.islice(ahead, min(wanted, options.jobs)))
            if not batch:
                return
            for row in pool.map(lambda name: apart(name, options), batch):
                wanted -= not row.unbuilt
                yield row


def apart(name: str, options: argparse.Namespace) -> Judged:
    command = [sys.executable, __file__, "--name", name, "--device", options.device, "--kernels", options.kernels]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=options.limit)
    except subprocess.TimeoutExpired:
        return Judged(name, failed=f"took more than {options.limit:.0f} s")
    lines = done.stdout.strip().splitlines()
    try:
        return Judged(**json.loads(lines[-1]))
    except (IndexError, ValueError, TypeError):
        said = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return Judged(name, failed=f"the process ended with {done.returncode}: {said[:160]}")


# --- one -----------------------------------------------------------------------------------------------------


def judged(name: str, device_name: str, kernels: str) -> Judged:
    device = torch.device(device_name)
    try:
        drawn = build(name, device)
        plain = Side(drawn.model, drawn.inputs)
        expected = [plain.step(number) for number in range(STEPS)]
    except CannotBuild as failure:
        return Judged(name, unbuilt=str(failure))
    except Exception as failure:
        return Judged(name, unbuilt=f"plainly, {said_of(failure)}")
    count = sum(p.numel() for p in drawn.model.parameters())
    facts: dict[str, Any] = {"name": name, "parameters": count, "plain_bytes": plain.peak, "plain_s": plain.seconds}
    try:
        return fitted(build(name, device), expected, facts, kernels)
    except Exception as failure:
        return Judged(**facts, failed=said_of(failure))


def fitted(drawn: Drawn, expected: Sequence[Step], facts: dict[str, Any], kernels: str) -> Judged:
    """The model at each budget, against what plain execution gave."""
    state = copy.deepcopy(drawn.model.state_dict())
    budgets: dict[str, str] = {}
    heard: list[str] = []
    planned, fit_s, fitted_s = "", 0.0, 0.0
    began = time.perf_counter()
    with hearing(heard):
        model = elbowroom.fit(
            drawn.model, dict(drawn.inputs), budget=facts["plain_bytes"] * 4, loss=loss_of, kernels=kernels
        )
        fit_s = time.perf_counter() - began
        least = least_of(model)
    for what, share in SHARES.items():
        budget = least + int(share * max(0, facts["plain_bytes"] - least))
        said: list[str] = []
        with hearing(said):
            try:
                model.elbowroom.set_budget(budget)
                drawn.model.load_state_dict(state)
                ours = Side(model, drawn.inputs, outside=None)
                found = [ours.step(number) for number in range(STEPS)]
            except BudgetTooSmall as refusal:
                budgets[what] = f"refused: {refusal.least_budget - budget:,} bytes more"
                heard += said
                continue
        fitted_s = fitted_s or ours.seconds
        budgets[what] = verdict(found, expected, ours.peak, budget, said)
        planned = planned or how_planned(model, said)
        heard += said
    return Judged(
        **facts,
        planned=planned,
        budgets=budgets,
        said=list(dict.fromkeys(heard)),
        least_bytes=least,
        fitted_s=fitted_s,
        fit_s=fit_s,
    )


def least_of(model: nn.Module) -> int:
    try:
        model.elbowroom.set_budget(1)
    except BudgetTooSmall as refusal:
        return int(refusal.least_budget)
    return 1  # nothing is planned


def how_planned(model: nn.Module, said: Sequence[str]) -> str:
    """After steps within as much as plain execution takes; what is said of it counts."""
    entries = list(model.elbowroom.entries.values())
    unplanned = not entries or any(entry.plan is None for entry in entries)
    if unplanned or any("is not planned" in text for text in said):
        return "not planned"
    return "whole" if all(len(entry.regions) == 1 and not entry.unplanned for entry in entries) else "in parts"


@dataclass(frozen=True)
class Step:
    """What one step gave."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


class Side:
    """Takes steps of a model; `peak` is the most that one took, with all that was there before, the last one's time
    is kept. `outside` makes the loss where the model does not."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, torch.Tensor],
        outside: Callable[[Any], torch.Tensor] | None = lambda output: loss_of(output),
    ) -> None:
        self.model, self.inputs, self.outside = model, inputs, outside
        self.peak, self.seconds = 0, 0.0

    def step(self, number: int) -> Step:
        for parameter in self.model.parameters():
            parameter.grad = None
        gc.collect()
        resident = held_bytes(self.model, self.inputs)
        random.seed(number)
        np.random.seed(number)  # models of speech mask what they hear by it
        torch.manual_seed(number)
        began = time.perf_counter()
        with elbowroom.measure() as taken:
            output = self.model(**self.inputs)
            loss = output if self.outside is None else self.outside(output)
            loss.backward()
            value = loss.detach()
            del output, loss
        self.seconds = time.perf_counter() - began
        self.peak = max(self.peak, resident + taken.peak_bytes)
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in self.model.named_parameters()}
        return Step(value, gradients, {n: b.clone() for n, b in self.model.named_buffers()})


def loss_of(output: Any) -> torch.Tensor:
    return first_numbers(output).float().square().mean()


def held_bytes(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> int:
    tensors = [*model.parameters(), *model.buffers(), *inputs.values()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def verdict(found: Sequence[Step], expected: Sequence[Step], peak: int, budget: int, said: Sequence[str]) -> str:
    for ours, plain in zip(found, expected, strict=True):
        for where, a, b in differences(ours, plain):
            return f"WRONG: {where} differs by {a:.2g} where its largest number is {b:.2g}"
    if peak > budget:
        return "said" if said else f"OVER IN SILENCE: {peak - budget:,} bytes, {peak / budget - 1:.1%}"
    return GOOD


def differences(ours: Step, plain: Step) -> Iterator[tuple[str, float, float]]:
    pairs = [("the loss", ours.loss, plain.loss)]
    pairs += [(f"gradient of {name}", ours.gradients[name], value) for name, value in plain.gradients.items()]
    pairs += [(f"buffer {name}", ours.buffers[name], value) for name, value in plain.buffers.items()]
    largest = max((size_of(g) for g in plain.gradients.values() if g is not None), default=0.0)
    for where, a, b in pairs:
        if a is None or b is None:
            if a is not b:
                yield f"{where} (one is None)", 0.0, 0.0
        elif not torch.equal(a, b):
            most = max(size_of(b), 1e-3 * largest if where.startswith("gradient") else 0.0)
            apart_by = size_of(a - b) if torch.equal(a.isnan(), b.isnan()) else float("inf")
            if apart_by > CLOSE * most:
                yield where, apart_by, most


def size_of(value: torch.Tensor) -> float:
    """The largest number, whatever its sign; what is no number counts as 0."""
    return float(value.abs().nan_to_num(0.0).max()) if value.numel() else 0.0


@contextmanager
def hearing(into: list[str]) -> Iterator[None]:
    """What elbowroom says in the block."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    into += [str(each.message) for each in caught if str(each.message).startswith("elbowroom")]


def said_of(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {' '.join(str(failure).split())}"[:240]


# --- showing -------------------------------------------------------------------------------------------------


def line(row: Judged) -> str:
    if row.failed:
        return f"{row.name}: FAILED, {row.failed}"
    went = "; ".join(f"{what}: {how}" for what, how in row.budgets.items() if how != GOOD) or "all kept"
    least = f"least {row.least_bytes / row.plain_bytes:.0%} of plain" if row.plain_bytes else ""
    return f"{row.name}: {row.planned}, {went}, {least}, fitted in {row.fit_s:.1f} s"


def summary(rows: Sequence[Judged]) -> str:
    built = [row for row in rows if not row.unbuilt]
    if not built:
        return "No model could be built."
    planned = Counter(row.planned or "failed" for row in built)
    went = Counter(how.split(":")[0] for row in built for how in row.budgets.values())
    lines = [
        f"{len(built)} models, {len(rows) - len(built)} more could not be built by the rule.",
        "Planned: " + ", ".join(f"{how} {count}" for how, count in planned.most_common()),
        "Budgets: " + ", ".join(f"{how} {count}" for how, count in went.most_common()),
    ]
    bad = [row for row in built if not row.is_good]
    return "\n".join([*lines, *(["", "Not as they should be:"] if bad else []), *(line(row) for row in bad)])


def page(rows: Sequence[Judged], options: argparse.Namespace) -> str:
    built = [row for row in rows if not row.unbuilt]
    head = [
        "# Models that nobody chose",
        "",
        "Each model is drawn by chance and made small by a rule. Three steps are compared with plain execution",
        "at three budgets: what plain execution takes, half of the way from there to the least, and the least.",
        "",
        f"`python benchmarks/any_model.py --models {options.models} --seed {options.seed}` on {options.device}, "
        f"PyTorch {torch.__version__.partition('+')[0]}:",
        "",
        "```",
        summary(rows),
        "```",
        "",
        "| model | planned | as plain | half | the least | least, of plain | fit, s |",
        "| --- | --- | --- | --- | --- | ---: | ---: |",
    ]
    for row in sorted(built, key=lambda row: row.name):
        went = " | ".join(row.budgets.get(what, "–").replace("|", "/") for what in SHARES)
        share = f"{row.least_bytes / row.plain_bytes:.0%}" if row.plain_bytes and row.least_bytes else "–"
        head.append(f"| {row.name} | {row.planned or row.failed} | {went} | {share} | {row.fit_s:.1f} |")
    return "\n".join([*head, ""])


if __name__ == "__main__":
    sys.exit(main())
