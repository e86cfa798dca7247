"""`model.elbowroom`: what a user may ask of a fitted model, whichever road it takes."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from elbowroom.errors import ElbowroomError, OverBudget
from elbowroom.plan.plan import Plan
from elbowroom.session.options import Options
from elbowroom.session.saying import over_budget, say_unplanned
from elbowroom.session.unexpected_gradients import UnexpectedGradients
from elbowroom.session.watching import Watch
from elbowroom.showing import shown_as


class Prepared(Protocol):
    """One shape of input, planned. No plan means that it runs unplanned, and `unplanned` says why."""

    unwatched: int  # steps that are still to be watched
    excess_bytes: int  # of the latest step over the budget, for which no room is left yet

    @property
    def plan(self) -> Plan | None: ...

    @property
    def unplanned(self) -> str: ...

    @property
    def sources(self) -> list[str]:
        """The programs that run, as text; nothing where none were emitted."""
        ...


class Handle(ABC):
    """Runs the step of a fitted model within its budget."""

    def __init__(
        self, model: nn.Module, make_step: Callable[[nn.Module], Callable[..., Any]], options: Options
    ) -> None:
        self.model = model
        self.make_step = make_step
        self.step = make_step(model)
        self.options = options
        self.said: set[str] = set()
        self._latest: Prepared | None = None
        self._offs = 0
        self._watch = Watch(model, self._look_at_peak)
        self._gradients = UnexpectedGradients(model, self._awaits_backward, self._say_around)

    # --- for users ---

    @property
    def plan(self) -> Plan:
        """The plan of the latest call, or of the example that the model was fitted with."""
        if self._latest is None:
            raise ElbowroomError("nothing is planned yet: there was no example, and the model was not called")
        if self._latest.plan is None:
            raise ElbowroomError(f"{type(self.model).__name__} is not planned: {self._latest.unplanned}")
        return self._latest.plan

    def table(self, depth: int | None = None) -> str:
        """The plan for people: what the step takes, then module by module what is saved and what runs again."""
        return self.plan.table(depth)

    def report(self) -> str:
        """The plan in words, as a table and as a picture of memory over the step, and what was not planned."""
        return shown_as("session report", self)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model runs plainly: for double backward, export, tracing. The budget is not kept there."""
        self._offs += 1
        try:
            yield
        finally:
            self._offs -= 1

    @abstractmethod
    def set_budget(self, budget: int | str) -> None:
        """Plan every shape seen so far within another budget; if one cannot, nothing changes."""

    @abstractmethod
    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the state of an optimizer that was made after `fit`; if that does not fit, nothing changes."""

    # --- for the package ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
            return self.step(*args, **kwargs)  # the latter is of this thread alone; others may trace at the same time
        if self._offs or self._is_transformed():
            return self._run_plainly(args, kwargs)
        self._gradients.called()
        try:
            return self._run(args, kwargs)
        except BaseException:
            # An interrupt may have come where gradients were about to be enabled again, and they would stay off.
            torch._C._set_grad_enabled(True)
            raise

    @abstractmethod
    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call of training's, planned as far as it can be."""

    @abstractmethod
    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Prepared:
        """The plan of this shape of input, made now if it is new."""

    @abstractmethod
    def fuses(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether fused kernels run this shape of input."""

    @abstractmethod
    def again(self, model: nn.Module) -> Handle:
        """A session with the same options for another copy of the model."""

    def __reduce__(self) -> Any:
        """Pickles as nothing: a plan belongs to one process. Classes that choose what to pickle may come here."""
        return type(None), ()

    def begin_to_notice(self) -> None:
        """From now on, say so if the model gets gradients that no call of it accounts for."""
        self._gradients.begin()

    def end_noticing(self) -> None:
        """The model belongs to another session now."""
        self._gradients.end()

    @abstractmethod
    def _awaits_backward(self) -> bool:
        """Whether a planned forward waits for its backward, or is in the middle of it."""

    def _backward_begins(self) -> None:
        """That of a planned forward, maybe of a part of the step."""
        self._gradients.planned_backward_begins()
        self._watch.backward_begins()

    def _say_around(self) -> None:
        self._say_unplanned(
            "it got gradients without having been called for them; call the fitted model itself, model(…), and not "
            "model.forward(…) or a part of it, or fit the part that you call"
        )

    def _run_plainly(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call that runs the model as it is, and whose backward is one, too."""
        outputs = self.step(*args, **kwargs)
        self._gradients.expect_one()
        return outputs

    def _is_transformed(self) -> bool:
        """Whether somebody looks at every operator of a call, as jit's tracing does: it runs as the model alone."""
        if torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None:
            return True  # inside torch.jit.trace; inside torch.func.grad, vmap and the like
        if torch._C._len_torch_dispatch_stack():
            if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
                self._say_unplanned("a TorchDispatchMode is active, which has to see every operator")
            return True
        return False

    def _look_at_peak(self, entry: Prepared, start_bytes: int, taken_bytes: int) -> None:
        """A watched step has ended, having taken so much. Said of every plan that took too much, not once for all."""
        entry.unwatched -= 1
        excess = taken_bytes - self.options.budget_bytes
        if excess <= 0:
            return
        entry.excess_bytes = excess if self.options.plan is None else 0
        message = over_budget(self.model, self.options.budget_bytes, start_bytes, taken_bytes, entry.unplanned)
        if self.options.strict:
            raise OverBudget(message)
        warnings.warn(message, stacklevel=2)

    def _say_unplanned(self, why: str) -> None:
        say_unplanned(self.model, self.options, why, self.said)
