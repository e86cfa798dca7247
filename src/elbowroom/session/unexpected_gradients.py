"""Notices that a fitted model is trained around its plan: it gets gradients that no call of it accounts for.

Programs add gradients to `.grad` by themselves. But what autograd calls after it has added one, it calls in planned
steps, too, which takes some tenths of a microsecond for each parameter. So all parameters are watched until the model
is called, and a few from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from weakref import ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from elbowroom.execute.accumulation import Notice

_FEW = 3  # of any number of parameters: what they cost a small model is not seen in its time


class _Watched(NamedTuple):
    """A parameter, and where it is."""

    module: ref[nn.Module]
    name: str
    parameter: ref[nn.Parameter]
    handle: RemovableHandle

    def is_there(self) -> bool:
        """Whether it is still the module's: others may take its place, as where a state is loaded with `assign`."""
        module, parameter = self.module(), self.parameter()
        return module is not None and module._parameters.get(self.name) is parameter


class UnexpectedGradients:
    """Calls `say` when autograd adds a gradient to a parameter of a model in a backward that no call accounts for.

    Whoever calls `model.forward`, or a part of the model, trains it without a plan. `awaits` tells whether planned
    forwards wait for their backward, which may begin with what they do not hold.
    """

    def __init__(self, model: nn.Module, awaits: Callable[[], bool], say: Callable[[], None]) -> None:
        self._watches_all = False
        self._model, self._awaits, self._say = model, awaits, say
        self._plain_calls = 0  # that ran the model as it is, and whose backward may come
        self.accounted = -1  # PyTorch's number of the latest backward that is accounted for
        self._watched: list[_Watched] = []

    def begin(self) -> None:
        """Any parameter may be the one that gets a gradient: others may be frozen later, or not be used."""
        self.end()
        notice = Notice(_arrives, ref(self))  # a parameter may outlive its model, as in an optimizer
        found = {
            parameter: (module, name)
            for module in self._model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.requires_grad and parameter.is_leaf
        }
        self._watched = [
            _Watched(ref(module), name, ref(parameter), parameter.register_post_accumulate_grad_hook(notice))
            for parameter, (module, name) in found.items()
        ]
        self._watches_all = True

    def called(self) -> None:
        """The model is called. From then on a few parameters, from its first to its last, tell enough."""
        if not self._watches_all:
            if not self._watched or self._watched[0].is_there():
                return
            self.begin()
        last = len(self._watched) - 1
        few = {n * last // (_FEW - 1) for n in range(_FEW)}
        for n, each in enumerate(self._watched):
            if n not in few:
                each.handle.remove()
        self._watched = [each for n, each in enumerate(self._watched) if n in few]
        self._watches_all = False

    def end(self) -> None:
        for each in self._watched:
            each.handle.remove()
        self._watched = []

    def expect_one(self) -> None:
        """A call has run the model as it is. One backward may bring gradients for that."""
        self._plain_calls += 1

    def planned_backward_begins(self) -> None:
        """Called inside of it."""
        self.accounted = torch._C._current_graph_task_id()

    def arrived(self, backward: int) -> None:
        """A gradient was added in a backward that is not accounted for yet."""
        self.accounted = backward
        if self._awaits():
            return
        if self._plain_calls:
            self._plain_calls -= 1
        else:
            self._say()


def _arrives(known: ref[UnexpectedGradients], _: torch.Tensor) -> None:
    watch, backward = known(), torch._C._current_graph_task_id()
    if watch is not None and watch.accounted != backward:
        watch.arrived(backward)
