"""What `elbowroom verify` does and shows: a planned step against a plain one, and against its budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from elbowroom.errors import Mismatch
from elbowroom.plans import Plan
from elbowroom.report.tables import facts_table
from elbowroom.units import format_bytes

if TYPE_CHECKING:
    import torch

    from elbowroom.execute.session import Session
    from elbowroom.factory import Training


@dataclass(frozen=True)
class Check:
    """One step, compared and measured. `said` is what was compared, or the first difference."""

    identical: bool
    against: str
    compared: int
    said: str
    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int

    @property
    def within_budget(self) -> bool:
        return self.measured_peak_bytes <= self.budget_bytes

    @property
    def passed(self) -> bool:
        return self.identical and self.within_budget

    def to_json(self) -> dict[str, Any]:
        report: dict[str, Any] = {
            "feasible": True,
            "identical": self.identical,
            "against": self.against,
            "compared": self.compared,
            "budget": self.budget_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "measured_peak_bytes": self.measured_peak_bytes,
            "within_budget": self.within_budget,
        }
        return report if self.identical else {**report, "difference": self.said}


def check_step(session: Session, training: Training) -> Check:
    """Run the step as planned and plainly, then once more while its memory is measured."""
    from elbowroom.execute.verify import verify_step

    args, kwargs = training.args, training.kwargs
    plan = session.prepare(args, kwargs).plan
    assert plan is not None
    against, compared, said = "eager", 0, ""
    try:
        verification = verify_step(session, args, kwargs)
    except Mismatch as mismatch:
        said = str(mismatch)
    else:
        against, compared, said = verification.against, verification.compared, str(verification)
    return Check(
        identical=compared > 0,
        against=against,
        compared=compared,
        said=said,
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        measured_peak_bytes=measured_peak(session, plan, args, kwargs, training.optimizer),
    )


def check_table(check: Check) -> Table:
    table = facts_table()
    table.add_row("compared", check.said)
    table.add_row("budget", _exactly(check.budget_bytes))
    table.add_row("predicted peak", _exactly(check.predicted_peak_bytes))
    table.add_row("measured peak", _exactly(check.measured_peak_bytes))
    over = check.measured_peak_bytes - check.budget_bytes
    table.add_row("answer", "within budget" if check.within_budget else f"over budget by {format_bytes(over)}")
    return table


def measured_peak(
    session: Session,
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None,
) -> int:
    """The most that was allocated during forward and backward, with everything that is there all the time.

    Gradients are there beforehand if the plan is for that, as in the middle of accumulation. On the CPU, whose
    allocator does not tell what is resident, that part is the plan's.
    """
    import torch

    from elbowroom.measuring.memory import measure

    for parameter in session.model.parameters():
        if plan.late_gradients:
            parameter.grad = None
        elif parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    with measure(plan.setting["device"], timeline=False) as taken:
        outputs = session(*args, **kwargs)
        torch.autograd.backward(loss_of(outputs))
    del outputs
    if taken.device == "cpu":
        return plan.start_bytes + taken.peak_bytes
    awaited = 0 if optimizer is None or optimizer.state else plan.resident.get("optimizer", 0)
    return taken.start_bytes + taken.peak_bytes + awaited


def loss_of(outputs: Any) -> torch.Tensor:
    """The loss among a model's outputs: what is called so, else the sum of everything that has a gradient."""
    import torch
    from torch.utils._pytree import tree_leaves

    named = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(named, torch.Tensor) and named.requires_grad:
        return named.sum()
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack([leaf.sum().float() for leaf in leaves]).sum() if len(leaves) > 1 else leaves[0].sum()


def _exactly(size: int) -> str:
    return f"{format_bytes(size)} ({size})"
