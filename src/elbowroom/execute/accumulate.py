"""Adds a parameter's gradient to its `.grad` inside the backward program, as soon as it exists.

Handing gradients to autograd instead would keep all of them until the program ends. By hand because
`autograd.backward(parameter, gradient)` clones, and because returning None afterwards still lets autograd run the
hooks that data-parallel training puts on the parameter's accumulation node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

Accumulate: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]


def accumulator() -> tuple[Accumulate, Accumulate]:
    """How the running backward takes gradients: functions for values the program owns, and for shared ones.

    Each returns what the program must hand to autograd: None once the gradient is in place. Under
    `torch.autograd.grad`, or `backward(inputs=…)`, nothing may be written to `.grad`.
    """
    if _engine_accumulates():
        return _take, _add_copy
    return _hand_over, _hand_over


def _take(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
    if _is_autograds(parameter):
        return gradient
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
    elif gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype:
        parameter.grad = gradient
    else:
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
    return None


def _add_copy(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
    """For a gradient whose storage others may hold: it must not become `.grad` itself."""
    if _is_autograds(parameter):
        return gradient
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
    else:
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
    return None


def _hand_over(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
    return gradient


def _is_autograds(parameter: torch.Tensor) -> bool:
    """Whether to leave the gradient to autograd: hooks want to see it, or it flows on to other tensors."""
    return not parameter.is_leaf or bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _engine_accumulates() -> bool:
    """Whether the running backward is a plain `backward()`.

    Only then does the engine keep no list of the nodes to run; asked about a node that is not on its list, it
    raises otherwise.
    """
    try:
        torch._C._will_engine_execute_node(_STRANGER)
    except (RuntimeError, IndexError):
        return False
    return True


_STRANGER = torch.zeros((), requires_grad=True).expand(1).grad_fn  # a node of no graph that is ever run
