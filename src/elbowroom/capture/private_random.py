"""Objects of `random.Random` that a step draws from are not traced: they draw when they are called.

Dynamo takes the state that such an object has while it traces for the state that it has at every step, so that each
step would draw the same numbers. One that the step makes itself, with a seed, is in the same state at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.misc import RandomVariable


@contextmanager
def private_random_untraced() -> Iterator[None]:
    """While functions are traced in the block, a call of such an object ends the graph."""
    known: Callable[..., VariableTracker] = RandomVariable.call_method

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> VariableTracker:
        if self.source is None:
            return known(self, tx, name, args, kwargs)
        return VariableTracker.call_method(self, tx, name, args, kwargs)  # which knows no method, and says so

    RandomVariable.call_method = call_method  # type: ignore[method-assign]
    try:
        yield
    finally:
        RandomVariable.call_method = known  # type: ignore[method-assign]
