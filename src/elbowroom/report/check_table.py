"""The table of `elbowroom verify`: what was compared, and memory against the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from elbowroom.report.tables import exactly, facts_table
from elbowroom.units import format_bytes

if TYPE_CHECKING:
    from elbowroom.session.checking import Check


def check_table(check: Check) -> Table:
    table = facts_table()
    table.add_row("compared", check.said)
    table.add_row("budget", exactly(check.budget_bytes))
    table.add_row("predicted peak", exactly(check.predicted_peak_bytes))
    table.add_row("measured peak", exactly(check.measured_peak_bytes))
    if check.predicted_host_bytes or check.measured_host_bytes:
        limit = "" if check.host_budget_bytes is None else f" of {exactly(check.host_budget_bytes)}"
        table.add_row("planned on the host", f"{exactly(check.predicted_host_bytes)}{limit}")
        table.add_row("measured there", exactly(check.measured_host_bytes))
    over = check.measured_peak_bytes - check.budget_bytes
    answer = "within budget" if check.within_budget else f"over budget by {format_bytes(over)}"
    if not check.host_as_planned:
        more = check.measured_host_bytes - check.predicted_host_bytes
        answer += f", and on the host {format_bytes(more)} more than planned"
    table.add_row("answer", answer)
    return table
