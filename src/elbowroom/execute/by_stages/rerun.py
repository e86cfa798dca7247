"""Running a stage again as it ran the first time: buffers, attributes, random streams and autocast as they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from elbowroom.errors import ElbowroomError
from elbowroom.execute.by_stages.python_state import Generators, PythonState, generators_now, plain_tensors

Place: TypeAlias = tuple[dict[str, Any], str, Tensor]  # a module's own table, a name in it, a tensor of that name


@dataclass
class Habits:
    """What is learned about a stage by running it."""

    differentiates: bool = False  # in its forward
    silent: dict[tuple[bool, ...], frozenset[int]] = field(default_factory=dict)  # see `remembering`


@dataclass(frozen=True)
class Kept:
    """A buffer of a module, or another tensor that it keeps, and a copy of it as it was."""

    table: dict[str, Any]
    name: str
    buffer: Tensor
    version: int
    copy: Tensor


@dataclass
class FirstRun:
    """What the first forward of a stage found: random states, buffers, what Python keeps. Once it is `over`, only
    what it changed of the first two."""

    modules: tuple[nn.Module, ...]
    random: dict[torch.device, Tensor]
    buffers: list[Kept]
    python: PythonState
    over: bool = False
    ends: dict[torch.device, int] = field(default_factory=dict)  # where the random streams were afterwards
    generators: Generators | None = None  # Python's and numpy's, as they are when it is over

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Everything as it was found; afterwards, as if nothing had run."""
        now = {device: _random_state(device) for device in self.random}
        python_now = PythonState.of(self.modules, generators_now() if self.python.generators is not None else None)
        try:
            self.python.put_back()
            for device, state in self.random.items():
                _set_random_state(device, state)
            # A second run gets copies: the buffers themselves keep their version, which graphs that saved them check.
            with swapped([(kept.table, kept.name, kept.copy.clone()) for kept in self.buffers]):
                yield
            ends = {device: _mark(_random_state(device)) for device in now}
        finally:
            python_now.put_back()
            for device, state in now.items():
                _set_random_state(device, state)
        # A stage draws from the generators of the whole process, because it is run as it is.
        if ends != self.ends:
            raise ElbowroomError(
                "another thread drew random numbers while a stage ran, so it cannot draw those of its first forward "
                "again; let that thread draw from a torch.Generator of its own"
            )

    def put_back(self) -> None:
        """Undo a forward that failed, so that it can be tried again."""
        self.python.put_back()
        for device, state in self.random.items():
            _set_random_state(device, state)
        for kept in self.buffers:
            kept.table[kept.name] = kept.copy.clone() if self.over else kept.buffer.copy_(kept.copy)


@contextmanager
def remembering(
    stage: nn.Module, devices: Iterable[torch.device], habits: Habits, generators: Generators | None = None
) -> Iterator[FirstRun]:
    """Find out what a forward uses up of the random streams and which buffers it changes.

    `generators` are the states of Python's and numpy's, if they are known: those at the end of the stage before.

    Batch normalization changes its statistics without a trace in their version, so values are compared too, but only
    the first time that the modules are in these modes: on a GPU it means waiting.

    For dropout in recurrent networks cuDNN has a random stream of its own, which cannot be read. But setting the
    GPU's random state makes it begin anew from there, which is done here too, so that a second run can do the same.
    """
    modules = tuple(stage.modules())
    found = FirstRun(
        modules,
        {device: _random_state(device) for device in {torch.device("cpu"), *devices}},
        [
            Kept(table, name, tensor, tensor._version, tensor.detach().clone())
            for module in modules
            for table, name, tensor in _kept_by(module)
        ],
        PythonState.of(modules, generators or generators_now()),
    )
    for device, state in found.random.items():
        if device.type != "cpu":
            _set_random_state(device, state)
    yield found
    found.ends = {device: _mark(_random_state(device)) for device in found.random}
    found.random = {device: state for device, state in found.random.items() if _mark(state) != found.ends[device]}
    found.ends = {device: found.ends[device] for device in found.random}
    found.generators = generators_now()
    if found.generators == found.python.generators:
        found.python = replace(found.python, generators=None)
    modes = tuple(module.training for module in modules)
    if modes not in habits.silent:
        pairs = enumerate(found.buffers)
        habits.silent[modes] = frozenset(i for i, kept in pairs if not torch.equal(kept.buffer, kept.copy))
    found.buffers = [
        kept
        for i, kept in enumerate(found.buffers)
        if i in habits.silent[modes]
        or kept.buffer._version != kept.version
        or kept.table.get(kept.name) is not kept.buffer
    ]
    found.over = True


def _kept_by(module: nn.Module) -> Iterator[Place]:
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield module._buffers, name, buffer
    yield from plain_tensors(module)


@contextmanager
def swapped(places: Iterable[Place]) -> Iterator[None]:
    """Other tensors under the names of parameters or buffers."""
    originals = [(table, name, table[name], tensor) for table, name, tensor in places]
    try:
        for table, name, _, tensor in originals:
            table[name] = tensor
        yield
    finally:
        for table, name, original, _ in originals:
            table[name] = original


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)  # type: ignore[no-any-return]


def _mark(state: Tensor) -> int:
    """Tells states of a generator apart without keeping them."""
    return hash(state.numpy().tobytes())


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


@dataclass(frozen=True)
class Autocast:
    """The state of autocast at a call: device type, whether it is on, precision."""

    states: tuple[tuple[str, bool, torch.dtype], ...]
    caches: bool

    @classmethod
    def now(cls) -> Autocast:
        accelerator = torch.accelerator.current_accelerator()
        types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        states = tuple((t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types)
        return cls(states, torch.is_autocast_cache_enabled())

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """This state, with casts of weights that no other stage sees.

        Autocast keeps casts for as long as its context lasts. Those of a forward that saves nothing would cut the
        gradients of a later one off, and all of them take memory, so none outlives its stage.
        """
        with ExitStack() as stack:
            for now, then in zip(Autocast.now().states, self.states, strict=True):
                if now != then:
                    stack.enter_context(torch.autocast(then[0], enabled=then[1], dtype=then[2]))
            if any(enabled for _, enabled, _ in self.states):
                stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
                torch.set_autocast_cache_enabled(self.caches)
                torch.clear_autocast_cache()
                stack.callback(torch.clear_autocast_cache)
            yield
