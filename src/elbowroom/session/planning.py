"""Planning captured graphs within a budget: what sessions and the compile backend do in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from elbowroom.capture.fingerprint import fingerprint
from elbowroom.capture.joint_graph import Captured
from elbowroom.capture.torch_version import TORCH
from elbowroom.errors import BudgetTooSmall, HostMemoryRefused, InputError, Unplanned
from elbowroom.execute.emitter import copied_gradients
from elbowroom.execute.plannable import Plannable
from elbowroom.execute.region import Region
from elbowroom.measure.measured import Measured, measured
from elbowroom.measure.random_state import random_state_kept
from elbowroom.measure.resident import in_use, rounded
from elbowroom.plan.planner import Planned, Planner
from elbowroom.plan.together import peak_together, plan_together
from elbowroom.progress import progress_bar
from elbowroom.session.host_link import STILL, Moving
from elbowroom.session.saying import compiling_failed, neither_fits, too_small
from elbowroom.step.allocator import room_within
from elbowroom.step.referee import Surroundings
from elbowroom.units import format_bytes

if TYPE_CHECKING:
    from elbowroom.execute.trials import Trials

# Of a peak, on a GPU, that PyTorch's kernels and the allocator may take more than predicted: 1.1 % is the most that
# was seen of nine models at 63 budgets, and where everything is saved, a wide margin costs nothing.
_UNFORESEEN = 0.05

_T = TypeVar("_T")


class Planners:
    """Makes planners and keeps them. A graph that is traced anew, as everything is after an error, is planned with
    what was found for it before: a budget that was kept is not refused then."""

    def __init__(self) -> None:
        self._known: dict[str, list[Planner]] = {}

    def of(self, captured: Captured, around: Surroundings, moving: Moving = STILL) -> Planner:
        known = self._known.setdefault(fingerprint(captured), [])
        for planner in known:
            same = planner.platform == moving.platform and planner.prefers_moves == moving.preferred
            if same and planner.around == around and planner.graph == captured.graph:
                return planner
        planner = Planner(captured.graph, around, platform=moving.platform, prefers_moves=moving.preferred)
        known.append(planner)
        return planner


def plannable(
    region: Region,
    graph: Measured,
    planners: Planners,
    *,
    loss_inside: bool,
    late: Mapping[int, nn.Parameter] | None = None,
    moving: Moving = STILL,
) -> Plannable:
    """A measured graph with its planner. `late` are parameters that have no gradient before the backward makes it."""
    around = surroundings(graph, loss_inside, late or {})
    return Plannable(region, graph, planners.of(graph.captured, around, moving))


def surroundings(graph: Measured, loss_inside: bool, late: Mapping[int, nn.Parameter]) -> Surroundings:
    """What to reserve around a graph.

    A loss outside gets room for two more copies of the outputs and one of their gradients: `square().mean()`, and
    cross entropy of logits that are cast, take as much at once.
    """
    step, device = graph.captured.graph, graph.captured.device
    outputs = 2 * step.bytes_of({s for op in step.results for s in step.storages(op)})
    outputs += step.bytes_of({s for op in step.arriving for s in step.storages(op)})
    return Surroundings(
        outside_bytes=0 if loss_inside else outputs,
        keeps_arriving=TORCH < (2, 13),  # since then autograd lets go of the gradients it hands to a function
        state_bytes=torch.default_generator.get_state().numel() if device.type == "cpu" else 0,
        late={i: rounded(p.numel() * p.element_size(), device) for i, p in late.items()},
        copied=copied_gradients(graph.captured),
    )


def plan_as_predicted(graphs: Sequence[Plannable], budget: int, resident: Mapping[str, int]) -> list[Planned] | None:
    """The fastest programs that are predicted to fit; None if none do."""
    room = room_within(budget, sum(resident.values()), cuda=_on_cuda(graphs), is_measured=True)
    with progress_bar("planning") as report:
        return plan_together([graph.planner for graph in graphs], room, report=report)


def needs_trials(graphs: Sequence[Plannable], budget: int, resident: Mapping[str, int]) -> bool:
    """Whether predictions are not exact and the difference could matter: with fused kernels, and on a GPU."""
    if any(graph.measured.is_fused for graph in graphs):
        return True
    if not _on_cuda(graphs):
        return False
    room = room_within(budget, sum(resident.values()), cuda=True, is_measured=True)
    return (1 + _UNFORESEEN) * peak_together([graph.planner.everything for graph in graphs]) > room


def plan_on_trial(
    trials: Trials, budget: int, resident: Mapping[str, int], compilations: int, *, kept: bool = False
) -> list[Planned]:
    """The fastest programs that were measured within the budget."""
    graphs = trials.graphs
    room = room_within(budget, sum(resident.values()), cuda=_on_cuda(graphs), is_measured=True)
    fused = any(graph.measured.is_fused for graph in graphs)
    before = in_use(graphs[0].device)
    with random_state_kept(), progress_bar("planning and compiling" if fused else "planning") as report:
        tried = trials.best(room, compilations, report)
        if tried is None:
            trials.measure_least(room)
    if tried is None:
        # What trials leave behind, such as a library's workspace, is there when the named budget is given.
        left = max(0, in_use(graphs[0].device) - before)
        there = {**resident, "other": resident.get("other", 0) + left} if left else resident
        raise too_small(budget, there, graphs, trials.least_bytes, kept=kept)
    return tried.measured


def plan_one(
    region: Region,
    planners: Planners,
    *,
    budget: int,
    resident: Mapping[str, int],
    estimate: bool,
    loss_inside: bool,
    least: bool = False,
) -> Planned:
    """Plan and install one graph by itself in the middle of a step, with PyTorch's kernels, of which it is known what
    they take: the fastest program that fits, or the `least`, whatever fits."""
    traced = region.traced.unfused or region.traced
    free_bytes = budget - sum(resident.values())
    costs = measured(traced, given=region.given, estimate=estimate, free_bytes=free_bytes)
    graph = plannable(region, costs, planners, loss_inside=loss_inside)
    room = room_within(budget, sum(resident.values()), cuda=_on_cuda([graph]))
    planned = graph.planner.least if least else graph.planner.best(room)
    if planned is None:
        raise too_small(budget, resident, [graph])
    graph.install(planned)
    return planned


def planned_all(plans: Iterable[Callable[[], _T]]) -> list[_T]:
    """What several steps are planned to be. If some do not fit, the refusal is the one that names the most bytes,
    with which all of them fit."""
    found: list[_T] = []
    refusals: list[BudgetTooSmall] = []
    for plan in plans:
        try:
            found.append(plan())
        except BudgetTooSmall as refusal:
            refusals.append(refusal)
    if refusals:
        raise max(refusals, key=lambda refusal: refusal.least_budget)
    return found


def fused_or_plain(fused: Callable[[], _T], plain: Callable[[], _T], say: Callable[[str], None]) -> _T:
    """What fused kernels give; where they fail or do not fit, what PyTorch's give, and the reason is said."""
    try:
        return fused()
    except (HostMemoryRefused, InputError, Unplanned):
        raise
    except BudgetTooSmall as refusal:
        failure: Exception = refusal
        why = f"compiled, it needs at least {format_bytes(refusal.least_budget)}"
    except Exception as other:
        failure, why = other, compiling_failed(other)
    try:
        found = plain()
    except BudgetTooSmall as refusal:
        raise neither_fits(failure, refusal) from None
    say(why)
    return found


def _on_cuda(graphs: Sequence[Plannable]) -> bool:
    return graphs[0].device.type == "cuda"
