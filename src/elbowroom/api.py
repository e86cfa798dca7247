"""`fit` and `plan`: a model, a batch, a number of bytes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from elbowroom.errors import ElbowroomError, InputError
from elbowroom.execute.chain_road import ChainSession
from elbowroom.execute.session import Session, Settings
from elbowroom.execute.verify import verify_step
from elbowroom.measuring.resident import device_bytes
from elbowroom.plans import Plan
from elbowroom.units import parse_bytes


def fit(
    model: nn.Module,
    *example: Any,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    stages: Sequence[Callable[..., Any]] | None = None,
    plan: Plan | None = None,
    verify: bool = False,
    strict: bool = False,
    max_shapes: int = 8,
    times: str = "measure",
) -> Any:
    """The model, to be trained as before, its steps staying within `budget` bytes with the same gradients.

    `example` is what the model will be called with; a single mapping means keyword arguments. With `loss`, call the
    result with the target as last argument (`loss(output, target)`), or as before if `loss` takes the output alone;
    it returns the loss. Pass `optimizer` so that its state is counted. `stages` cuts the model by hand. `plan` is one
    made earlier. `verify` compares the first step with plain execution, and every shape's first. `strict` raises
    where part of the model would run outside the plan. At most `max_shapes` shapes of input are planned. `times` is
    "measure", or "estimate" to plan without running operators.
    """
    session = _session(model, example, budget, optimizer, loss, stages, plan, strict, max_shapes, times)
    args, kwargs = _call(example)
    if example:
        session.prepare(args, kwargs)
        if verify:
            verify_step(session, args, kwargs)
    return _fitted(model, session)


def plan(
    model: nn.Module,
    *example: Any,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    stages: Sequence[Callable[..., Any]] | None = None,
    strict: bool = False,
    times: str = "measure",
) -> Plan:
    """What `fit` would do, to look at, save or compare. The model is left as it is."""
    if not example:
        raise InputError("example", "missing; pass what the model is called with")
    session = _session(model, example, budget, optimizer, loss, stages, None, strict, 1, times)
    args, kwargs = _call(example)
    entry = session.prepare(args, kwargs)
    if entry.plan is None:
        raise ElbowroomError(f"{type(model).__name__} cannot be planned: {entry.unplanned}")
    return entry.plan


def _session(
    model: nn.Module,
    example: tuple[Any, ...],
    budget: int | str,
    optimizer: torch.optim.Optimizer | None,
    loss: Callable[..., torch.Tensor] | None,
    stages: Sequence[Callable[..., Any]] | None,
    plan: Plan | None,
    strict: bool,
    max_shapes: int,
    times: str,
) -> Session | ChainSession:
    if not isinstance(model, nn.Module):
        raise InputError("model", f"must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, Fitted):
        raise InputError("model", "is fitted already; fit the original")
    if times not in ("measure", "estimate"):
        raise InputError("times", f'must be "measure" or "estimate", not {times!r}')
    if max_shapes < 1:
        raise InputError("max_shapes", "must be at least 1")
    settings = Settings(
        budget_bytes=parse_bytes(budget, device_bytes=device_bytes(model)),
        optimizer=optimizer,
        loss_inside=loss is not None,
        strict=strict,
        max_shapes=max_shapes,
        estimate=times == "estimate",
        plan=plan,
    )
    return Session(model, partial(_step, loss=loss), settings)


def _step(model: nn.Module, loss: Callable[..., torch.Tensor] | None) -> Callable[..., Any]:
    """What runs within the budget: the model, and the loss if it is given."""
    if loss is None:

        def step(*args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

    elif _takes_target(loss):

        def step(*args: Any, **kwargs: Any) -> Any:
            return loss(model(*args[:-1], **kwargs), args[-1])

    else:

        def step(*args: Any, **kwargs: Any) -> Any:
            return loss(model(*args, **kwargs))

    return step


def _takes_target(loss: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):  # builtins
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    required = [p for p in positional if p.default is p.empty]
    return len(required) > 1 or any(p.kind is p.VAR_POSITIONAL for p in positional)


def _call(example: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(example) == 1 and isinstance(example[0], Mapping):
        return (), dict(example[0])
    return example, {}


class Fitted:
    """Mixed into the class of a fitted model, which shares everything with the original but how it is called.

    The two have one `__dict__`: parameters, buffers, hooks, `train()` and `state_dict()` are the same. The session
    lives in a slot, so that copies and pickles of the original know nothing of it.
    """

    elbowroom: Session | ChainSession

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.elbowroom(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the original under a session of its own, planned when first called."""
        original = copy.deepcopy(_original(self), memo)
        return _fitted(original, self.elbowroom.again(original))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the original: a plan belongs to one process and one device."""
        return _original(self).__reduce_ex__(protocol)


def _fitted(model: nn.Module, session: Session | ChainSession) -> Any:
    original = type(model)
    kind = type(f"Fitted{original.__name__}", (Fitted, original), {"__slots__": ("elbowroom",)})
    fitted = object.__new__(kind)
    fitted.__dict__ = model.__dict__
    object.__setattr__(fitted, "elbowroom", session)
    return fitted


def _original(fitted: Any) -> nn.Module:
    return fitted.elbowroom.model  # type: ignore[no-any-return]
