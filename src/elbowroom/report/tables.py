"""Tables for people: a solved problem, the methods there are, a simulated schedule."""

from __future__ import annotations

from rich.table import Table

from elbowroom.problem import KINDS, Chain, Join, Problem
from elbowroom.schedule import Simulation, show
from elbowroom.solve import AUTO, METHODS, Result
from elbowroom.solve.auto import SUMMARY
from elbowroom.units import format_bytes

_SHOWN = 24


def result_table(problem: Problem, result: Result) -> Table:
    """What a solver answered, one fact per row."""
    table = facts_table()
    table.add_row("solver", result.solver)
    table.add_row("answer", result.message)
    if result.budget is not None:
        table.add_row("budget", _memory(problem, result.budget))
    if result.least_budget is not None:
        table.add_row("least budget", _memory(problem, result.least_budget))
    if result.simulation is not None:
        _add_simulation(table, problem, result.simulation)
        for name, value in result.notes.items():
            table.add_row(name.replace("_", " "), _shorten(value))
        table.add_row("schedule", _schedule_text(result.simulation))
    return table


def simulation_table(problem: Problem, simulation: Simulation) -> Table:
    table = facts_table()
    table.add_row("answer", "valid")
    _add_simulation(table, problem, simulation)
    if simulation.link_time:
        table.add_row("host link busy", f"{simulation.link_time:g}")
        table.add_row("waiting for it", f"{simulation.stall_time:g}")
    return table


def methods_table() -> Table:
    table = Table("method", "takes", "exact", "what it does", box=None, pad_edge=False)
    table.add_row(AUTO, ", ".join(KINDS), "", SUMMARY)
    for method in METHODS.values():
        table.add_row(method.name, ", ".join(method.kinds), "yes" if method.exact else "", method.summary)
    return table


def facts_table() -> Table:
    """Names and values, one fact per row."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def exactly(size: int) -> str:
    """`8.0 GiB (8589934592)`."""
    return f"{format_bytes(size)} ({size})"


def memory_unit(problem: Problem) -> str:
    return "slots" if isinstance(problem, Join) else "bytes"


def _add_simulation(table: Table, problem: Problem, simulation: Simulation) -> None:
    table.add_row("time", f"{simulation.time:g}")
    if isinstance(problem, Chain):
        without = sum(stage.forward_time + stage.backward_time for stage in problem.stages)
        if without:
            table.add_row("", f"{simulation.time / without:.3f} × the time without recomputation")
    table.add_row("peak", f"{_memory(problem, simulation.peak_bytes)}, during {show(simulation.peak_operation)}")
    forwards = simulation.forwards.total()
    table.add_row("forwards", f"{forwards}, {simulation.recomputed_forwards} of them again")


def _memory(problem: Problem, amount: int) -> str:
    if memory_unit(problem) == "slots":
        return f"{amount} slots"
    return f"{amount}" if amount < 1024 else f"{format_bytes(amount)} ({amount})"


def _schedule_text(simulation: Simulation) -> str:
    shown = "; ".join(show(op) for op in simulation.schedule[:_SHOWN])
    left = len(simulation.schedule) - _SHOWN
    return shown if left <= 0 else f"{shown}; … and {left} more (--json has all)"


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= 400 else f"{text[:400]} …"
