"""Lists and deques that a step appends to and does not read, as a log: traced without a guard on their length.

Dynamo makes a list that it meets a list of what is in it now. That holds for one length only, so the next step, which
finds the list longer, is another one. But appending needs no more than the list itself. So a list that is about to
be asked for its `append`, or whether it is None, is not looked into. What is appended to it is written down, and the
traced step calls `append` after its graph has run, in that order; Dynamo does so with functions that log, and its way
is used here. The length may be asked for besides: it becomes a number that is an input of the graph.

Whatever else happens to such a list in the same trace, or if something is appended that is not known to allow it,
tracing begins again, and that list is treated as Dynamo does.
"""

from __future__ import annotations

import operator
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch._dynamo import variables
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource
from torch._dynamo.variables import builder
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.lists import DequeVariable, ListVariable, SizeVariable
from torch._dynamo.variables.tensor import SymNodeVariable, UnspecializedPythonVariable

_usual: list[Any] = []  # lists that are used otherwise, too, in the function that is being traced


@contextmanager
def appends_deferred() -> Iterator[None]:
    """While functions are traced in the block, lists that they append to are not looked into."""
    wrap: Callable[..., VariableTracker] = builder.VariableBuilder._wrap

    def wrap_lists(self: Any, value: Any) -> VariableTracker:
        if _is_append(value) and _can_wait(self.tx):  # on the stack, where a step in parts goes on
            self.install_guards(GuardBuilder.TYPE_MATCH)
            install_guard(AttrSource(self.source, "__name__").make_guard(GuardBuilder.CONSTANT_MATCH))
            owner = _looked_past(
                builder.VariableBuilder(self.tx, AttrSource(self.source, "__self__")), value.__self__
            )
            return variables.GetAttrVariable(owner, "append", source=self.source)
        if type(value) in _KINDS and not _is_usual(value) and _can_wait(self.tx) and _is_about_to_append(self.tx):
            return _looked_past(self, value)
        found = wrap(self, value)
        if type(value) is deque and value.maxlen is not None and type(found) is DequeVariable:
            install_guard(AttrSource(self.source, "maxlen").make_guard(GuardBuilder.CONSTANT_MATCH))
            short: Any = found
            short.__class__, short.longest = _ShortDeque, value.maxlen
        return found

    builder.VariableBuilder._wrap = wrap_lists  # type: ignore[method-assign]
    try:
        yield
    finally:
        builder.VariableBuilder._wrap = wrap  # type: ignore[method-assign]
        if _usual:
            _usual.clear()


def _is_usual(value: Any) -> bool:
    return any(value is other for other in _usual)


def _can_wait(tx: Any) -> bool:
    """Whether calls can be written down, to be made after the graph."""
    return (
        not tx.export and not torch._dynamo.config.nested_graph_breaks and hasattr(tx.output.root_tx, "debug_locals")
    )


def _is_about_to_append(tx: Any) -> bool:
    """Whether `….append` is what is being traced, or `… is None`, which may come before it."""
    instruction = tx.output.current_tx.current_instruction
    if instruction.opname == "IS_OP":  # what `if … is None` is to Dynamo, too
        return True
    return instruction.opname in ("LOAD_METHOD", "LOAD_ATTR") and instruction.argval == "append"


def _is_append(value: Any) -> bool:
    """Whether a value is the method of a list."""
    bound = isinstance(value, types.BuiltinMethodType) and value.__name__ == "append"
    return bound and type(value.__self__) in _KINDS


def _looked_past(builder: Any, value: Any) -> VariableTracker:
    """What Dynamo is to know of a list that is appended to."""
    known = builder.tx.output.side_effects
    if value in known or _is_usual(value):
        found: VariableTracker = builder(value)
        return found
    builder.install_guards(GuardBuilder.TYPE_MATCH)
    found = known.track_mutable(value, _KINDS[type(value)](value, source=builder.source))
    return found


