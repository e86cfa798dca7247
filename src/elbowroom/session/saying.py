"""What a session says: warnings, each once, and refusals that state the least budget and what fills it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

from torch import nn

from elbowroom.errors import BudgetTooSmall, Unplanned, first_line
from elbowroom.execute.plannable import Plannable
from elbowroom.plan.planner import Planned
from elbowroom.plan.together import least_together, peak_together
from elbowroom.plan.values.moves import carriers
from elbowroom.plan.words import sizes_in_words
from elbowroom.session.options import Options
from elbowroom.step.allocator import budget_for
from elbowroom.step.graph import StepGraph
from elbowroom.step.operations import Run
from elbowroom.units import format_bytes


def say_unplanned(model: nn.Module, options: Options, why: str, said: set[str]) -> None:
    """Part of a model runs outside the plan: an error if that is forbidden, else a warning, once for each reason."""
    message = (
        f"elbowroom: {type(model).__name__} is not planned, so its budget of "
        f"{format_bytes(options.budget_bytes)} is not kept: {why}"
    )
    if options.strict:
        raise Unplanned(message)
    if why not in said:
        said.add(why)
        warnings.warn(message, stacklevel=5)


def over_budget(model: nn.Module, budget: int, start: int, taken: int, unplanned: str) -> str:
    """The sentence for a step that took more than its budget."""
    cause = unplanned or "something that is not planned took it, such as a loss outside, or was there before"
    return (
        f"elbowroom: a step of {type(model).__name__} took {format_bytes(taken)}, {format_bytes(taken - budget)} "
        f"more than its budget of {format_bytes(budget)}: {cause}. When it began, {format_bytes(start)} were in use. "
        "From the next step on as much is left free"
    )


def short_of_room(refusal: BudgetTooSmall) -> str:
    """Why a budget is not kept although everything is planned."""
    least = format_bytes(refusal.least_budget)
    return f"something outside the plan takes more than is left for it; allow at least {least}"


def say_fallback(what: str, why: str, said: set[str]) -> None:
    """Fused kernels could not serve: say so once for each reason. The budget is kept all the same."""
    if why not in said:
        said.add(why)
        warnings.warn(
            f"elbowroom: {what} runs with PyTorch's own kernels, within its budget but slower: {why}", stacklevel=6
        )


def too_many_shapes(seen: int) -> str:
    return f"it has seen {seen} shapes already; raise max_shapes or pad to fewer shapes"


def ran_without_program(left_out: str) -> str:
    """Why a step in parts was planned and ran otherwise. `left_out` says what the rest of it keeps."""
    return f"PyTorch ran it without the planned program ({left_out}); something it checks has changed"


def no_backward(is_loss_inside: bool) -> str:
    """Why a step that was traced has no graph with a backward."""
    result = "its loss" if is_loss_inside else "nothing that it returns"
    verb = "does not depend" if is_loss_inside else "depends"
    return (
        f"{result} {verb} on a tensor that needs a gradient, so that there is no backward; look for frozen "
        "parameters, detach() and no_grad()"
    )


def compiling_failed(failure: Exception) -> str:
    failure = getattr(failure, "inner_exception", failure)  # Dynamo's own report says only which backend it was
    kind = "" if isinstance(failure, RuntimeError) else f"{type(failure).__name__}: "
    return f"compiling it failed: {kind}{first_line(failure)}"


def too_small(
    budget: int, resident: Mapping[str, int], graphs: Sequence[Plannable], measured: int = 0, *, kept: bool = False
) -> BudgetTooSmall:
    """The error for a budget that no plan of these graphs fits. `measured` is the lowest peak seen, if one was.

    `kept`: gradients of an earlier backward are there.
    """
    least = least_together([graph.planner for graph in graphs])
    cuda = graphs[0].device.type == "cuda"
    needed = budget_for(max(measured, peak_together(least)), sum(resident.values()), cuda=cuda)
    largest = [*resident.items(), *_largest_at_fullest([graph.planner.graph for graph in graphs], least)]
    what, remedy = "found for this model and batch", "Raise the budget or make the batch smaller"
    if kept:
        remedy += "; or begin steps without gradients: those of an earlier backward are kept, zero_grad() frees them"
    if any(_lacks_host_memory(graph, plan) for graph, plan in zip(graphs, least, strict=True)):
        remedy += "; or pass a larger host_budget=…: values that could move to the host have no room there"
    return budget_too_small(budget, needed, largest, what, remedy)


def _lacks_host_memory(graph: Plannable, plan: Planned) -> bool:
    """Whether a program saves something that would move if the host had room for it."""
    planner = graph.planner
    if planner.platform is None or planner.platform.host_bytes is None:
        return False
    left = planner.platform.host_bytes - plan.prediction.host_bytes
    movable = set(carriers(planner.graph).values())
    return any(op in movable and planner.graph.value_bytes(op) > left for op in plan.program.saved)


def budget_too_small(
    budget: int, needed: int, things: list[tuple[str, int]], what: str, remedy: str
) -> BudgetTooSmall:
    """The sentence both roads say, with the largest of the things that fill the least budget."""
    together = Counter[str]()
    for name, size in things:
        together[name] += size
    largest = [thing for thing in together.most_common(5) if thing[1]]
    return BudgetTooSmall(
        f"budget: {format_bytes(budget)} is too small; the least {what} is {format_bytes(needed)} ({needed} bytes). "
        f"The largest things in it: {sizes_in_words(largest)}. {remedy}",
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


def _largest_at_fullest(graphs: Sequence[StepGraph], plans: Sequence[Planned]) -> list[tuple[str, int]]:
    """What is in memory at the fullest moment of graphs that run in a row, by name."""
    held = [0, *accumulate(plan.prediction.saved_bytes for plan in plans)]
    fullest = max(range(len(plans)), key=lambda i: held[i] + plans[i].prediction.peak_bytes)
    earlier = ("what earlier parts of the model saved for their backward", held[fullest])
    return [*_largest_at_peak(graphs[fullest], plans[fullest]), earlier]


def _largest_at_peak(graph: StepGraph, plan: Planned) -> list[tuple[str, int]]:
    """What the operator at a plan's peak works on, by name."""
    moments = (*plan.prediction.forward_bytes, *plan.prediction.backward_bytes)
    operations = (*plan.program.forward, *plan.program.backward)
    if not moments or max(moments) < plan.prediction.between_bytes:
        return [("what is saved for the backward, when the forward is over", plan.prediction.saved_bytes)]
    highest = operations[moments.index(max(moments))]
    entry = graph.ops[highest.op if isinstance(highest, Run) else highest.value]
    where = f" in {entry.module}" if entry.module else ""
    operator = entry.target.removeprefix("aten.").removesuffix(".default")
    inputs = graph.bytes_of({s for read in entry.reads for s in graph.storages(read)})
    parts = [(f"inputs of {operator}{where}", inputs), (f"output of {operator}{where}", entry.bytes)]
    parts.append((f"workspace of {operator}{where}", entry.workspace))
    rest = max(moments) - inputs - entry.bytes - entry.workspace
    return [*parts, ("other activations at that moment", max(0, rest))]
