"""What both kinds of sessions have in common: traced models, and models that run stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from elbowroom.plan.plan import Plan
from elbowroom.session.options import Options


class Prepared(Protocol):
    """One shape of input, planned. No plan means that it runs unplanned, and `unplanned` says why."""

    @property
    def plan(self) -> Plan | None: ...

    @property
    def unplanned(self) -> str: ...

    @property
    def sources(self) -> list[str]:
        """The programs that run, as text; nothing where none were emitted."""
        ...


class AnySession(Protocol):
    """Runs the step of a fitted model within its budget."""

    options: Options
    model: nn.Module
    step: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Prepared:
        """The plan of this shape of input, made now if it is new."""
        ...

    def set_budget(self, budget: int | str) -> None:
        """Plan every shape seen so far within another budget; if one cannot, nothing changes."""
        ...

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the state of an optimizer that was made after `fit`; if that does not fit, nothing changes."""
        ...

    def fuses(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether fused kernels run this shape of input."""
        ...

    def again(self, model: nn.Module) -> AnySession:
        """A session with the same options for another copy of the model."""
        ...
