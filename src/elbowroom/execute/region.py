"""A captured graph at run time: calls the program in force, and the backward that belongs to each forward.

Programs may be exchanged between steps. A forward hands its program's number along with what it saved, so that a
pending backward always runs the program that its forward prepared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from elbowroom.capture.joint_graph import Captured, made_real, with_overwritten
from elbowroom.errors import ElbowroomError
from elbowroom.execute.accumulation import hooks_wait_for_gradients, on_unpacked, saved_tensors_are_packed
from elbowroom.execute.emitter import emit, emit_backward, emit_outputs_only
from elbowroom.execute.layouts import strides_in, with_strides
from elbowroom.execute.passed_on import PassedOn
from elbowroom.execute.saved_numbers import as_number, numbers_as_tensors
from elbowroom.execute.tickets import Tickets
from elbowroom.execute.to_host.host_room import HostRoom
from elbowroom.execute.to_host.moving_program import MovingProgram
from elbowroom.measure.measured import Measured
from elbowroom.step.program import Program, forward_only
from elbowroom.step.referee import Surroundings
from elbowroom.step.slab import slab_of

if TYPE_CHECKING:
    from elbowroom.execute.fused import Fused
    from elbowroom.execute.fused_graphs import Mode
    from elbowroom.execute.recorder import Recorder


class Stopped(BaseException):
    """Ends a call at a graph, before the graph has run. Nothing is wrong, so nobody who handles errors may see it."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region


def weakly(method: Callable[..., Any], otherwise: Any = None) -> Callable[..., Any]:
    """The same, without keeping the object whose method it is; when that has gone, nothing happens.

    PyTorch keeps what it has compiled until the code that it was compiled for goes, and backends for good. Neither
    may keep a model.
    """
    known, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*arguments: Any) -> Any:
        found = known()
        return otherwise if found is None else function(found, *arguments)

    return call


class Looks:
    """Shared by the regions of a session, which uses it to look at a model, and to be asked before a region runs.

    While `calls` is a list, the thread that looks runs no programs: regions write down that they were called, then
    end the call if `ends` is set, or else compute outputs only; `passed_on` then knows what went in and out. At other
    times `may_run` is asked first, if there is one; a region that may not run ends the call. `begun` counts the
    regions that have begun to run. `on_backward` is called when the backward of a region begins. What `hold` answers
    is kept with what a forward saves. `host_room` is where programs have values that move.
    """

    def __init__(self) -> None:
        self.calls: list[Region] | None = None
        self.passed_on = PassedOn()
        self.ends = False
        self.may_run: Callable[[Region], bool] | None = None
        self.on_backward: Callable[[], None] = lambda: None
        self.hold: Callable[[], Any] = lambda: None
        self.begun = 0
        self.host_room = HostRoom()
        self._thread = 0
        self.regions: weakref.WeakSet[Region] = weakref.WeakSet()

    @property
    def await_backward(self) -> bool:
        """Whether forwards of these graphs wait for their backward."""
        return any(region.tickets.waiting for region in self.regions)

    def begin(self, *, ends: bool) -> list[Region]:
        """The present thread looks from now on, until `calls` is None again."""
        calls: list[Region] = []
        self._thread, self.ends, self.calls, self.passed_on = get_ident(), ends, calls, PassedOn()
        return calls

    @contextmanager
    def looking(self, *, ends: bool) -> Iterator[list[Region]]:
        try:
            yield self.begin(ends=ends)
        finally:
            self.calls = None

    @property
    def now(self) -> bool:
        """Whether the present thread looks."""
        return self.calls is not None and self._thread == get_ident()


@dataclass(frozen=True)
class Build:
    """Everything that a runnable program is made of.

    `recorded`: it is replayed as CUDA graphs where that is possible. `makes` is how fused kernels make gradients
    where there are none: they return them, or write them to a place of their own.
    """

    measured: Measured
    program: Program
    recorded: bool = False
    makes: Mode = "return"

    def is_like(self, other: Build) -> bool:
        """Whether one runnable program serves both."""
        same = self.program == other.program and self.measured.is_fused == other.measured.is_fused
        if not same or not self.measured.is_fused:
            return same
        layout = self.measured.channels_last == other.measured.channels_last
        return layout and (self.recorded, self.makes) == (other.recorded, other.makes)


