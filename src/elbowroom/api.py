"""`fit` and `plan`: a model, a batch, a number of bytes."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from elbowroom.capture.unplanned import hooked_modules
from elbowroom.errors import ElbowroomError, InputError
from elbowroom.execute.chain_road import ChainSession
from elbowroom.execute.session import Session
from elbowroom.execute.settings import Settings, choose_kernels
from elbowroom.execute.verify import verify_step
from elbowroom.measuring.resident import device_bytes
from elbowroom.measuring.stages import stages_of
from elbowroom.plans import Plan
from elbowroom.units import parse_bytes

_LOG = logging.getLogger("elbowroom")

if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 11):
    raise ElbowroomError(f"elbowroom needs PyTorch 2.11 or newer, and this is {torch.__version__}")


def fit(
    model: nn.Module,
    *example: Any,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    stages: Sequence[nn.Module] | None = None,
    plan: Plan | None = None,
    forwards: int = 1,
    verify: bool = False,
    strict: bool = False,
    max_shapes: int = 8,
    times: str = "measure",
    kernels: str = "auto",
    compilations: int = 3,
    cuda_graphs: bool = True,
    accumulates: bool = False,
) -> Any:
    """The model, to be trained as before, its steps staying within `budget` bytes with the same gradients.

    `example` is what the model will be called with; a single mapping means keyword arguments. With `loss`, call the
    result with the target as last argument (`loss(output, target)`), or as before if `loss` takes the output alone;
    it returns the loss. Pass `optimizer` so that its state is counted. `stages` cuts the model by hand. `plan` is one
    made earlier. `forwards` is how many forwards wait for one backward. `verify` compares the first step with plain
    execution. `strict` raises where part of the model would run outside the plan. At most `max_shapes` shapes of
    input are planned. `times` is "measure", or "estimate" to plan without running operators: then workspaces are
    not known either, and the budget may be exceeded by them. `kernels` are "torch", PyTorch's own, whose gradients
    are those of plain execution bit for bit; "inductor", fused ones, which give what `torch.compile` gives; or
    "auto", fused ones where the model is on a GPU and a compiler is there. For fused ones at most `compilations`
    plans are compiled and measured for a budget; with `cuda_graphs` they are replayed as such where that is faster,
    which holds their memory between steps. Steps are planned to begin without gradients, as after `zero_grad()`; the
    first that begins with some is planned again, to keep them. `accumulates` plans for that at once.
    """
    options = _Options(
        budget,
        optimizer,
        loss,
        stages,
        plan,
        forwards,
        strict,
        max_shapes,
        times,
        kernels,
        compilations,
        cuda_graphs,
        accumulates,
    )
    session = _session(model, example, options)
    if example and verify:
        verify_step(session, *_call(example))
    return _fitted(model, session)


def plan(
    model: nn.Module,
    *example: Any,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    stages: Sequence[nn.Module] | None = None,
    forwards: int = 1,
    strict: bool = False,
    times: str = "measure",
    kernels: str = "auto",
    compilations: int = 3,
    cuda_graphs: bool = True,
    accumulates: bool = False,
) -> Plan:
    """What `fit` would do, to look at, save or compare. The model is left as it is."""
    if not example:
        raise InputError("example", "missing; pass what the model is called with")
    options = _Options(
        budget,
        optimizer,
        loss,
        stages,
        None,
        forwards,
        strict,
        1,
        times,
        kernels,
        compilations,
        cuda_graphs,
        accumulates,
    )
    session = _session(model, example, options)
    (entry,) = session.entries.values()
    if entry.plan is None:
        raise ElbowroomError(f"{type(model).__name__} cannot be planned: {entry.unplanned}")
    return entry.plan


@dataclass(frozen=True)
class _Options:
    budget: int | str
    optimizer: torch.optim.Optimizer | None
    loss: Callable[..., torch.Tensor] | None
    stages: Sequence[nn.Module] | None
    plan: Plan | None
    forwards: int
    strict: bool
    max_shapes: int
    times: str
    kernels: str
    compilations: int
    cuda_graphs: bool
    accumulates: bool


def _session(model: nn.Module, example: tuple[Any, ...], options: _Options) -> Session | ChainSession:
    """A session that has planned the example, on the road that can take the model."""
    _check(model, example, options)
    settings = Settings(
        budget_bytes=parse_bytes(options.budget, device_bytes=device_bytes(model)),
        optimizer=options.optimizer,
        loss_inside=options.loss is not None,
        strict=options.strict,
        max_shapes=options.max_shapes,
        forwards=options.forwards,
        estimate=options.times == "estimate",
        plan=options.plan,
        kernels="torch" if options.stages is not None else choose_kernels(options.kernels, model.parameters()),
        compilations=options.compilations,
        cuda_graphs=options.cuda_graphs,
        accumulates=options.accumulates,
    )
    args, kwargs = _call(example)
    takes_target = options.loss is not None and _takes_target(options.loss)
    make_step = partial(_step, loss=options.loss, takes_target=takes_target, arguments=len(example))
    why = _why_by_stages(model, options)
    if why:
        count = len(example) if takes_target else 1
        chain = ChainSession(model, make_step, settings, options.stages, options.loss, count, why)
        if example:
            chain.prepare(args, kwargs)
        _LOG.warning("elbowroom runs %s stage by stage: %s", type(model).__name__, why)
        return chain
    session = Session(model, make_step, settings)
    if example:
        session.prepare(args, kwargs)
    return session


def _check(model: nn.Module, example: tuple[Any, ...], options: _Options) -> None:
    if not isinstance(model, nn.Module):
        raise InputError("model", f"must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, Fitted):
        raise InputError("model", "is fitted already; fit the original")
    if options.times not in ("measure", "estimate"):
        raise InputError("times", f'must be "measure" or "estimate", not {options.times!r}')
    choose_kernels(options.kernels, ())
    if options.kernels == "inductor" and options.stages is not None:
        raise InputError("kernels", "fused ones are for traced models, not for stages cut by hand")
    for name in ("max_shapes", "forwards", "compilations"):
        if getattr(options, name) < 1:
            raise InputError(name, "must be at least 1")
    for i, stage in enumerate(options.stages or ()):
        if not isinstance(stage, nn.Module):
            raise InputError(f"stages[{i}]", "must be a torch.nn.Module, so that its parameters are known")
    if options.stages is not None and options.forwards > 1:
        raise InputError("forwards", "more than one is for traced models, not for stages cut by hand")
    if options.stages is not None and options.plan is not None:
        raise InputError("plan", "is for programs, not for stages cut by hand; leave one of them out")
    keywords = len(example) == 1 and isinstance(example[0], Mapping)
    if keywords and options.loss is not None and _takes_target(options.loss):
        raise InputError("loss", "takes a target, and keyword arguments have no last one; write loss=lambda out: …")


def _why_by_stages(model: nn.Module, options: _Options) -> str:
    """Why a model goes stage by stage; empty if it is to be traced."""
    if options.stages is not None:
        return "stages were given"
    hooked = hooked_modules(model)
    if hooked and len(stages_of(model)) > 1:
        return f"module {hooked[0]!r} has a backward hook, which tracing does not see"
    return ""


def _step(
    model: nn.Module, loss: Callable[..., torch.Tensor] | None, takes_target: bool, arguments: int
) -> Callable[..., Any]:
    """What runs within the budget: the model, and the loss if it is given.

    Called without a target, with one argument less than the example had, it answers like the model alone.
    """
    if loss is None:

        def step(*args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

    elif takes_target:

        def step(*args: Any, **kwargs: Any) -> Any:
            if len(args) < arguments:
                return model(*args, **kwargs)
            return loss(model(*args[:-1], **kwargs), args[-1])

    else:

        def step(*args: Any, **kwargs: Any) -> Any:
            return loss(model(*args, **kwargs))

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
        return _as_it_is, (_original(self),)


def _fitted(model: nn.Module, session: Session | ChainSession) -> Any:
    original = type(model)
    kind = type(f"Fitted{original.__name__}", (Fitted, original), {"__slots__": ("elbowroom",)})
    fitted: Any = object.__new__(kind)
    fitted.__dict__ = model.__dict__
    object.__setattr__(fitted, "elbowroom", session)
    return fitted


def _as_it_is(model: nn.Module) -> nn.Module:
    return model


def _original(fitted: Any) -> nn.Module:
    return fitted.elbowroom.model  # type: ignore[no-any-return]
