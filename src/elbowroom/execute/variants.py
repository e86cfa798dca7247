"""A graph with numbers that change, compiled once for each set of values that Inductor tells apart.

Inductor may take a place in a queue for 0, because it is 0 now, and note that as a condition. But what a traced graph
is asked before it runs was settled when it was traced. So such a graph is given numbers of its own each time that it
is compiled; what Inductor notes of them is kept, and asked before the compiled graph runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._sympy.printers import PythonPrinter

from elbowroom.capture.traced_values import number_in

Compiled: TypeAlias = Callable[[list[Any]], Any]
Compile: TypeAlias = Callable[[fx.Graph, list[Any]], tuple[Compiled, list[Any]]]  # what to run, and outputs' strides


class Variants:
    """Stands for the compiled graph: runs the variant that is right for the numbers that it is called with."""

    def __init__(
        self, compile_graph: Compile, graph: fx.Graph, inputs: Sequence[Any], module: torch.nn.Module
    ) -> None:
        self._compile, self._graph, self._inputs, self._module = compile_graph, graph, list(inputs), module
        self._places = [place for place, value in enumerate(inputs) if _changes(value)]
        self._known: list[tuple[Callable[..., bool], Compiled]] = []
        self.strides: list[Any] = []
        self._make([number_in(inputs[place]) for place in self._places])

    def __call__(self, arguments: list[Any]) -> Any:
        numbers = [arguments[place] for place in self._places]
        for holds, compiled in self._known:
            if holds(*numbers):
                return compiled(arguments)
        return self._make(numbers)(arguments)

    def _make(self, numbers: Sequence[Any]) -> Compiled:
        environment = ShapeEnv()
        symbols = []
        inputs = list(self._inputs)
        for place, number in zip(self._places, numbers, strict=True):
            source = ConstantSource(f"number_{place}")
            symbols.append(environment.create_unspecified_symbol(number, source, DimDynamic.DYNAMIC))
            make = environment.create_symfloatnode if isinstance(number, float) else environment.create_symintnode
            inputs[place] = make(symbols[-1], hint=number, source=source)
        with FakeTensorMode(shape_env=environment) as mode:
            inputs = [_alike(value) if isinstance(value, torch.Tensor) else value for value in inputs]
        graph = _copied(self._graph)
        FakeTensorProp(fx.GraphModule(self._module, graph), mode).propagate_dont_convert_inputs(*inputs)
        compiled, strides = self._compile(graph, inputs)
        if self._known and strides != self.strides:
            raise RuntimeError("Inductor lays values out otherwise for other values of a number that changes")
        self.strides = strides
        said = " and ".join(f"({PythonPrinter().doprint(guard.expr)})" for guard in environment.guards)
        names = ", ".join(map(str, symbols))
        self._known.append((eval(f"lambda {names}: {said or True}", {"math": math}), compiled))
        return compiled


def has_numbers_that_change(inputs: Sequence[Any]) -> bool:
    return any(map(_changes, inputs))


def _changes(value: Any) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat)


def _alike(traced: torch.Tensor) -> torch.Tensor:
    """The same in the present fake mode."""
    made = torch.empty_strided(traced.size(), traced.stride(), dtype=traced.dtype, device=traced.device)
    return made.requires_grad_(traced.requires_grad)


def _copied(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    returned = copy.graph_copy(graph, {})
    copy.output(returned).meta.update(graph.output_node().meta)
    return copy
