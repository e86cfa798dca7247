"""Numbers and texts that classes hold, as a counter of all objects of a class, are looked at before each call.

PyTorch 2.11 takes what it reads from a class by name (`Model.total`) for a constant, without a guard: a step would
go on with the number of the call that was traced, and `Model.total += 1` would store the same number at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo.source import AttrSource
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.user_defined import UserDefinedClassVariable

# Since it does so, what a class holds without being asked for it first is a case of its own.
_IS_GUARDED = hasattr(UserDefinedClassVariable, "resolve_cls_plain_attr")


@contextmanager
def class_attributes_guarded() -> Iterator[None]:
    """While functions are traced in the block, what is read from classes comes from there at each call."""
    if _IS_GUARDED:
        yield
        return
    owner: Any = UserDefinedClassVariable
    known: Callable[..., VariableTracker] = owner.var_getattr

    def var_getattr(self: Any, tx: Any, name: str) -> VariableTracker:
        found = known(self, tx, name)
        if self.source is None or type(found) is not ConstantVariable or found.source is not None:
            return found
        held = [vars(base)[name] for base in self.value.__mro__ if name in vars(base)]
        if not held or name.startswith("__") or not ConstantVariable.is_literal(held[0]):
            return found
        looked_at: VariableTracker = VariableTracker.build(tx, held[0], AttrSource(self.source, name))
        return looked_at

    owner.var_getattr = var_getattr
    try:
        yield
    finally:
        owner.var_getattr = known
