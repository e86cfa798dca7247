"""`fit` and `plan`: a model, a batch, a number of bytes."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Unpack

import torch
from torch import nn

from elbowroom.capture.unplanned import backward_hook_in
from elbowroom.errors import ElbowroomError, InputError
from elbowroom.execute.by_stages.measuring import stages_of
from elbowroom.execute.verification import verify_step
from elbowroom.measure.expandable_segments import expand_where_tight
from elbowroom.measure.resident import device_of
from elbowroom.plan.plan import Plan
from elbowroom.session.fitted import fitted
from elbowroom.session.handle import Handle
from elbowroom.session.inputs import check_example, check_model, check_optimizer, checked_loss
from elbowroom.session.options import Options, Wishes
from elbowroom.session.session import Session
from elbowroom.session.stage_session import StageSession

_LOG = logging.getLogger("elbowroom")


def fit(model: nn.Module, *example: Any, budget: int | str, verify: bool = False, **wishes: Unpack[Wishes]) -> Any:
    """The model, to be trained as before, its steps staying within `budget` bytes with the same gradients.

    `example` is what the model will be called with; a single mapping means keyword arguments. `verify` compares the
    first step with plain execution. Further keywords, all optional:

    `optimizer`: pass it so that its state is counted. `loss`: call the result with the target as last argument
    (`loss(output, target)`), or as before if `loss` takes the output alone; it returns the loss. `stages` cuts the
    model by hand. `plan` is one made earlier, or the path of its file. `forwards` is how many forwards wait for one
    backward. `strict` raises where part of the model would run outside the plan. At most `max_shapes` shapes of
    input are planned. `times` is "measure", or "estimate" to plan without running operators: then workspaces are not
    known either, and the budget may be exceeded by them. `kernels` are "torch", PyTorch's own, whose gradients are
    those of plain execution bit for bit; "inductor", fused ones, which give what `torch.compile` gives; or "auto",
    fused ones where the model is on a GPU and a compiler is there. For fused ones at most `compilations` plans are
    compiled and measured for a budget; with `cuda_graphs` they are replayed as such where that is faster, which
    holds their memory between steps. Steps are planned to begin without gradients, as after `zero_grad()`; the first
    that begins with some is planned again, to keep them. `accumulates` plans for that at once.

    `offload` lets values wait in the host's memory for the backward: "never"; "auto", on a GPU and where that is
    predicted to be faster than computing them again; or "always", wherever the budget does not hold everything. They
    take at most `host_budget` bytes there ("32GiB", or "25%" of what is free), by default half of what is free.
    `link` is how fast values move ("12GB/s"), by default as measured.
    """
    session = _session(model, example, Options.of(budget, wishes), trains=True)
    if example and verify:
        verify_step(session, *_call(example))
    return fitted(model, session)


def plan(model: nn.Module, *example: Any, budget: int | str, **wishes: Unpack[Wishes]) -> Plan:
    """What `fit` would do with the same arguments, to look at, save or compare. The model is left as it is."""
    if not example:
        raise InputError("example", "missing; pass what the model is called with")
    if wishes.get("plan") is not None:
        raise InputError("plan", "is for fit: there is one already")
    session = _session(model, example, Options.of(budget, wishes))
    prepared = session.prepare(*_call(example))
    if prepared.plan is None:
        raise ElbowroomError(f"{type(model).__name__} cannot be planned: {prepared.unplanned}")
    return prepared.plan


def _session(model: nn.Module, example: tuple[Any, ...], options: Options, *, trains: bool = False) -> Handle:
    """A session that has planned the example, on the road that can take the model. It `trains`, or only plans."""
    _check(model, example, options)
    options = options.for_model(model)
    if trains:
        expand_where_tight(device_of(model), options.budget_bytes)
    loss = options.loss
    takes_target = loss is not None and _takes_target(loss)
    make_step = partial(_step, loss=loss, takes_target=takes_target, arguments=len(example))
    if why := _why_by_stages(model, options):
        count = len(example) if takes_target else 1
        session: Handle = StageSession(model, make_step, options, count, why)
        _LOG.warning("elbowroom runs %s stage by stage: %s", type(model).__name__, why)
    else:
        session = Session(model, make_step, options)
    if example:
        enabled = torch.is_grad_enabled()
        try:
            session.prepare(*_call(example))
        except BaseException:  # an interrupt may have come where gradients were about to be enabled again
            torch._C._set_grad_enabled(enabled)
            raise
    return session


def _check(model: nn.Module, example: tuple[Any, ...], options: Options) -> None:
    check_model(model)
    check_example(example)
    check_optimizer(model, options.optimizer)
    keywords = len(example) == 1 and isinstance(example[0], Mapping)
    if keywords and options.loss is not None and _takes_target(options.loss):
        raise InputError("loss", "takes a target, and keyword arguments have no last one; write loss=lambda out: …")


def _why_by_stages(model: nn.Module, options: Options) -> str:
    """Why a model goes stage by stage; empty if it is to be traced."""
    if options.stages is not None:
        return "stages were given"
    hook = backward_hook_in(model)
    return hook if hook and len(stages_of(model)) > 1 else ""


def _step(
    model: nn.Module, loss: Callable[..., torch.Tensor] | None, takes_target: bool, arguments: int
) -> Callable[..., Any]:
    """What runs within the budget: the model, and the loss if it is given.

    Called without a target, with one argument less than the example had, it answers like the model alone.
    """
    if loss is None:

        def step(*args: Any, **kwargs: Any) -> Any:
            return model._call_impl(*args, **kwargs)

    elif takes_target:

        def step(*args: Any, **kwargs: Any) -> Any:
            if len(args) < arguments:
                return model._call_impl(*args, **kwargs)
            return checked_loss(loss(model._call_impl(*args[:-1], **kwargs), args[-1]))

    else:

        def step(*args: Any, **kwargs: Any) -> Any:
            return checked_loss(loss(model._call_impl(*args, **kwargs)))

    return step


def _takes_target(loss: Callable[..., Any]) -> bool:
    """Whether a loss wants more than the output. One whose signature nobody knows is taken to."""
    try:
        parameters = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters.values()
    except (TypeError, ValueError):
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    required = [p for p in positional if p.default is p.empty]
    return len(required) > 1 or any(p.kind is p.VAR_POSITIONAL for p in positional)


def _call(example: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(example) == 1 and isinstance(example[0], Mapping):
        return (), dict(example[0])
    return example, {}
