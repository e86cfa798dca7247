"""What `elbowroom verify` does: runs a planned step against a plain one, against its budget, and against what it has
on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from elbowroom.errors import Mismatch
from elbowroom.execute.verification import verify_step
from elbowroom.measure.memory import measure
from elbowroom.plan.plan import Plan
from elbowroom.session.handle import Handle


@dataclass(frozen=True)
class Check:
    """One step, compared and measured. `said` is what was compared, or the first difference.

    Host bytes are those held for values that move, as planned and as measured.
    """

    identical: bool
    against: str
    compared: int
    said: str
    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    host_budget_bytes: int | None
    predicted_host_bytes: int
    measured_host_bytes: int

    @property
    def within_budget(self) -> bool:
        return self.measured_peak_bytes <= self.budget_bytes

    @property
    def host_as_planned(self) -> bool:
        """Whether no more is on the host than was planned, which is within the host budget."""
        return self.measured_host_bytes <= self.predicted_host_bytes

    @property
    def passed(self) -> bool:
        return self.identical and self.within_budget and self.host_as_planned

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
            "host_budget": self.host_budget_bytes,
            "predicted_host_bytes": self.predicted_host_bytes,
            "measured_host_bytes": self.measured_host_bytes,
            "host_as_planned": self.host_as_planned,
        }
        return report if self.identical else {**report, "difference": self.said}


class Taken(NamedTuple):
    """The most that a step had at once: on its device, and on the host for values that move."""

    peak_bytes: int
    host_bytes: int


def check_step(session: Handle, args: tuple[Any, ...], kwargs: Mapping[str, Any], held_by_others: int = 0) -> Check:
    """Run the step as planned and plainly, then once more while its memory is measured.

    `held_by_others` are bytes that this process held on the host before the session was made.
    """
    plan = session.prepare(args, kwargs).plan
    assert plan is not None
    against, compared, said = "eager", 0, ""
    try:
        verification = verify_step(session, args, kwargs)
    except Mismatch as mismatch:
        said = str(mismatch)
    else:
        against, compared, said = verification.against, verification.compared, str(verification)
    taken = measured_step(session, plan, args, kwargs)
    return Check(
        identical=compared > 0,
        against=against,
        compared=compared,
        said=said,
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        measured_peak_bytes=taken.peak_bytes,
        host_budget_bytes=plan.host_budget_bytes,
        predicted_host_bytes=plan.host_bytes,
        measured_host_bytes=max(0, taken.host_bytes - held_by_others),
    )


def measured_step(session: Handle, plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Taken:
    """The most that was allocated during forward and backward, with everything that is there all the time.

    Gradients are there beforehand if the plan is for that, as in the middle of accumulation. On the CPU, whose
    allocator does not tell what is resident, that part is the plan's.
    """
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
        return Taken(plan.start_bytes + taken.peak_bytes, taken.host_bytes)
    optimizer = session.options.optimizer
    awaited = 0 if optimizer is None or optimizer.state else plan.resident.get("optimizer", 0)
    return Taken(taken.start_bytes + taken.peak_bytes + awaited, taken.host_bytes)


def loss_of(outputs: Any) -> torch.Tensor:
    """The loss among a model's outputs: what is called so, else the sum of everything that has a gradient."""
    named = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(named, torch.Tensor) and named.requires_grad:
        return named.sum()
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack([leaf.sum().float() for leaf in leaves]).sum() if len(leaves) > 1 else leaves[0].sum()
