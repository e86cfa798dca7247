"""In what is computed of an integer that changes, True and False count as 1 and 0, as in Python.

`self.steps += self.counts` adds True to such an integer. PyTorch writes that down as a sum of a number and a truth,
which its algebra knows nothing of, and fails: 2.11 in sums and products, later ones in what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx.experimental import sym_node


@contextmanager
def truths_counted_as_numbers() -> Iterator[None]:
    """While functions are traced in the block."""
    operands: Any = sym_node
    known: Callable[..., Any] = operands.to_node

    def to_node(self: Any, operand: Any) -> Any:
        return known(self, int(operand) if type(operand) is bool and self.is_int() else operand)

    operands.to_node = to_node
    try:
        yield
    finally:
        operands.to_node = known
