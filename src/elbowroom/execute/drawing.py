"""Random numbers that are drawn in a forward and again, the same ones, in its backward.

The generators that PyTorch draws from by default belong to the whole process. Another thread may draw from them at
any moment, and an interrupt may come at any moment, so a program never puts them back to draw again. Operators that
can be told which generator to draw from (`capture/generator_variant.py`) draw from one that no other thread has.
The others leave no choice; what disturbs them is found, and said.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from elbowroom.errors import ElbowroomError

# The first draws of all programs come one after the other.
_one_by_one = threading.RLock()
_of_thread = threading.local()


def _forget_threads() -> None:
    """Of the threads of a process that forks, one lives on: whatever another held is free."""
    global _one_by_one
    _one_by_one = threading.RLock()


os.register_at_fork(after_in_child=_forget_threads)


@dataclass(frozen=True)
class PrivateDraws:
    """Draws of operators that take a generator: from one of the running thread, in the state of the `shared` one.

    After a first draw the shared generator is where drawing from it would have left it. So every number is the one
    that plain execution draws. Drawing again does not touch it.
    """

    shared: torch.Generator

    def draw(self, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor]:
        """The operator's value, and the state with which it is drawn again."""
        with _one_by_one:
            state = self.shared.get_state()
            private = self._generator()
            private.set_state(state)
            value = operator(*args, generator=private, **kwargs)
            if _bytes(self.shared.get_state()) == _bytes(state):
                self.shared.set_state(private.get_state())
                return value, state
        # Somebody else drew these numbers meanwhile. Which thread gets which is chance then, so any others will do.
        del value
        private.seed()
        state = private.get_state()
        return operator(*args, generator=private, **kwargs), state

    def draw_again(self, state: torch.Tensor, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        private = self._generator()
        private.set_state(state)
        return operator(*args, generator=private, **kwargs)

    def _generator(self) -> torch.Generator:
        generators: dict[str, torch.Generator] = _of_thread.__dict__
        device = self.shared.device
        name = str(device)
        if name not in generators:
            generators[name] = torch.Generator(device)
        return generators[name]


@dataclass(frozen=True)
class SharedDraws:
    """Draws of operators that take no generator: the shared one is put back for a moment to draw again.

    That moment is seen by other threads that draw. Programs wait for each other; whoever else draws is found out
    by where the generator is after a draw, which is kept along with the state before it.
    """

    shared: torch.Generator

    def draw(self, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor]:
        """The operator's value, and the state with which it is drawn again."""
        with _one_by_one:
            state = self.shared.get_state()
            value = operator(*args, **kwargs)
            after = self._mark()
        return value, torch.cat((state, after))

    def draw_again(self, state: torch.Tensor, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _one_by_one:
            now = self.shared.get_state()
            try:
                self.shared.set_state(state[:-MARK])
                value = operator(*args, **kwargs)
                after = self._mark()
            finally:
                self.shared.set_state(now)
        if not torch.equal(after, state[-MARK:]):
            raise ElbowroomError(
                f"another thread drew random numbers while {_named(operator)} did, so the backward cannot draw those "
                "of the forward again; let that thread draw from a torch.Generator of its own, or raise the budget"
            )
        return value

    def _mark(self) -> torch.Tensor:
        """Tells where the generator is, in a few bytes."""
        return torch.tensor([hash(_bytes(self.shared.get_state()))]).view(torch.uint8)


MARK = 8  # bytes


@cache
def draws_from(device: torch.device, *, private: bool) -> PrivateDraws | SharedDraws:
    """Draws as PyTorch makes them on a device."""
    if device.type == "cuda":
        shared = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    else:
        shared = torch.default_generator
    if not private:
        return SharedDraws(shared)
    draws = PrivateDraws(shared)
    draws._generator()  # it takes memory, which should not be that of the first step
    return draws


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _named(operator: Callable[..., Any]) -> str:
    return getattr(operator, "__name__", str(operator))
