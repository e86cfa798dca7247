"""`parameter.data = value` ends a graph: the assignment is Python's, and what is around it is traced.

Dynamo writes it into the graph, where AOT autograd has no way to do it together with other changes of the tensor, and
fails. So a momentum encoder, which assigns new data to each of its parameters, would leave its whole model unplanned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.variables import builtin
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable

_OWNER: Any = getattr(builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable)
_METHOD = "_call_setattr" if hasattr(_OWNER, "_call_setattr") else "call_setattr"  # the latter in 2.11


@contextmanager
def assigned_data_untraced() -> Iterator[None]:
    """While functions are traced in the block, such an assignment ends the graph."""
    known: Callable[..., VariableTracker | None] = getattr(_OWNER, _METHOD)

    def set_attribute(self: Any, tx: Any, to: VariableTracker, name: VariableTracker, value: VariableTracker) -> Any:
        is_data = name.is_python_constant() and name.as_python_constant() == "data"
        if is_data and isinstance(to.realize(), TensorVariable):
            unimplemented(
                gb_type="data of a tensor is assigned",
                context=str(to),
                explanation="new data of a tensor are assigned outside of graphs",
                hints=[],
            )
        return known(self, tx, to, name, value)

    setattr(_OWNER, _METHOD, set_attribute)
    try:
        yield
    finally:
        setattr(_OWNER, _METHOD, known)
