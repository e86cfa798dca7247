"""Does `fit` itself stay within the card? Ten models, each in a process that may take its budget and 600 MiB more.

Budgets lie between the least and what plain execution takes, as estimated in another process. After `fit`, what the
allocator has reserved is compared with the budget; then twenty steps run with AdamW.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import Case, bert, clip, densenet, gpt2, inception, llama, resnet, t5, unet, vgg, vit

import elbowroom
from elbowroom.errors import BudgetTooSmall

EXTRA_BYTES = 600 * 2**20
STEPS = 20
MODELS = {
    "gpt2": partial(gpt2, 8, 768, 12, 8, 1024),
    "llama": partial(llama, 6, 1024, 16, 4, 4096, 4, 1024),
    "bert": partial(bert, 8, 768, 12, 16, 512),
    "t5": partial(t5, 4, 512, 8, 2048, 16, 384),
    "clip": partial(clip, 6, (512, 768), 64),
    "vit": partial(vit, "vit_base_patch16_224", 48),
    "resnet50": partial(resnet, "resnet50", 64),
    "densenet121": partial(densenet, "densenet121", 32),
    "inception_v3": partial(inception, 48),
    "unet": partial(unet, 8),
    "vgg16": partial(vgg, "vgg16", 48),
}


def main() -> int:
    options = arguments()
    if options.cell:
        print(json.dumps(capped(*options.cell)))
        return 0
    cells = [(name, kernels) for name in options.models for kernels in options.kernels]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = []
        for row in pool.map(lambda cell: run_cell(cell, options.limit), cells):
            rows.append(row)
            print(table([row]).splitlines()[-1], flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))
    print(f"\n{table(rows)}")
    return int(any(row.get("failed") for row in rows))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--kernels", nargs="+", default=["inductor", "torch"], choices=["inductor", "torch"])
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for one cell")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_cell(cell: tuple[str, str], limit_s: float) -> dict[str, Any]:
    row: dict[str, Any] = {"model": cell[0], "kernels": cell[1]}
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--cell", *cell], capture_output=True, text=True, check=False, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return {**row, "failed": f"took more than {limit_s:.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {**row, "failed": (done.stderr.strip().splitlines() or ["no output"])[-1][:160]}
    return {**row, **json.loads(lines[-1])}


def capped(name: str, kernels: str) -> dict[str, Any]:
    """One model in this process, which is capped before the model is fitted."""
    with torch.device("cuda"):
        case = MODELS[name]()
    model = case.model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    budget = chosen_budget(case, optimizer)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((budget + EXTRA_BYTES) / total)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with warnings.catch_warnings(record=True) as said, torch.autocast("cuda", torch.bfloat16):
        warnings.simplefilter("always")
        try:
            fitted = fit(case, optimizer, budget, kernels)
        except BudgetTooSmall as refusal:  # fused kernels may need more than was estimated
            budget = int(1.02 * refusal.least_budget)
            torch.cuda.set_per_process_memory_fraction((budget + EXTRA_BYTES) / total)
            fitted = fit(case, optimizer, budget, kernels)
        torch.cuda.synchronize()
        reserved = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        peak = 0
        for _ in range(STEPS):
            optimizer.zero_grad()
            fitted(*case.inputs, case.target).backward()
            torch.cuda.synchronize()
            peak = max(peak, torch.cuda.max_memory_allocated())
            optimizer.step()
    words = [str(each.message) for each in said if str(each.message).startswith("elbowroom")]
    return {
        "budget": budget,
        "reserved_after_fit": reserved,
        "peak": peak,
        "said": words,
        "failed": "" if peak <= budget or words else "over budget in silence",
    }


def fit(case: Case, optimizer: torch.optim.Optimizer, budget: int, kernels: str) -> Any:
    return elbowroom.fit(
        case.model,
        *case.inputs,
        case.target,
        budget=budget,
        loss=case.loss,
        optimizer=optimizer,
        kernels=kernels,
    )


def chosen_budget(case: Case, optimizer: torch.optim.Optimizer) -> int:
    """A third of the way from the least to plain execution."""
    with torch.autocast("cuda", torch.bfloat16):
        plan = elbowroom.plan(
            case.model,
            *case.inputs,
            case.target,
            budget="10TiB",
            loss=case.loss,
            optimizer=optimizer,
            kernels="torch",
            times="estimate",
        )
    return plan.resident_bytes + int(0.45 * (plan.plain_peak_bytes - plan.resident_bytes)) + EXTRA_BYTES // 4


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'model':14}{'kernels':10}{'budget MiB':>12}{'reserved':>10}{'share':>8}{'peak':>10}{'share':>8}  remark"
    ]
    for row in rows:
        if "budget" not in row:
            lines.append(f"{row['model']:14}{row['kernels']:10}  {row['failed']}")
            continue
        budget, reserved, peak = (row[name] / 2**20 for name in ("budget", "reserved_after_fit", "peak"))
        remark = row["failed"] or "; ".join(row["said"])[:120]
        shown = f"{reserved:10,.0f}{reserved / budget:8.1%}{peak:10,.0f}{peak / budget:8.1%}"
        lines.append(f"{row['model']:14}{row['kernels']:10}{budget:12,.0f}{shown}  {remark}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
