"""`torch.compile(model, backend="elbowroom", options={"budget": "8GiB"})`: the same programs, one graph at a time.

PyTorch shows a backend each graph only when it first runs, and nothing of the model around it. So each graph is
planned with what the earlier ones have left; `fit` sees all of a model before planning any of it.
"""

from __future__ import annotations

import logging
import warnings
from functools import partial
from typing import Any

import torch
from torch import fx

from elbowroom.capture.backend import make_backend
from elbowroom.capture.joint_graph import live_bytes
from elbowroom.errors import BudgetTooSmall, InputError
from elbowroom.execute.region import Looks, Region
from elbowroom.execute.session import measure_region, random_state_kept, surroundings
from elbowroom.execute.settings import Settings, choose_kernels, compiling_failed, room_within, say_fallback
from elbowroom.execute.too_small import neither_fits, too_small
from elbowroom.planning import Planner
from elbowroom.report.progress import progress_bar
from elbowroom.units import format_bytes, parse_bytes

_OPTIONS = ("budget", "times", "kernels")
_LOG = logging.getLogger("elbowroom")


def elbowroom(graph_module: fx.GraphModule, example_inputs: Any, **given: Any) -> Any:
    """Compile one graph. Registered with PyTorch under the package's name."""
    options = given.get("options") or {}
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown or "budget" not in options:
        problem = f"has no {unknown[0]!r}" if unknown else 'needs a budget, such as {"budget": "8GiB"}'
        raise InputError("options", f"{problem}; elbowroom takes {', '.join(_OPTIONS)}")
    device_bytes = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    budget = parse_bytes(options["budget"], field="options.budget", device_bytes=device_bytes)

    fused = choose_kernels(options.get("kernels", "auto"), example_inputs, field="options.kernels") == "inductor"
    estimate = options.get("times", "measure") == "estimate"

    def on_capture(region: Region) -> None:
        if fused or region.captured.device.type == "cuda":
            # Trials need real arguments, and those come with the first call.
            region.at_first = partial(_try_alone, budget=budget, estimate=estimate)
        else:
            _plan_alone(region, budget, estimate)

    def on_refusal(why: str) -> None:
        warnings.warn(f"elbowroom: a graph is not planned: {why}", stacklevel=2)

    return make_backend(on_capture, on_refusal, Looks(), fused=fused)(graph_module, example_inputs)


def _plan_alone(region: Region, budget: int, estimate: bool) -> None:
    captured = region.captured
    resident = _resident(region)
    planner = _planner(region, estimate)
    planned = planner.best(room_within(budget, resident, captured.device))
    if planned is None:
        raise too_small(budget, resident, [planner], captured.device)
    region.install(planned.program)
    _say_planned(resident, planned.prediction.peak_bytes, budget)


def _try_alone(region: Region, budget: int, estimate: bool) -> None:
    """Where predictions are not exact. If fused kernels fail or do not fit, with PyTorch's, and it is said."""
    captured = region.captured
    if captured.cones is None:
        _tried_alone(region, budget, estimate)
        return
    try:
        _tried_alone(region, budget, estimate)
    except BudgetTooSmall as refusal:
        failure: Exception = refusal
        why = "nothing compiled fits"
    except Exception as other:
        failure, why = other, compiling_failed(other)
    else:
        return
    assert captured.unfused is not None
    region.captured = captured.unfused
    region.programs.clear()
    try:
        (_tried_alone if captured.device.type == "cuda" else _plan_alone)(region, budget, estimate)
    except BudgetTooSmall as refusal:
        raise neither_fits(failure, refusal) from None
    say_fallback("a graph", why, set())


def _tried_alone(region: Region, budget: int, estimate: bool) -> None:
    from elbowroom.execute.trials import Trials

    device = region.captured.device
    room = room_within(budget, resident := _resident(region), device, is_measured=True)
    planner = _planner(region, estimate)
    trials = Trials([region], [planner])
    with random_state_kept(), progress_bar("planning and compiling") as report:
        tried = trials.best(room, Settings.compilations, report)
    if tried is None:
        raise too_small(budget, resident, [planner], device, trials.least_bytes)
    region.install(tried.planned[0].program)
    _say_planned(resident, tried.peak_bytes, budget)


def _planner(region: Region, estimate: bool) -> Planner:
    measure_region(region, estimate)
    return Planner(region.captured.joint, surroundings(region, loss_inside=False))


def _say_planned(resident: dict[str, int], peak_bytes: int, budget: int) -> None:
    peak = sum(resident.values()) + peak_bytes
    _LOG.info("planned a graph: %s of %s", format_bytes(peak), format_bytes(budget))


def _resident(region: Region) -> dict[str, int]:
    """What the graph itself shows of the resident state: its inputs, and the gradients of its parameters."""
    joint, nodes = region.captured.joint, region.captured.nodes
    parameters = sum(live_bytes(nodes[i]) for i in joint.parameters)
    inputs = sum(live_bytes(nodes[i]) for i in joint.inputs)
    return {"parameters": parameters, "gradients": parameters, "batch and buffers": inputs - parameters}
