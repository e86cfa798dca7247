"""The random generators that a step draws from, all devices together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Whatever is drawn inside, the generators of the CPU and of the current GPU go on as if it had not been."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)


def random_states() -> list[torch.Tensor]:
    """The CPU's, then that of the current GPU if the process uses one."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def set_random_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
