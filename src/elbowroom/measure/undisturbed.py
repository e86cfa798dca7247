"""Runs a user's code so that nothing of it stays: what it changed is put back, what it prints is not seen.

A model that PyTorch cannot trace in one piece has to be run to be looked at, and running it has effects: counters
count, lists grow, buffers move, random numbers are drawn, lines are printed. None of that belongs to training. An
iterator cannot be set back, so a copy takes its place meanwhile. What cannot be put back is what happens outside of
the process, and what only globals and closures refer to.
"""

from __future__ import annotations

import ctypes
import io
import logging
import random
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from elbowroom.measure.random_state import random_state_kept

_MOST_OBJECTS = 100_000  # a model that refers to more of them refers to data, not to its state
_NOT_STATE = ("torch", "elbowroom", "threading", "logging", "io", "_io", "socket", "multiprocessing")
_FIXED = (
    *(str, bytes, int, float, complex, bool, type(None), type, range, slice),
    *(types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, logging.Logger),
)


@contextmanager
def undisturbed(*roots: Any) -> Iterator[None]:
    """Whatever the block does to the objects behind the roots (modules, containers, tensors), to the generators of
    random numbers and to what is printed, it is afterwards as if the block had not run. Nobody's hooks get what it
    saves for a backward. `Irreversible` if something is among them that cannot be put back; then nothing has run."""
    put_back = _remembered(roots)
    with ExitStack() as stack:
        stack.enter_context(random_state_kept())
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(redirect_stderr(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(_no_logs())
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # those of a checkpoint, say
            stack.enter_context(saved_tensors_hooks(_as_it_is, _as_it_is))
        try:
            yield
        finally:
            for put in put_back:
                put()


def _as_it_is(saved: torch.Tensor) -> torch.Tensor:
    return saved


class Irreversible(Exception):
    """Something cannot be put back as it was; the text says what."""


@contextmanager
def _no_logs() -> Iterator[None]:
    manager = logging.root.manager
    level = manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        manager.disable = level
        for logger in [logging.root, *manager.loggerDict.values()]:  # each remembers which levels are enabled
            getattr(logger, "_cache", {}).clear()


def _remembered(roots: tuple[Any, ...]) -> list[Callable[[], None]]:
    """How to put back everything that can change and that the roots lead to."""
    put_back: list[Callable[[], None]] = []
    seen: set[int] = set()
    iterators = _Iterators()
    waiting = list(roots)
    with torch.no_grad():
        try:
            while waiting and len(seen) < _MOST_OBJECTS:
                thing = waiting.pop()
                if id(thing) in seen or isinstance(thing, _FIXED):
                    continue
                seen.add(id(thing))
                put, inside = _memory_of(thing)
                if put is not None:
                    put_back.append(put)
                waiting.extend(iterators.replaced_in(thing, inside))
        except Irreversible:
            for put in put_back:
                put()
            raise
    return put_back


def _memory_of(thing: Any) -> tuple[Callable[[], None] | None, list[Any]]:
    """How to put one thing back as it is now, and what is inside of it."""
    if isinstance(thing, torch.Tensor):
        return _tensor_memory(thing), []
    if isinstance(thing, dict):
        return _dict_memory(thing)
    if isinstance(thing, list):
        items = list(thing)
        return lambda: thing.__setitem__(slice(None), items), items
    if isinstance(thing, deque | set):
        kept = list(thing)
        return partial(_refill, thing, kept), kept
    if isinstance(thing, tuple | frozenset):
        return None, list(thing)
    if isinstance(thing, bytearray):
        content = bytes(thing)
        return lambda: thing.__setitem__(slice(None), content), []
    if isinstance(thing, types.MethodType):
        return None, [thing.__self__, thing.__func__]
    if isinstance(thing, types.FunctionType):
        return None, _held_by(thing)
    if isinstance(thing, partial):
        return None, [thing.func, thing.args, thing.keywords]
    if isinstance(thing, random.Random):
        state = thing.getstate()
        return lambda: thing.setstate(state), []
    if isinstance(thing, torch.Generator):
        bits = thing.get_state()
        return partial(_set_generator, thing, bits), []
    return _object_memory(thing)


class _Iterators:
    """Copies that take the place of iterators in what holds them, until that is put back."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}  # by identity: the iterator, which stays, and its copy

    def replaced_in(self, holder: Any, inside: list[Any]) -> list[Any]:
        """What is inside of a holder besides iterators; in the holder, copies are in their place now."""
        found = [thing for thing in inside if _is_iterator(thing)]
        if not found:
            return inside
        holder = holder if isinstance(holder, dict | list | deque) else getattr(holder, "__dict__", None)
        places = holder.items() if isinstance(holder, dict) else enumerate(holder or ())
        held = [(place, thing) for place, thing in places if _is_iterator(thing)]
        if holder is None or len(held) < len(found):
            raise Irreversible(f"a {type(found[0]).__name__}, which could not be set back")
        for place, thing in held:
            holder[place] = self._copied(thing)
        return [thing for thing in inside if not _is_iterator(thing)]

    def _copied(self, thing: Any) -> Any:
        if not _is_iterator(thing):
            return thing
        if id(thing) not in self._copies:
            try:
                make, given, *state = thing.__reduce__()
            except TypeError:
                raise Irreversible(f"a {type(thing).__name__}, which could not be set back") from None
            copied = make(*(self._copied(each) for each in given))
            if state and state[0] is not None:
                copied.__setstate__(state[0])
            self._copies[id(thing)] = thing, copied
        return self._copies[id(thing)][1]


def _is_iterator(thing: Any) -> bool:
    """Whether it is one of Python's own, written in C: objects of other classes have attributes, and those are kept.
    Files are none of a model's state."""
    kind = type(thing)
    return hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")


def _held_by(function: types.FunctionType) -> list[Any]:
    """What a function of the user's has besides its arguments: a hook may keep a list so."""
    if (function.__module__ or "").partition(".")[0] in _NOT_STATE:
        return []
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _refill(thing: Any, items: list[Any]) -> None:
    thing.clear()
    (thing.extend if isinstance(thing, deque) else thing.update)(items)


def _set_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _tensor_memory(tensor: torch.Tensor) -> Callable[[], None] | None:
    """A copy of its values, in memory that no allocator of PyTorch's gave: there may be no room in the budget for it.
    Written back only if changed."""
    if tensor.device.type == "meta" or tensor.layout is not torch.strided or tensor.grad_fn is not None:
        return None
    value, version, data = _bytes_of(tensor), tensor._version, tensor.data
    required, gradient = tensor.requires_grad, tensor.grad

    def put() -> None:
        if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
            tensor.data = data
        # Some kernels write without a word, as that of BatchNorm to its statistics, so values are compared.
        if value and (tensor._version != version or _bytes_of(tensor) != value):
            with torch.no_grad():
                flat = torch.frombuffer(bytearray(value), dtype=tensor.dtype)
                tensor.detach().copy_(flat.view(tensor.shape))
        if tensor.requires_grad != required and tensor.is_leaf:
            tensor.requires_grad_(required)
        if tensor.grad is not gradient:
            tensor.grad = gradient

    return put


def _bytes_of(tensor: torch.Tensor) -> bytes:
    """A tensor's values one after the other."""
    on_host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(on_host.data_ptr(), on_host.nbytes) if on_host.nbytes else b""


def _dict_memory(mapping: dict[Any, Any]) -> tuple[Callable[[], None], list[Any]]:
    items = list(mapping.items())

    def put() -> None:
        if list(map(id, mapping.values())) != [id(value) for _, value in items] or list(mapping) != [
            key for key, _ in items
        ]:
            dict.clear(mapping)
            for key, value in items:
                dict.__setitem__(mapping, key, value)

    return put, [value for _, value in items]


def _object_memory(thing: Any) -> tuple[Callable[[], None] | None, list[Any]]:
    """Modules and objects of the user's own classes by their attributes; arrays and generators of numpy by value."""
    if (put := _numpy_memory(thing)) is not None:
        return put, []
    attributes = getattr(thing, "__dict__", None)
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()) if isinstance(name, str)]
    held = [getattr(thing, name) for name in slots if not name.startswith("__") and hasattr(thing, name)]
    if not isinstance(attributes, dict) or isinstance(thing, type) or not _is_state(thing):
        return None, held
    put, inside = _dict_memory(attributes)
    return put, [*held, *inside]


def _is_state(thing: Any) -> bool:
    """Whether an object may be a part of a model's state, rather than of Python, PyTorch or elbowroom."""
    if isinstance(thing, nn.Module):
        return True
    return type(thing).__module__.partition(".")[0] not in _NOT_STATE


def _numpy_memory(thing: Any) -> Callable[[], None] | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(thing, numpy.ndarray) and thing.flags.writeable:
        values = thing.copy()
        return lambda: thing.__setitem__(..., values)
    if isinstance(thing, numpy.random.Generator):
        bits = thing.bit_generator
        return partial(setattr, bits, "state", bits.state)
    if isinstance(thing, numpy.random.RandomState):
        return partial(thing.set_state, thing.get_state())
    return None
