"""Writes a program as Python source: one line per operator, each value let go after its last use.

The source is meant to be read (`elbowroom explain --source`) and to run with as little overhead as Python allows:
operators are bound once, arguments arrive in a list that is emptied, and nothing goes through autograd.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from elbowroom.capture.generator_variant import generator_variant
from elbowroom.capture.joint_graph import Captured, rerun_call
from elbowroom.capture.out_variant import ROW_BY_ROW, out_variant
from elbowroom.capture.rewrites.rewrite import CHECK
from elbowroom.capture.traced_values import tensors_of
from elbowroom.errors import let_go_of_values
from elbowroom.execute.accumulation import accumulator, is_on_trial
from elbowroom.execute.drawing import draws_from
from elbowroom.step.operations import Move, Offload, Operation, Prefetch, Release, Run
from elbowroom.step.program import Program, reads_of

_NO_MESSAGE = "assertion error"  # what tracing writes where an assertion has none


@dataclass(frozen=True)
class Emitted:
    """Two functions and their source. Both take a list that they empty, and return a list.

    Where the program moves values, the last entry of both lists is what moves them (`to_host/lease.py`).
    """

    forward: Callable[[list[Any]], list[Any]]
    backward: Callable[[list[Any]], list[Any]]
    source: str


def emit(captured: Captured, program: Program) -> Emitted:
    """Both programs as functions. The forward returns its outputs, then what the backward takes first."""
    writer = _Writer(captured, program)
    forward, backward = writer.forward(), writer.backward()
    namespace = writer.namespace
    source = f"{forward}\n\n{backward}\n"
    exec(compile(source, "<elbowroom program>", "exec"), namespace)
    return Emitted(_below_autograd(namespace["forward"]), _below_autograd(namespace["backward"]), source)


def emit_backward(captured: Captured, program: Program, without: frozenset[int]) -> Callable[[list[Any]], list[Any]]:
    """The backward, for when no gradient reaches some inputs: it computes theirs and lets go of them."""
    writer = _Writer(captured, program, without)
    exec(compile(writer.backward(), "<elbowroom program>", "exec"), writer.namespace)
    return _below_autograd(writer.namespace["backward"])


def copied_gradients(captured: Captured) -> frozenset[int]:
    """Parameters whose gradient is one thing and their `.grad` another.

    Somebody else may hold its storage; or that does not count, because a fused kernel writes straight to `.grad`.
    """
    graph, owns = captured.graph, _owner(captured)
    counts = {i: graph.bytes_of(set(graph.storages(gradient))) for i, gradient in graph.gradients}
    return frozenset(i for i, gradient in graph.gradients if not counts[i] or not owns(gradient))


def _owner(captured: Captured) -> Callable[[int], bool]:
    """Tells whether a gradient's storage is the backward's own and no other gradient shares it."""
    graph = captured.graph
    made = {s for op in graph.backward for s, _ in graph.ops[op].makes}
    sharers = Counter(s for _, gradient in graph.gradients for s in set(graph.storages(gradient)))

    def owns(op: int) -> bool:
        storages = set(graph.storages(op))
        tensor = tensors_of(captured.nodes[op])[0]
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        return storages <= made and all(sharers[storage] == 1 for storage in storages) and whole

    return owns


def emit_outputs_only(captured: Captured, program: Program) -> Callable[[list[Any]], list[Any]]:
    """A forward that saves nothing and changes no input: for looking at a model without training it."""
    writer = _Writer(captured, program)
    exec(compile(writer.forward(keep_inputs=True), "<elbowroom outputs>", "exec"), writer.namespace)
    return _below_autograd(writer.namespace["forward"])


def _below_autograd(function: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    def run(arguments: list[Any]) -> list[Any]:
        try:
            with torch._C._AutoDispatchBelowAutograd():
                return function(arguments)
        except BaseException as failure:
            let_go_of_values(failure)
            raise

    return run


class _Writer:
    def __init__(self, captured: Captured, program: Program, without: frozenset[int] = frozenset()) -> None:
        self.captured = captured
        self.program = program
        self.without = without  # inputs that get no gradient, although one is computed
        self.ops = captured.graph.ops
        self.names = [_identifier(op.name) for op in self.ops]
        self.namespace: dict[str, Any] = {"torch": torch, "accumulator": accumulator}
        self._bound: dict[Any, str] = {}
        self._taken = set(self.names)
        self._numbers = {node: i for i, node in enumerate(captured.nodes)}
        self._owns = _owner(captured)
        self._host = self._free_name("host") if program.moves else ""

    # --- the two functions ---

    def forward(self, *, keep_inputs: bool = False) -> str:
        graph = self.captured.graph
        lines = ["def forward(arguments):", self._unpack([self.names[i] for i in graph.inputs])]
        lines += self._body(self.program.forward)
        outputs = []
        for op, overwritten in zip(self.captured.forward_outputs, self.captured.overwrites, strict=True):
            shown = overwritten if keep_inputs and overwritten is not None else op
            outputs.append(self.names[shown] if shown is not None else "None")
        lines.append(f"    return [{', '.join([*outputs, *self._handed(saving=True)])}]")
        return "\n".join(lines)

    def backward(self) -> str:
        graph = self.captured.graph
        arriving = [self.names[i] for i in graph.arriving]
        lines = ["def backward(arguments):", self._unpack([*self._handed(saving=False), *arriving])]
        lines.append("    accumulate, accumulate_copy = accumulator()")
        read = {r for run in self.program.backward_runs for r in reads_of(graph, run)}
        unread = [self.names[op] for op in graph.arriving if op not in read and op not in self._returned()]
        if unread:
            lines.append(f"    {' = '.join(unread)} = None")
        lines += self._body(self.program.backward)
        accumulated = {i for run in self.program.backward_runs for i in run.accumulates}
        outputs = []
        for i, op in enumerate(self.captured.backward_outputs):
            if i in accumulated:
                outputs.append(f"rest_{self.names[i]}")
            else:
                outputs.append("None" if op is None or i in self.without else self.names[op])
        lines.append(f"    return [{', '.join(outputs)}]")
        return "\n".join(lines)

    # --- parts ---

    def _body(self, operations: Sequence[Operation]) -> list[str]:
        """One line per operation, and the modules' names between them."""
        lines: list[str] = []
        module = None
        for operation in operations:
            if isinstance(operation, Run):
                module = self._comment(lines, operation, module)
                draws = not operation.again and operation.op in self.program.reseeded
                lines.append(self._line(operation, draws=draws))
            else:
                lines.append(self._move(operation))
        return lines

    def _move(self, move: Move) -> str:
        name, number = self.names[move.value], move.value
        if isinstance(move, Offload):
            return f"    {self._host}.offload({number}, {name})"
        if isinstance(move, Release):
            return f"    {self._host}.release({number}); {name} = None"
        if isinstance(move, Prefetch):
            return f"    {name} = {self._host}.prefetch({number})"
        return f"    {self._host}.arrive({number})"

    def _handed(self, *, saving: bool) -> list[str]:
        """Names of what goes from forward to backward: saved values, parameters to add to, generator states."""
        parameters = [i for run in self.program.backward_runs for i in run.accumulates]
        handed = []
        for op in dict.fromkeys((*self.program.saved, *parameters)):
            name = self.names[op]
            if saving and op in self.program.saved and self.captured.graph.copied_bytes(op):
                name += ".clone()"  # the step overwrites the input that this is or shows before the backward reads it
            handed.append(name)
        return [*handed, *(self._state(op) for op in self.program.reseeded)]

    def _returned(self) -> set[int]:
        return {op for op in self.captured.backward_outputs if op is not None}

    def _unpack(self, names: list[str]) -> str:
        if self._host:
            names = [*names, self._host]
        if not names:
            return "    arguments.clear()"
        return f"    {', '.join(names)}, = arguments\n    arguments.clear()"

    def _comment(self, lines: list[str], run: Run, module: str | None) -> str:
        entry = self.ops[run.op]
        where = f"{entry.module or 'model'}{' again' if run.again else ''}"
        if where != module:
            lines.append(f"    # {where}")
        return where

    def _line(self, run: Run, *, draws: bool = False) -> str:
        op = run.op
        name, state = self.names[op], self._state(op)
        if draws:
            call = f"{name}, {state} = {self._drawn(op, 'draw')}"
        elif run.again and op in self.program.reseeded:
            call = f"{name} = {self._drawn(op, 'draw_again', state)}" + (f"; {state} = None" if run.last_draw else "")
        else:
            call = f"{name} = {self._call(op, run)}"
        for i in run.accumulates:
            function = "accumulate" if self._owns(op) else "accumulate_copy"
            rest = "None" if i in self.without else f"{function}({self.names[i]}, {name})"
            call += f"; rest_{self.names[i]} = {rest}"
        frees = [self.names[value] for value in run.frees]
        return f"    {call}" + (f"; {' = '.join(frees)} = None" if frees else "")

    def _call(self, op: int, run: Run) -> str:
        node = self.captured.nodes[op]
        if run.viewed_in is not None:
            return self.names[run.viewed_in]
        if node.op == "get_attr":
            return self._bind(getattr(self.captured.module, str(node.target)), str(node.target))
        target, _, args = rerun_call(node) if run.again else (node.target, None, node.args)
        if target is operator.getitem:
            return f"{self._value(args[0])}[{args[1]}]"
        named = [f"{key}={self._value(value)}" for key, value in node.kwargs.items()]
        given = ", ".join([*map(self._value, args), *named])
        if run.reuses is None:
            return f"{self._operator(target)}({given})"
        over, (variant, place) = self.names[run.reuses], out_variant(target) or (target, "out")
        call = f"{self._operator(variant)}({given}, {place}={over})"
        if target in ROW_BY_ROW:  # tracing may have been wrong about the layout
            call += f" if {over}.is_contiguous() else {self._operator(target)}({given})"
        return call

    def _drawn(self, op: int, how: str, *state: str) -> str:
        """The call of a random operator that draws for the first time, or again."""
        node = self.captured.nodes[op]
        variant = generator_variant(node)
        device = tensors_of(node)[0].device
        draws = draws_from(device, private=variant is not None)
        name = f"{'private' if variant else 'shared'}_draws" + ("" if device.type == "cpu" else f"_{device}")
        given = [f"{key}={self._value(value)}" for key, value in node.kwargs.items() if key != "generator"]
        arguments = [*state, self._operator(variant or node.target), *map(self._value, node.args), *given]
        return f"{self._bind(draws, name)}.{how}({', '.join(arguments)})"

    def _operator(self, target: Any) -> str:
        if target is CHECK:
            return self._bind(_check, "check")
        name = str(target).removesuffix(".default")
        if target is torch.ops.aten.view.default:
            # Tracing is wrong about the layout that some kernels leave. Where that cannot be viewed, it is copied.
            target = torch.ops.aten.reshape.default
        if isinstance(target, torch._ops.OpOverload):
            return self._bind(target._op, name)
        return self._bind(target, getattr(target, "__name__", name))

    def _value(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names[self._numbers[value]]
        if isinstance(value, list | tuple):
            inside = ", ".join(map(self._value, value))
            return f"[{inside}]"
        if isinstance(value, bool | int | str) or value is None:
            return repr(value)
        if isinstance(value, float) and value == value and abs(value) != float("inf"):
            return repr(value)
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return str(value)
        if isinstance(value, torch.device):
            return f"torch.{value!r}"
        return self._bind(value, "constant")

    def _state(self, op: int) -> str:
        return f"state_{self.names[op]}"

    def _bind(self, value: Any, wish: str) -> str:
        key = id(value)
        if key not in self._bound:
            self._bound[key] = name = self._free_name(wish)
            self.namespace[name] = value
        return self._bound[key]

    def _free_name(self, wish: str) -> str:
        name = base = _identifier(wish)
        count = 1
        while name in self.namespace or name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._taken.add(name)
        return name


def _check(condition: torch.Tensor, message: str) -> None:
    """`assert` of a tensor, as it was written. What made-up values do not fulfil says nothing."""
    if not is_on_trial() and not condition:
        raise AssertionError(message) if message != _NO_MESSAGE else AssertionError


def _identifier(name: str) -> str:
    name = re.sub(r"\W", "_", name)
    return f"{name}_" if keyword.iskeyword(name) or name[:1].isdigit() else name