def makes_gradients(around: Surroundings) -> Mode:
    """How fused kernels make gradients: those that come late are returned, for others there is a place already."""
    return "return" if around.late else "write"


@dataclass(frozen=True)
class Ready:
    """A program made ready to run. Both functions take a list that they empty, and return a list.

    `backward_without` also takes the inputs that no gradient reaches, and leaves their `.grad` as it is.
    """

    build: Build
    forward: Callable[[list[Any]], list[Any]]
    backward: Callable[[list[Any]], list[Any]]
    backward_without: Callable[[list[Any], frozenset[int]], list[Any]]
    source: Callable[[], str]
    fused: Fused | None = None  # the compiled program behind them, if one is
    recorder: Recorder | None = None  # what replays it, if something does
    moving: MovingProgram | None = None  # what gives it memory on the host, if values move


class Region:
    """One graph of the user's model, runnable. `traced` is the graph as it was traced."""

    def __init__(self, traced: Captured, looks: Looks) -> None:
        self.traced = traced
        self.looks = looks
        looks.regions.add(self)
        self.programs: list[Ready] = []
        self.current = -1
        self.sizes: dict[int, tuple[int, int]] = {}  # by program: its peak and what it saves, in bytes
        self.launched: dict[tuple[int, int, int], Any] = {}  # what programs took when they were launched on trial
        self.runs = 0
        self.tickets = Tickets()  # one for each forward
        self.watch: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered around every program run
        self.at_first: Callable[[Region], None] | None = None  # installs a program before the first run, if none is
        self.example: list[Callable[[], torch.Tensor | None]] = []  # what it was called with when looked at
        self._looked: list[tuple[list[Callable[[], torch.Tensor | None]], list[int]]] = []  # see `note_overwritten`
        self._look: Callable[[list[Any]], list[Any]] | None = None
        inputs = [traced.nodes[i].meta["val"] for i in traced.graph.inputs]
        self._never_reached: list[int] | None = None  # places of inputs that need a gradient and never get one
        self._takes_numbers = not all(isinstance(value, torch.Tensor) for value in inputs)

    def install(self, build: Build) -> None:
        """From the next forward on, run this program."""
        self.release()
        self.current = self.add(build)

    def uninstall(self) -> None:
        """Before the next forward, `at_first` has to install a program again."""
        self.release()
        self.current = -1

    def retire(self) -> None:
        """No forward will come any more. If no backward will, either, the programs can go."""
        if not self.tickets.waiting:
            self.uninstall()
            self.programs.clear()
            self._look = None

    def release(self) -> None:
        """Give back the memory that recordings hold."""
        for ready in self.programs:
            if ready.recorder is not None:
                ready.recorder.release()

    def add(self, build: Build) -> int:
        """Make a program ready to run, if it is not yet; its number."""
        for number, known in enumerate(self.programs):
            if known.build.is_like(build):
                return number
        self.programs.append(self._fused(build) if build.measured.is_fused else _emitted(build, self.looks.host_room))
        return len(self.programs) - 1

    def _fused(self, build: Build) -> Ready:
        from elbowroom.execute.fused import Fused  # the compiler takes seconds to import

        measured, program = build.measured, build.program
        fused = self._compiled(build) or Fused(measured.captured, program, measured.channels_last)
        source = partial(fused.source, build.makes)
        backward = partial(fused.backward, makes=build.makes)
        moving = _moving_program(build, self.looks.host_room, fused.forward) if program.moves else None
        if build.recorded:
            from elbowroom.execute.recorder import Recorder

            recorder = Recorder(fused, build.makes, moving)
            return Ready(
                build, recorder.forward, recorder.backward, recorder.backward, source, fused, recorder, moving
            )
        if moving is not None:
            return _moving(build, moving, backward, source, fused)
        return Ready(build, fused.forward, backward, lambda a, w: backward(a, without=w), source, fused)

    def _compiled(self, build: Build) -> Fused | None:
        """The same program, if it was compiled before to run in another way."""
        channels_last = build.measured.channels_last
        known = (ready.fused for ready in self.programs if ready.build.program == build.program)
        return next((fused for fused in known if fused is not None and fused.channels_last == channels_last), None)

    @property
    def program(self) -> Program:
        return self.programs[self.current].build.program

    @property
    def peak_bytes(self) -> int:
        """Of the present program, above what is resident."""
        return self.sizes.get(self.current, (0, 0))[0]

    @property
    def host_bytes(self) -> int:
        """What a forward of the present program has on the host."""
        moving = self.programs[self.current].moving if self.programs else None
        return 0 if moving is None else moving.host_bytes

    @property
    def held_bytes(self) -> int:
        """What its forwards have saved whose backward is still to come."""
        return sum(self.sizes.get(program, (0, 0))[1] for program, *_ in self.tickets.waiting.values())

    @property
    def source(self) -> str:
        return self.programs[self.current].source()

    def forward(self, arguments: list[Any]) -> list[Any]:
        looks = self.looks
        if looks.calls is not None and looks.now:
            return self._looked_at(arguments, looks.calls)
        if looks.may_run is not None and not looks.may_run(self):
            self._remember(arguments)
            raise Stopped(self)
        looks.begun += 1
        if self._never_reached is None:
            self._never_reached = self._without_gradient(arguments)
        if self._never_reached:
            hooks_wait_for_gradients(arguments[place] for place in self._never_reached)
        if self.current < 0 and self.at_first is not None:
            self._remember(arguments)
            self.at_first(self)
        self.runs += 1
        held = looks.hold()
        with self.watch():
            outputs = self.programs[self.current].forward(arguments)
        if self._takes_numbers:
            outputs = numbers_as_tensors(outputs, len(self.traced.forward_outputs))
        packed = saved_tensors_are_packed()
        strides = strides_in(outputs[len(self.traced.forward_outputs) :]) if packed else []
        outputs.append(self.tickets.issue(self.runs, self.current, packed, *strides, held=held))
        return outputs

    def backward(self, arguments: list[Any]) -> list[Any]:
        self.looks.on_backward()  # before what the forward held is let go
        arriving = len(self.traced.graph.arriving)
        run, number, packed, *strides = arguments.pop(-arriving - 1).tolist()
        if number < 0:
            raise ElbowroomError("this forward ran only to look at the model; call the fitted model again")
        self.tickets.collect(run)
        if self._takes_numbers:
            arguments[:] = [as_number(argument) for argument in arguments]
        if not packed:
            return self._run_backward(arguments, self.programs[number])
        saved = slice(len(arguments) - arriving)
        arguments[saved] = with_strides(arguments[saved], strides)
        with on_unpacked():
            return self._run_backward(arguments, self.programs[number])

    def _run_backward(self, arguments: list[Any], ready: Ready) -> list[Any]:
        arriving = len(self.traced.graph.arriving)
        absent = [n for n in range(-arriving, 0) if arguments[n] is None]
        if absent:
            return self._backward_without(absent, arguments, ready)
        with self.watch():
            return ready.backward(arguments)

    def _backward_without(self, absent: list[int], arguments: list[Any], ready: Ready) -> list[Any]:
        """The backward when some of the gradients do not arrive. Programs compute with zeros in their place; inputs
        that none of the others reach get no gradient, as in plain execution."""
        graph = self.traced.graph
        hooks_wait_for_gradients(arguments)
        if len(absent) == len(graph.arriving):
            arguments.clear()
            return [None] * len(self.traced.backward_outputs)
        unreached = graph.unreached({graph.arriving[n] for n in absent})
        for n in absent:
            arguments[n] = made_real(self.traced.nodes[graph.arriving[n]].meta["val"]).zero_()
        with self.watch():
            if unreached:
                return ready.backward_without(arguments, unreached)
            return ready.backward(arguments)

    def _without_gradient(self, arguments: list[Any]) -> list[int]:
        """Tracing does not tell which inputs need a gradient, but each call that runs the graph has the same ones."""
        return [
            place
            for place, gradient in enumerate(self.traced.backward_outputs)
            if gradient is None and isinstance(arguments[place], torch.Tensor) and arguments[place].requires_grad
        ]

    def _looked_at(self, arguments: list[Any], calls: list[Region]) -> list[Any]:
        calls.append(self)
        self._remember(arguments)
        if self.looks.ends:
            raise Stopped(self)
        self._looked.append((self.example, [getattr(argument, "_version", 0) for argument in arguments]))
        self.looks.passed_on.enter(arguments)
        outputs = self._outputs_only(arguments)
        self.looks.passed_on.leave(outputs)
        return [*outputs, torch.tensor((0, -1, 0))]

    def note_overwritten(self) -> None:
        """A look has ended. Inputs that something outside of the graph has overwritten since, as a queue of keys is,
        will not be there any more when the backward comes, unless they are saved as copies."""
        changed = set[int]()
        for example, versions in self._looked:
            tensors = [remembered() for remembered in example]
            pairs = enumerate(zip(tensors, versions, strict=True))
            changed |= {
                place for place, (tensor, version) in pairs if tensor is not None and tensor._version > version
            }
        self._looked = []
        known = {place for place, i in enumerate(self.traced.graph.inputs) if i in self.traced.graph.overwritten}
        if changed - known:
            self.traced = with_overwritten(self.traced, changed - known)

    @property
    def given(self) -> dict[fx.Node, torch.Tensor]:
        """The inputs that it was last looked at with, as far as they are still there."""
        inputs = zip(self.traced.graph.inputs, (example() for example in self.example), strict=False)
        return {self.traced.nodes[i]: tensor for i, tensor in inputs if tensor is not None}

    def _remember(self, arguments: list[Any]) -> None:
        self.example = [_remembered(argument) for argument in arguments]

    def _outputs_only(self, arguments: list[Any]) -> list[Any]:
        if self._look is None:
            plain = self.traced.unfused or self.traced
            self._look = emit_outputs_only(plain, forward_only(plain.graph))
        given = list(arguments)
        try:
            outputs = self._look(arguments)
        except torch.OutOfMemoryError:
            outputs = self._zeros(given)
        return outputs

    def _zeros(self, given: list[Any]) -> list[Any]:
        """Outputs that only look right. Unfused, a forward may take more memory than the step that is to be planned;
        and which graphs come next rarely depends on values."""
        torch.cuda.empty_cache()
        outputs: list[Any] = []
        for op, overwritten in zip(self.traced.forward_outputs, self.traced.overwrites, strict=True):
            if overwritten is not None:
                outputs.append(given[overwritten])
            else:
                outputs.append(None if op is None else made_real(self.traced.nodes[op].meta["val"]).zero_())
        return outputs


