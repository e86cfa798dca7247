"""`torch.compile(model, backend="elbowroom", options={"budget": "8GiB"})`: the same programs, one graph at a time.

PyTorch shows a backend each graph only when it first runs, and nothing of the model around it. So each graph is
planned with what the earlier ones have left, and from the next step on all of them together (`graph_group.py`); `fit`
sees all of a model before planning any of it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from elbowroom.capture.backend import make_backend
from elbowroom.capture.joint_graph import Captured
from elbowroom.errors import BudgetTooSmall, InputError
from elbowroom.execute.plannable import Plannable
from elbowroom.execute.region import Looks, Region
from elbowroom.measure.measured import measured
from elbowroom.plan.planner import Planned
from elbowroom.session.graph_group import GraphGroup
from elbowroom.session.host_link import Moving
from elbowroom.session.inputs import check_is_optimizer
from elbowroom.session.options import Options, choose_kernels
from elbowroom.session.planning import (
    Planners,
    fused_or_plain,
    needs_trials,
    plan_as_predicted,
    plan_on_trial,
    plannable,
)
from elbowroom.session.saying import say_fallback, too_small
from elbowroom.units import parse_bytes

_OPTIONS = ("budget", "times", "kernels", "optimizer", "offload", "host_budget", "link")


def elbowroom(graph_module: fx.GraphModule, example_inputs: Any, **given: Any) -> Any:
    """Compile one graph. Registered with PyTorch under the package's name."""
    asked = given.get("options") or {}
    options = _options(asked, example_inputs)
    group = _group_of(asked)

    def on_capture(region: Region) -> None:
        region.at_first = partial(_plan, group=group, options=options)

    def on_refusal(why: str) -> None:
        warnings.warn(f"elbowroom: a graph is not planned: {why}", stacklevel=2)

    looks = Looks()
    looks.host_room = group.host_room
    backend = make_backend(lambda traced: Region(traced, looks), on_capture, on_refusal, fused=options.fuses)
    return backend(graph_module, example_inputs)


def _group_of(asked: dict[str, Any]) -> GraphGroup:
    """The group of what one call of `torch.compile` made.

    The object that it made calls the backend, and nothing else tells two calls apart that were given the same
    options. Where something else calls, the dictionary of options stands for it.
    """
    caller = sys._getframe(2).f_locals.get("self")
    if asked and getattr(caller, "kwargs", {}).get("options") is asked:
        if not hasattr(caller, _GROUP):
            setattr(caller, _GROUP, GraphGroup())
        return getattr(caller, _GROUP)  # type: ignore[no-any-return]
    return _OF_OPTIONS.setdefault(id(asked), (asked, GraphGroup()))[1]


_GROUP = "elbowroom_graphs"
_OF_OPTIONS: dict[
    int, tuple[dict[str, Any], GraphGroup]
] = {}  # the dictionaries are kept, or another gets the number


def _options(given: dict[str, Any], example_inputs: Any) -> Options:
    unknown = [name for name in given if name not in _OPTIONS]
    if unknown or "budget" not in given:
        problem = f"has no {unknown[0]!r}" if unknown else 'needs a budget, such as {"budget": "8GiB"}'
        raise InputError("options", f"{problem}; elbowroom takes {', '.join(_OPTIONS)}")
    device_bytes = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    budget = parse_bytes(given["budget"], field="options.budget", device_bytes=device_bytes)
    try:
        check_is_optimizer(given.get("optimizer"))
        options = Options.of(budget, {name: value for name, value in given.items() if name != "budget"})
    except InputError as wrong:
        raise InputError(f"options.{wrong.field}", str(wrong).removeprefix(f"{wrong.field}: ")) from None
    return replace(options, kernels=choose_kernels(options.kernels, example_inputs))


def _plan(region: Region, group: GraphGroup, options: Options) -> None:
    group.plan_first(region, options, partial(_found, region, options, group.moving(options, region.traced.device)))


def _found(
    region: Region, options: Options, moving: Moving, resident: Mapping[str, int], alone: bool
) -> tuple[Plannable, Planned]:
    """The graph and its best program. If fused kernels fail or do not fit, with PyTorch's, and it is said."""
    unfused = region.traced.unfused
    if unfused is None:
        return _best(region, region.traced, options, moving, resident, alone)
    return fused_or_plain(
        lambda: _best(region, region.traced, options, moving, resident, alone=True),
        lambda: _best(region, unfused, options, moving, resident, alone),
        lambda why: say_fallback("a graph", why, set()),
    )


def _best(
    region: Region,
    captured: Captured,
    options: Options,
    moving: Moving,
    resident: Mapping[str, int],
    alone: bool,
) -> tuple[Plannable, Planned]:
    """Measured where predictions are not exact. A graph that is not alone takes the least if nothing fits."""
    costs = measured(captured, given=region.given, estimate=options.estimate)
    graph = plannable(region, costs, Planners(), loss_inside=False, moving=moving)
    budget = options.budget_bytes
    try:
        if needs_trials([graph], budget, resident):
            from elbowroom.execute.trials import Trials  # the compiler takes seconds to import

            (planned,) = plan_on_trial(Trials([graph]), budget, resident, options.compilations)
            return graph, planned
        found = plan_as_predicted([graph], budget, resident)
        if found is None:
            raise too_small(budget, resident, [graph])
    except BudgetTooSmall:
        if alone:
            raise
        return graph, graph.planner.least
    return graph, found[0]
