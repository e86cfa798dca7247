"""The random generators that a step draws from: PyTorch's on all devices, Python's, and numpy's where it is used."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class RandomStates:
    """Where the generators stood at one moment. Those that the process does not use are None."""

    cpu: torch.Tensor
    gpu: torch.Tensor | None
    python: tuple[Any, ...]
    numpy: dict[str, Any] | None

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [state for state in (self.cpu, self.gpu) if state is not None]

    def differs_in(self, other: RandomStates) -> str | None:
        """Whose generator stands elsewhere in the other; None if all stand in the same place."""
        if len(self.tensors) != len(other.tensors) or not all(map(torch.equal, self.tensors, other.tensors)):
            return "the random generator's state afterwards"
        if self.python != other.python:
            return "the state of Python's random generator afterwards"
        if _comparable(self.numpy) != _comparable(other.numpy):
            return "the state of numpy's random generator afterwards"
        return None


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Whatever is drawn inside, the generators go on as if it had not been: of GPUs, that of the current one."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)


def random_states() -> RandomStates:
    """Numpy's only if somebody has imported it, and the GPU's only if the process uses one."""
    uses_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    numpy = _numpy_random()
    return RandomStates(
        cpu=torch.get_rng_state(),
        gpu=torch.cuda.get_rng_state() if uses_gpu else None,
        python=random.getstate(),
        numpy=None if numpy is None else numpy.get_state(legacy=False),
    )


def set_random_states(states: RandomStates) -> None:
    torch.set_rng_state(states.cpu)
    if states.gpu is not None:
        torch.cuda.set_rng_state(states.gpu)
    random.setstate(states.python)
    if states.numpy is not None and (numpy := _numpy_random()) is not None:
        numpy.set_state(states.numpy)


def _numpy_random() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


def _comparable(state: Any) -> Any:
    """Numpy's state as something that `==` compares as a whole: its arrays become bytes."""
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state
