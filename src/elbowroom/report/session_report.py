"""What `model.elbowroom.report()` shows: the plan in force, in one line, as a table and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elbowroom.units import format_bytes

if TYPE_CHECKING:
    from elbowroom.session.handle import Handle


def session_text(session: Handle) -> str:
    plan = session.plan
    verdict = (
        f"{type(session.model).__name__}: {format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)}, "
        f"{format_bytes(plan.plain_peak_bytes)} without a plan; {plan.extra_time:+.1%} time"
    )
    if plan.traffic:
        verdict += f", {format_bytes(plan.host_bytes)} on the host"
    said = [f"Said so far: {why}" for why in sorted(session.said)]
    return "\n".join([verdict, "", plan.table(), "", plan.picture(), *said])
