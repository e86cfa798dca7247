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
    over = check.measured_peak_bytes - check.budget_bytes
    table.add_row("answer", "within budget" if check.within_budget else f"over budget by {format_bytes(over)}")
    return table