class _Appended:
    """What Dynamo knows of a list that is not looked into. `real` is the list.

    Dynamo finds what is in a list in `items`, so whoever asks for it shows that the list is read.
    """

    real: Any
    source: Any

    def __init__(self, real: Any, **kwargs: Any) -> None:
        VariableTracker.__init__(self, **kwargs)  # type: ignore[arg-type]
        self.real = real

    def use_as_usual(self) -> NoReturn:
        _usual.append(self.real)
        from torch._dynamo.symbolic_convert import InstructionTranslator

        InstructionTranslator.current_tx().speculation_log.clear()  # the trace may go another way
        raise RestartAnalysis(restart_reason="a list is read that is appended to")

    @property
    def items(self) -> Any:
        self.use_as_usual()

    @property
    def maxlen(self) -> Any:
        self.use_as_usual()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source})"

    debug_repr = __repr__

    def call_method(self, tx: Any, name: str, args: list[VariableTracker], kwargs: dict[str, Any]) -> VariableTracker:
        if name == "append" and len(args) == 1 and not kwargs and tx.output.is_root_tracer() and _may_wait(args[0]):
            tx.output.root_tx.debug_locals.append((_Append(self), args))
            return variables.ConstantVariable.create(None)
        if name == "__len__" and not args and not kwargs:
            return self.sq_length(tx)
        self.use_as_usual()

    def sq_length(self, tx: Any) -> VariableTracker:
        """How many there were when the step began, and those that it has appended."""
        if getattr(self.real, "maxlen", None) is not None:
            self.use_as_usual()
        source = CallFunctionNoArgsSource(AttrSource(self.source, "__len__"))
        length = VariableTracker.build(tx, len(self.real), source)
        waiting = sum(isinstance(each, _Append) and each.to is self for each, _ in tx.output.root_tx.debug_locals)
        addition: Any = VariableTracker.build(tx, operator.add)
        total: VariableTracker = addition.call_function(tx, [length, variables.ConstantVariable.create(waiting)], {})
        return total


class _AppendedList(_Appended, ListVariable):  # type: ignore[override]
    pass


class _AppendedDeque(_Appended, DequeVariable):  # type: ignore[override]
    pass


_KINDS: dict[type, Any] = {list: _AppendedList, deque: _AppendedDeque}


class _ShortDeque(DequeVariable):
    """A deque that loses values at one end where it gains them at the other. Dynamo forgets how long it may become,
    because of `maxlen` it only knows where the deque is made in the trace."""

    def __init__(self, items: list[VariableTracker], *, longest: int, **kwargs: Any) -> None:
        super().__init__(items, **kwargs)
        self.longest = longest

    def call_method(self, tx: Any, name: str, args: list[VariableTracker], kwargs: dict[str, Any]) -> VariableTracker:
        result: VariableTracker = super().call_method(tx, name, args, kwargs)
        if name in ("append", "extend"):
            del self.items[: max(0, len(self.items) - self.longest)]
        elif name in ("appendleft", "extendleft"):
            del self.items[self.longest :]
        return result


class _Append(VariableTracker):
    """The method of a list, for calls after the graph."""

    def __init__(self, to: _Appended) -> None:
        super().__init__()
        self.to = to

    def reconstruct(self, codegen: Any) -> None:
        if _is_usual(self.to.real):
            self.to.use_as_usual()  # whoever read it has not heard of it
        codegen(self.to.source)
        codegen.extend_output(codegen.create_load_attrs("append"))


def _may_wait(value: VariableTracker) -> bool:
    """Whether a value is the same after the graph as where it is appended."""
    if isinstance(value, variables.LazyVariableTracker) and not value.is_realized():
        return True  # an object from outside, which is loaded from where it was found
    if isinstance(value, variables.LazyVariableTracker):
        value = value.realize()
    if type(value) in (variables.TupleVariable, SizeVariable):
        return all(map(_may_wait, value.items))  # type: ignore[attr-defined]
    return type(value) in (
        *(variables.ConstantVariable, variables.TensorVariable, SymNodeVariable),
        UnspecializedPythonVariable,
    )
