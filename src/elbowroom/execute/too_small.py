"""What to say when no plan fits: the least budget that has one, and what fills it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from elbowroom.errors import BudgetTooSmall
from elbowroom.execute.settings import budget_for, compiling_failed
from elbowroom.joint import Joint
from elbowroom.planning import Planned, Planner, peak_together
from elbowroom.units import format_bytes


def too_small(
    budget: int,
    resident: Mapping[str, int],
    planners: list[Planner],
    device: torch.device,
    measured: int = 0,
    *,
    kept: bool = False,
) -> BudgetTooSmall:
    """The error for a budget that no plan of these graphs fits. `measured` is the lowest peak seen, if one was.

    `kept`: gradients of an earlier backward are there.
    """
    least = [planner.least for planner in planners]
    needed = budget_for(max(measured, peak_together(least)), resident, device)
    largest = [(name, size) for name, size in resident.items() if size]
    for planner, plan in zip(planners, least, strict=True):
        largest.extend(_largest_at_peak(planner.joint, plan))
    what, remedy = "found for this model and batch", "Raise the budget or make the batch smaller"
    if kept:
        remedy += "; or begin steps without gradients: those of an earlier backward are kept, zero_grad() frees them"
    return budget_too_small(budget, needed, largest, what, remedy)


def budget_too_small(
    budget: int, needed: int, things: list[tuple[str, int]], what: str, remedy: str
) -> BudgetTooSmall:
    """The sentence both roads say, with the largest of the things that fill the least budget."""
    largest = sorted(things, key=lambda thing: -thing[1])[:5]
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
    return BudgetTooSmall(
        f"budget: {format_bytes(budget)} is too small; the least {what} is {format_bytes(needed)} ({needed} bytes). "
        f"The largest things in it: {parts}. {remedy}",
        budget,
        needed,
        largest,
    )


def neither_fits(fused: Exception, unfused: BudgetTooSmall) -> BudgetTooSmall:
    """Why fused kernels could not serve is known, and PyTorch's do not fit: the lower budget, or both reasons."""
    if isinstance(fused, BudgetTooSmall):
        return min(fused, unfused, key=lambda refusal: refusal.least_budget)
    said = f"{unfused}. That is with PyTorch's own kernels, because {compiling_failed(fused)}"
    return BudgetTooSmall(said, unfused.budget, unfused.least_budget, unfused.largest)


def _largest_at_peak(joint: Joint, plan: Planned) -> list[tuple[str, int]]:
    """What the operator at a plan's peak works on, by name."""
    moments = (*plan.prediction.forward_bytes, *plan.prediction.backward_bytes)
    instructions = (*plan.program.forward, *plan.program.backward)
    if not moments or max(moments) < plan.prediction.between_bytes:
        return [("what is saved for the backward", plan.prediction.saved_bytes)]
    at = instructions[moments.index(max(moments))]
    entry = joint.ops[at.op]
    where = f" in {entry.module}" if entry.module else ""
    operator = entry.target.removesuffix(".default")
    inputs = joint.bytes_of({s for read in entry.reads for s in joint.storages(read)})
    parts = [(f"inputs of {operator}{where}", inputs), (f"output of {operator}{where}", entry.bytes)]
    parts.append((f"workspace of {operator}{where}", entry.workspace))
    rest = max(moments) - inputs - entry.bytes - entry.workspace
    return [*parts, ("other values saved or in use then", max(0, rest))]
