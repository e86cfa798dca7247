"""What a forward may change besides tensors: attributes of modules, and the random numbers of Python and numpy.

A stage that runs again runs its Python again. Counters, lists and queues that it keeps in its modules are put back,
so that they count a step once, and random numbers are drawn again as they were. What lies elsewhere is out of reach:
globals, closures, objects with a state of their own, files, what is printed.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

_Table: TypeAlias = dict[str, Any]
Generators: TypeAlias = tuple[Any, Any]  # states of Python's and of numpy's

_LISTS: tuple[type, ...] = (list, deque)
_MAPPINGS: tuple[type, ...] = (dict, OrderedDict, defaultdict, Counter)
_SETS: tuple[type, ...] = (set,)
_CONTAINERS = frozenset((*_LISTS, *_MAPPINGS, *_SETS))  # and no classes derived from them, which may do anything
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # tables of parameters, buffers, children and hooks; the mode


@dataclass(frozen=True)
class PythonState:
    """Attributes of modules and the contents of their containers, nested ones too, with the random states."""

    attributes: tuple[tuple[_Table, _Table], ...]  # a module's own table, and what was in it
    contents: tuple[tuple[Any, Any], ...]  # a container, and a copy of it
    generators: Generators | None  # None: nothing was drawn, so there is nothing to put back

    @classmethod
    def of(cls, modules: Iterable[nn.Module], generators: Generators | None) -> PythonState:
        attributes = tuple((vars(module), dict(own_attributes(module))) for module in modules)
        contents: dict[int, tuple[Any, Any]] = {}
        ahead = [value for _, table in attributes for value in table.values()]
        while ahead:
            value = ahead.pop()
            if type(value) in _CONTAINERS and id(value) not in contents:
                contents[id(value)] = value, value.copy()
                ahead.extend(value.values() if isinstance(value, dict) else value)
        return cls(attributes, tuple(contents.values()), generators)

    def put_back(self) -> None:
        """Everything as it was. Containers stay the objects that they are."""
        for table, attributes in self.attributes:
            for name in [name for name in table if name not in attributes and name not in _OF_EVERY_MODULE]:
                del table[name]
            table.update(attributes)
        for container, copy in self.contents:
            container.clear()
            fill = container.extend if type(container) in _LISTS else container.update
            fill(copy)
        if self.generators is not None:
            _set_generators(self.generators)


def own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a module keeps besides what every module has."""
    return ((name, value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE)


def plain_tensors(module: nn.Module) -> Iterator[tuple[_Table, str, Tensor]]:
    """Tensors that a module keeps without telling PyTorch, as far as they are no part of a graph."""
    for name, value in own_attributes(module):
        if isinstance(value, Tensor) and not value.requires_grad:
            yield vars(module), name, value


def generators_now() -> Generators:
    """As values that can be compared. Reading them takes 60 µs, most of it in numpy."""
    numpy = sys.modules.get("numpy")  # whoever draws from it has imported it
    if numpy is None:
        return random.getstate(), None
    kind, key, *rest = numpy.random.get_state()
    return random.getstate(), (kind, key.tobytes(), key.dtype, *rest)


def _set_generators(states: Generators) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        numpy = sys.modules["numpy"]
        kind, key, dtype, *rest = states[1]
        numpy.random.set_state((kind, numpy.frombuffer(key, dtype), *rest))
