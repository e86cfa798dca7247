"""`torch.compile(model, backend="elbowroom", options={"budget": "8GiB"})`: the same programs, one graph at a time.

PyTorch shows a backend each graph only when it first runs, and nothing of the model around it. So each graph is
planned with what the earlier ones have left; `fit` sees all of a model before planning any of it.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from elbowroom.capture.backend import make_backend
from elbowroom.capture.joint_graph import Captured, live_bytes
from elbowroom.errors import InputError
from elbowroom.execute.region import Looks, Region
from elbowroom.measure.measured import measured
from elbowroom.session.options import Options, choose_kernels
from elbowroom.session.planning import fused_or_plain, plan_on_trial, plan_one, plannable
from elbowroom.session.saying import say_fallback
from elbowroom.units import format_bytes, parse_bytes

_OPTIONS = ("budget", "times", "kernels")
_LOG = logging.getLogger("elbowroom")


def elbowroom(graph_module: fx.GraphModule, example_inputs: Any, **given: Any) -> Any:
    """Compile one graph. Registered with PyTorch under the package's name."""
    options = _options(given.get("options") or {}, example_inputs)

    def on_capture(region: Region) -> None:
        if options.fuses or region.traced.device.type == "cuda":
            # Trials need real arguments, and those come with the first call.
            region.at_first = partial(_try, options=options)
        else:
            _plan(region, options)

    def on_refusal(why: str) -> None:
        warnings.warn(f"elbowroom: a graph is not planned: {why}", stacklevel=2)

    looks = Looks()
    backend = make_backend(lambda traced: Region(traced, looks), on_capture, on_refusal, fused=options.fuses)
    return backend(graph_module, example_inputs)


def _options(given: dict[str, Any], example_inputs: Any) -> Options:
    unknown = [name for name in given if name not in _OPTIONS]
    if unknown or "budget" not in given:
        problem = f"has no {unknown[0]!r}" if unknown else 'needs a budget, such as {"budget": "8GiB"}'
        raise InputError("options", f"{problem}; elbowroom takes {', '.join(_OPTIONS)}")
    device_bytes = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    budget = parse_bytes(given["budget"], field="options.budget", device_bytes=device_bytes)
    try:
        options = Options.of(budget, {name: value for name, value in given.items() if name != "budget"})
    except InputError as wrong:
        raise InputError(f"options.{wrong.field}", str(wrong).removeprefix(f"{wrong.field}: ")) from None
    return replace(options, kernels=choose_kernels(options.kernels, example_inputs))


def _plan(region: Region, options: Options) -> None:
    resident = _resident(region.traced)
    planned = plan_one(
        region, budget=options.budget_bytes, resident=resident, estimate=options.estimate, loss_inside=False
    )
    _say_planned(resident, planned.peak_bytes, options)


def _try(region: Region, options: Options) -> None:
    """Where predictions are not exact. If fused kernels fail or do not fit, with PyTorch's, and it is said."""
    unfused = region.traced.unfused
    if unfused is None:
        _plan_on_trial(region, region.traced, options)
        return
    plain = _plan_on_trial if unfused.device.type == "cuda" else _plan_unfused
    fused_or_plain(
        lambda: _plan_on_trial(region, region.traced, options),
        lambda: plain(region, unfused, options),
        lambda why: say_fallback("a graph", why, set()),
    )


def _plan_unfused(region: Region, _: Captured, options: Options) -> None:
    _plan(region, options)


def _plan_on_trial(region: Region, captured: Captured, options: Options) -> None:
    from elbowroom.execute.trials import Trials  # the compiler takes seconds to import

    resident = _resident(captured)
    graph = plannable(region, measured(captured, estimate=options.estimate), loss_inside=False)
    (planned,) = plan_on_trial(Trials([graph]), options.budget_bytes, resident, options.compilations)
    graph.install(replace(planned, recorded=False))
    _say_planned(resident, planned.peak_bytes, options)


def _say_planned(resident: dict[str, int], peak_bytes: int, options: Options) -> None:
    peak = sum(resident.values()) + peak_bytes
    _LOG.info("planned a graph: %s of %s", format_bytes(peak), format_bytes(options.budget_bytes))


def _resident(captured: Captured) -> dict[str, int]:
    """What the graph itself shows of the resident state: its inputs, and the gradients of its parameters."""
    graph, nodes = captured.graph, captured.nodes
    parameters = sum(live_bytes(nodes[i]) for i in graph.parameters)
    inputs = sum(live_bytes(nodes[i]) for i in graph.inputs)
    return {"parameters": parameters, "gradients": parameters, "batch and buffers": inputs - parameters}