def _emitted(build: Build, room: HostRoom) -> Ready:
    captured, program = build.measured.captured, build.program
    emitted = emit(captured, program)
    backward_for = cache(partial(emit_backward, captured, program))

    def backward(arguments: list[Any], without: frozenset[int] = frozenset()) -> list[Any]:
        return backward_for(without)(arguments) if without else emitted.backward(arguments)

    if program.moves:
        moving = _moving_program(build, room, emitted.forward)
        return _moving(build, moving, backward, lambda: emitted.source)
    return Ready(build, emitted.forward, emitted.backward, backward, lambda: emitted.source)


def _moving_program(build: Build, room: HostRoom, forward: Callable[[list[Any]], list[Any]]) -> MovingProgram:
    """Gives each forward a part of the host's memory."""
    captured = build.measured.captured
    slab = slab_of(captured.graph, build.program)
    return MovingProgram(forward, slab, room, captured.device, len(captured.forward_outputs))


def _moving(
    build: Build,
    moving: MovingProgram,
    backward: Callable[..., list[Any]],
    source: Callable[[], str],
    fused: Fused | None = None,
) -> Ready:
    """A program whose values move, launched."""
    return Ready(
        build,
        moving.forward,
        lambda a: moving.backward(a, backward),
        lambda a, w: moving.backward(a, partial(backward, without=w)),
        source,
        fused,
        moving=moving,
    )


def _remembered(argument: Any) -> Callable[[], torch.Tensor | None]:
    """A reference that keeps nothing alive: a batch may die, parameters stay."""
    return weakref.ref(argument) if isinstance(argument, torch.Tensor) else lambda: None
