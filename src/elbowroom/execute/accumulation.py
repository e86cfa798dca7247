"""Adds a parameter's gradient to its `.grad` inside the backward program, as soon as it exists.

Handing gradients to autograd instead would keep all of them until the program ends. By hand because
`autograd.backward(parameter, gradient)` clones, and because returning None afterwards still lets autograd run the
hooks that data-parallel training puts on the parameter's accumulation node.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

import torch

Accumulate: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]

_on_trial: ContextVar[tuple[Accumulate, Accumulate] | None] = ContextVar("_on_trial", default=None)
_unpacked: ContextVar[bool] = ContextVar("_unpacked", default=False)


def accumulator() -> tuple[Accumulate, Accumulate]:
    """How the running backward takes gradients: functions for values the program owns, and for shared ones.

    Each returns what the program must hand to autograd: None once the gradient is in place. Under
    `torch.autograd.grad`, or `backward(inputs=…)`, nothing may be written to `.grad`.
    """
    if (trial := _on_trial.get()) is not None:
        return trial
    if engine_accumulates():
        return _take, _add_copy
    return _hand_over, _hand_over


@contextmanager
def on_trial(*, keeps: bool) -> Iterator[None]:
    """Have backwards take as much memory for gradients as they would, and leave `.grad` alone.

    They keep the gradients that they make; or let them go, as if added to those of an earlier backward.
    """
    token = _on_trial.set((_as_gradient, _copy) if keeps else (_let_go, _let_go))
    try:
        yield
    finally:
        _on_trial.reset(token)


def is_on_trial() -> bool:
    """Whether a program runs only to be measured, on values that may be made up."""
    return _on_trial.get() is not None


def saved_tensors_are_packed() -> bool:
    """Whether somebody's hooks get what a forward saves now, as with `save_on_cpu` or a checkpoint around a model."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextmanager
def on_unpacked() -> Iterator[None]:
    """In the block, a backward runs with what hooks made of what its forward saved. Its parameters are other tensors
    then, whose `.grad` nobody reads, so that gradients are left to autograd."""
    token = _unpacked.set(True)
    try:
        yield
    finally:
        _unpacked.reset(token)


def _take(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
    return _put(parameter, gradient, _as_gradient)


def _add_copy(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
    """For a gradient whose storage others may hold: it must not become `.grad` itself."""
    return _put(parameter, gradient, _copy)


def _put(
    parameter: torch.Tensor, gradient: torch.Tensor, first: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor | None:
    """Add a gradient to `.grad`; where there is none, `first` makes one of it."""
    if is_autograds(parameter):
        return gradient
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
    else:
        parameter.grad = first(parameter, gradient)
    return None


def _as_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    fits = gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype
    return gradient if fits else _copy(parameter, gradient)


def _copy(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(parameter).copy_(gradient)


def _let_go(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    return None


def _hand_over(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
    return gradient


def is_autograds(parameter: torch.Tensor) -> bool:
    """Whether to leave the gradient to autograd: hooks want to see it, or it flows on to other tensors."""
    return not parameter.is_leaf or has_hooks(parameter)


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether somebody wants to see the parameter's gradient."""
    if parameter._backward_hooks:
        return True
    after: dict[int, Any] | None = parameter._post_accumulate_grad_hooks  # type: ignore[assignment]
    return bool(after) and any(type(hook) is not Notice for hook in after.values())  # type: ignore[union-attr]


class Notice(partial[None]):
    """A hook of elbowroom's own, which tells of steps that run no program. It is no reason to leave a gradient to
    autograd."""


@contextmanager
def unnoticed(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, steps that run no program are meant to, and are not told of."""
    taken = []
    for parameter in parameters:
        after: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}  # type: ignore[assignment]
        taken += [(after, number, after.pop(number)) for number in list(after) if isinstance(after[number], Notice)]
    try:
        yield
    finally:
        for after, number, notice in taken:
            after[number] = notice


def hooks_wait_for_gradients(tensors: Iterable[Any]) -> None:
    """Have no hook of these tensors called where no gradient reaches them, as in plain execution.

    There, autograd never comes to them. From a graph it does, with None in place of a gradient.
    """
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            continue
        after: dict[int, Any] = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
        if not all(isinstance(hook, _Waits | Notice) for hook in after.values()):
            arrives = _Arrives()
            tensor.register_hook(arrives)
            for number, hook in after.items():
                after[number] = hook if isinstance(hook, _Waits | Notice) else _Waits(hook, arrives)
        before: dict[int, Any] = tensor._backward_hooks or {}
        for number, hook in before.items():
            if not isinstance(hook, _Arrives | _Waits):
                before[number] = _Waits(hook)


class _Arrives:
    """A hook that remembers whether there was a gradient."""

    def __init__(self) -> None:
        self.did = True

    def __call__(self, gradient: torch.Tensor | None) -> None:
        self.did = gradient is not None


class _Waits:
    """A hook that is called with gradients only, or after they have arrived."""

    def __init__(self, hook: Callable[[torch.Tensor], Any], arrives: _Arrives | None = None) -> None:
        self._hook = hook
        self._arrives = arrives

    def __call__(self, tensor: torch.Tensor | None) -> Any:
        if tensor is None or (self._arrives is not None and not self._arrives.did):
            return None
        return self._hook(tensor)


def engine_accumulates() -> bool:
    """Whether the running backward is a plain `backward()`, for all leaves.

    The engine does not tell, but whoever started it is waiting in `_engine_run_backward`: in this thread, or, on
    CUDA, in another one. Where nobody is found, or somebody wants gradients returned, autograd gets them.
    """
    if _unpacked.get():
        return False
    here = threading.get_ident()
    frames = sys._current_frames()
    starts = _starts(frames[here]) or [start for frame in frames.values() for start in _starts(frame)]
    frames.clear()  # it holds this very frame, and with it those of all callers and what is in them, until collected
    return bool(starts) and all(starts)


def _starts(frame: FrameType | None) -> list[bool]:
    """For the innermost backward started in a thread: whether it accumulates into every leaf."""
    while frame is not None:
        if frame.f_code.co_name == "_engine_run_backward":
            given = frame.f_locals
            inputs = given["args"][3] if len(given["args"]) > 3 else ()
            return [bool(given["kwargs"].get("accumulate_grad")) and not inputs]
        frame = frame.f_back
    return []
