"""Keeps what Python computes of floats that change, as `self.temperature *= 0.97`, a computation of the graph.

Dynamo takes a float that changes into the graph as a tensor, reads it with `item()`, and writes down what Python
computes of it. Where the result goes back to Python, it is made a tensor again (`scalar_tensor`). A pass of AOT
autograd is to take such floats out of the graph. It looks at products with tensors and the like, and not at
`scalar_tensor`: a float that arrives there becomes a constant with a guard, and the step is another one whenever the
float has changed. And what it writes has other bits, because it reorders: of `t * 0.97 * 0.97` it makes `0.9409 * t`.

So floats are computed with tensors here, before AOT autograd sees the graph: in float64, operation by operation as
Python does it, and only with operations that give Python's bits. Everything else stays as it is.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._dynamo.symbolic_convert import TensorifyState
from torch._prims_common import get_computation_dtype
from torch.utils._sympy.symbol import SymT, symbol_is_type


def compute_floats_with_tensors(module: fx.GraphModule) -> None:
    """Compute floats of one of Dynamo's graphs with tensors where they go back to Python or meet tensors."""
    writer = _Writer(module.graph)
    for node in list(module.graph.nodes):
        if node.target is torch.scalar_tensor and _changes(node.args[0]) and _has_same_bits(node.args[0]):
            writer.give_back(node)
        elif _meets_tensor(node) and _has_same_bits(node.args[1]):
            writer.meet(node)
    if writer.tensors:
        module.recompile()


@contextmanager
def unused_floats_left_alone(module: fx.GraphModule) -> Iterator[None]:
    """While a graph is compiled, let the pass make constants of no floats but those that are in the graph.

    A float may be at hand and not in the graph, as an argument that only a later part of the step uses. The pass
    would guard it, too, because it did not find a tensor in its place.
    """
    examples = [node.meta.get("example_value") for node in module.graph.nodes]
    floats = [example for example in examples if isinstance(example, torch.SymFloat)]
    used = {str(symbol) for example in floats for symbol in example.node._expr.free_symbols}
    state: Any = TensorifyState
    method, known = vars(state)["should_specialize"], state.should_specialize
    state.should_specialize = lambda name: name not in used or known(name)
    try:
        yield
    finally:
        state.should_specialize = method


class _Writer:
    """Writes the computation of floats into a graph once more, with tensors. `tensors` has what is written."""

    def __init__(self, graph: fx.Graph) -> None:
        self.tensors: dict[fx.Node, fx.Node] = {}
        self._graph = graph

    def give_back(self, node: fx.Node) -> None:
        """Instead of a tensor made of the float, return the float as it was computed with tensors."""
        with self._graph.inserting_before(node):
            tensor = self._cast(self._tensor(node.args[0]), torch.float64, node.meta["example_value"].dtype)
        tensor.meta.update(node.meta)
        node.replace_all_uses_with(tensor)
        self._graph.erase_node(node)

    def meet(self, node: fx.Node) -> None:
        """Let an operator read a tensor in place of the float, rounded as operators round the numbers they read."""
        result = node.meta["example_value"].dtype
        computed = get_computation_dtype(result)
        with self._graph.inserting_before(node):
            node.args = (node.args[0], self._cast(self._tensor(node.args[1]), torch.float64, computed))
        with self._graph.inserting_after(node):
            # Of two tensors without dimensions, either may decide the result's dtype; a number never does.
            cast = self._cast(node, None if node.meta["example_value"].ndim == 0 else result, result)
        if cast is not node:
            cast.meta.update(node.meta)
            node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)

    def _cast(self, tensor: fx.Node, dtype: torch.dtype | None, wanted: torch.dtype) -> fx.Node:
        return tensor if dtype == wanted else self._graph.call_method("to", (tensor, wanted))

    def _tensor(self, value: Any) -> fx.Node:
        if not isinstance(value, fx.Node):
            return self._call(torch.scalar_tensor, float(value), dtype=torch.float64)
        if value not in self.tensors:
            self.tensors[value] = self._computed(value)
        return self.tensors[value]

    def _computed(self, node: fx.Node) -> fx.Node:
        if not _changes(node):  # Python computes it of integers
            return self._call(torch.scalar_tensor, node, dtype=torch.float64)
        if _is_read(node):  # the pass knows products with tensors, and puts the tensor in place of its float
            return self._call(torch.mul, self._tensor(1.0), node)
        parts = [self._tensor(part) for part in node.args]
        if node.target in _CHOICES:  # Python's `max` and `min` return the first of two that are equal
            taken = self._call(_CHOICES[node.target], parts[1], parts[0])
            return self._call(torch.where, taken, parts[1], parts[0])
        return self._call(_SAME[node.target], *parts)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self._graph.call_function(function, args, kwargs)


# Functions of Python's whose result IEEE prescribes to the bit, and the same for tensors. Powers are not among them.
_SAME: dict[Any, Callable[..., Any]] = {
    operator.add: torch.add,
    operator.sub: torch.sub,
    operator.mul: torch.mul,
    operator.truediv: torch.true_divide,
    operator.neg: torch.neg,
    operator.abs: torch.abs,
    "__abs__": torch.abs,
    builtins.abs: torch.abs,
}
_CHOICES: dict[Any, Callable[..., Any]] = {torch.sym_max: torch.gt, torch.sym_min: torch.lt}

# Where a tensor stands first and a number second. The other way round, differences and quotients are others.
_MEETING = frozenset(
    (operator.add, operator.sub, operator.mul, operator.truediv, torch.add, torch.sub, torch.mul, torch.div)
)


def _has_same_bits(value: Any) -> bool:
    """Whether tensors compute the same for a value as Python."""
    if not isinstance(value, fx.Node):
        return isinstance(value, float | int) and abs(value) <= 2**53
    if not _changes(value):
        return isinstance(value.meta.get("example_value"), torch.SymFloat | torch.SymInt)
    if _is_read(value):
        return True
    if value.kwargs or not all(map(_has_same_bits, value.args)):
        return False
    if value.target is operator.truediv:  # Python raises an error where the divisor is zero
        return isinstance(value.args[1], float | int) and value.args[1] != 0
    if value.target in _CHOICES:  # Python returns one of both as it is: a float, or an integer
        return all(isinstance(part, float | fx.Node) for part in value.args)
    return value.target in _SAME


def _meets_tensor(node: fx.Node) -> bool:
    """Whether a node computes a tensor of floats from a tensor and a number that changes."""
    result = node.meta.get("example_value")
    if node.target not in _MEETING or not isinstance(result, torch.Tensor) or not result.dtype.is_floating_point:
        return False
    parts = [part for part in node.args if isinstance(part, fx.Node)]
    if len(node.args) != 2 or len(parts) != 2 or node.kwargs:
        return False
    tensor, number = (part.meta.get("example_value") for part in parts)
    return isinstance(tensor, torch.Tensor) and isinstance(number, torch.SymFloat)


def _is_read(node: fx.Node) -> bool:
    """Whether a node reads a float that is an input."""
    return node.target == "item" and isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder"


def _changes(value: Any) -> bool:
    """Whether a value is a float computed of floats that change from call to call."""
    example = value.meta.get("example_value") if isinstance(value, fx.Node) else None
    if not isinstance(example, torch.SymFloat):
        return False
    return any(symbol_is_type(symbol, SymT.FLOAT) for symbol in example.node.expr.free_symbols)
