"""The road that always works: run a schedule over the stages of a model, with nothing captured.

`ChainRunner(stages, schedule)(x)` gives what the stages give one after the other, attached to autograd. The forward
executes the operations up to the loss, which is outside; the backward executes the rest. What comes out is what
plain execution gives, bit for bit: the output, every gradient, buffers that a forward changes (once, however often
it runs again), the random streams. Parameters' gradients go into `.grad` as soon as they are known.

What differs from plain execution, because a stage runs more than once and its graph is not the caller's:

- `torch.autograd.grad`, `backward(inputs=…)` and `create_graph=True` are refused; so is a second backward through the
  same output. If they ask for parameters alone, torch finds no way to them: `grad` says so, `backward` does nothing.
- Forward hooks, and anything else a forward does besides changing what its modules keep (`python_state.py`), happen
  again whenever a stage runs again.
- Dropout between the layers of a recurrent network on a GPU draws other masks (see `remembering`).
- A stage must not write into its input: `fuse_stages` joins one that does to the stage before it.
- A parameter that several calls before one backward share gets their gradients one by one, not their sum, and so do
  its hooks. Under autocast, one that several stages share is cast for each of them, so the parts of its gradient are
  summed in its own precision and not in the lower one. Both change no more than rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from elbowroom.errors import ElbowroomError, InputError
from elbowroom.execute.by_stages.host_space import HostSpace
from elbowroom.execute.by_stages.moving_storage import Host
from elbowroom.execute.by_stages.moving_values import MovingValues
from elbowroom.execute.by_stages.python_state import Generators
from elbowroom.execute.by_stages.rerun import Autocast, FirstRun, Habits, remembering
from elbowroom.execute.by_stages.stage_step import (
    Activation,
    Catch,
    Gradients,
    SavedSet,
    Step,
    forward,
    save_all,
    steps_of,
    tensors_of_modules,
    versions,
)
from elbowroom.execute.by_stages.waiting import Await, Entry, Release, WaitingSchedule, key_of
from elbowroom.execute.to_host.host_room import HostRoom
from elbowroom.execute.to_host.lanes import lanes_of
from elbowroom.execute.to_host.lease import Lease
from elbowroom.problem import Chain, Saving, Stage
from elbowroom.schedule import Backward, Discard, Forward, Offload, Prefetch, Schedule, simulate
from elbowroom.step.slab import Slab


@dataclass(frozen=True)
class HostSide:
    """Where values of runs go that leave the device. `sealed` are stages (from 1) whose graphs cannot be packed."""

    room: HostRoom
    device: torch.device
    sealed: frozenset[int] = frozenset()


class ChainRunner:
    """Runs stages by a schedule whose last stage, one more than there are stages, is what happens outside."""

    def __init__(
        self, stages: Sequence[nn.Module], schedule: Schedule | WaitingSchedule, host: HostSide | None = None
    ) -> None:
        """A schedule with moves has its waits, and a place on the host."""
        self.stages = tuple(stages)
        self.host = host
        if isinstance(schedule, WaitingSchedule):
            self.host_bytes, self.schedule = schedule.host_bytes, schedule.operations
        else:
            self.host_bytes, self.schedule = 0, tuple(schedule)
            _check(len(self.stages), schedule)
        turn = self.schedule.index(Backward(len(self.stages) + 1))
        self.before, self.after = self.schedule[:turn], self.schedule[turn + 1 :]
        runs = Counter(op.at for op in self.schedule if isinstance(op, Forward))
        self.rerun = frozenset(at for at, count in runs.items() if count > 1)
        self.packed = frozenset() if host is None else _packed(self.schedule) - host.sealed
        self.habits = tuple(Habits() for _ in self.stages)
        self.on_backward: Callable[[], None] = lambda: None  # called when a backward begins
        self.hold: Callable[[], Any] = lambda: None  # what it answers lives as long as a run may have a backward
        self.runs: WeakSet[_Run] = WeakSet()  # whose backward has not ended

    def __call__(self, value: Any) -> Any:
        if not torch.is_grad_enabled():
            for stage in self.stages:
                value = stage(value)
            return value
        kind = _Run if self.host is None else _MovingRun
        run = kind(self, steps_of(self.stages), Activation.of(value))
        self.runs.add(run)
        run.execute(self.before)
        return _attach(run, value)


def _check(count: int, schedule: Schedule) -> None:
    """Refuse what the referee refuses; sizes do not matter for that."""
    if not count:
        raise InputError("stages", "is empty; there is nothing to run")
    ways = max((op.way for op in schedule if isinstance(op, Forward)), default=0)  # they all run alike
    stage = Stage("", 0, 0, 0, 0, 0, alternatives=(Saving(0, 0, 0, 0, 0),) * ways)
    simulate(Chain(0, 0, (stage,) * (count + 1)), schedule)
    if sum(isinstance(op, Forward) and op.at == count + 1 for op in schedule) > 1:
        raise InputError("schedule", f"runs stage {count + 1} again, which is outside and runs once")


# --- the machine ---------------------------------------------------------------------------------------------


class _Run:
    """One pass through the schedule: the referee's memory, with tensors in it.

    Nothing here refers to a tensor of the caller's graph. That graph refers to this, and a cycle through it would
    never be collected.
    """

    def __init__(self, runner: ChainRunner, steps: Sequence[Step], source: Activation) -> None:
        self.runner = runner
        self.steps = steps
        self.plain = {0: source}
        self.saved: dict[int, SavedSet] = {}
        self.gradients: Gradients = ()  # of the activation that the next backward starts from
        self.shared = {id(p): p for step in steps for _, _, p in step.shared}
        self.sums: dict[int, Tensor] = {}  # the gradients of shared parameters so far
        self.found: dict[int, FirstRun] = {}
        self.versions = {0: versions(source.leaves)}  # of the input; of the parameters of stage 1, 2, …
        self.autocast = Autocast.now()
        self.generators: Generators | None = None  # after the last stage, if nothing has drawn since
        self.used = False
        self.held = runner.hold()

    def execute(self, operations: Iterable[Entry]) -> None:
        self.generators = None
        for operation in operations:
            if isinstance(operation, Forward):
                self._forward(operation)
            elif isinstance(operation, Discard):
                self._discard(operation)
            elif isinstance(operation, Backward):
                self._backward(operation)
                if all(gradient is None for gradient in self.gradients):
                    break  # nothing below takes a gradient, so the rest of the schedule has no purpose
            else:
                self._move(operation)

    def _forward(self, operation: Forward) -> None:
        at, save = _number(operation), operation.save
        if at > len(self.steps):
            return  # the loss: the caller's
        step, source = self.steps[at - 1], self._input_of(at)
        with self.autocast.in_force(), self._as_first(at, source):
            if save == "all":
                self._save(at, step, source)
            else:
                self._keep(at, forward(step, source, self.runner.habits[at - 1], self.found[at]))
        if save == "nothing":
            self._let_go(at - 1)

    def _backward(self, operation: Backward) -> None:
        at = _number(operation)
        saved, gradients = self._take_saved(at), self.gradients
        self._let_go(at - 1)  # the saved set refers to it as long as it needs it
        self.gradients, shared = saved.backward(gradients)
        for key, part in shared.items():
            self.sums[key] = self.sums[key] + part if key in self.sums else part

    def _discard(self, operation: Discard) -> None:
        at = _number(operation)
        if operation.what == "all":
            self._take_saved(at)
        else:
            self._let_go(at - 1)

    # --- what is in memory ---

    def _save(self, at: int, step: Step, source: Activation) -> None:
        self.saved[at] = save_all(step, source)
        self._let_go(at)  # the saved set contains it

    def _take_saved(self, at: int) -> SavedSet:
        return self.saved.pop(at)

    def _keep(self, at: int, activation: Activation) -> None:
        self.plain[at] = activation

    def _let_go(self, at: int) -> None:
        self.plain.pop(at, None)

    def _move(self, operation: Entry) -> None:
        raise AssertionError(f"{operation} needs a place on the host")

    def _input_of(self, at: int) -> Activation:
        return self.plain[at - 1] if at - 1 in self.plain else self.saved[at - 1].output

    @contextmanager
    def _as_first(self, at: int, source: Activation) -> Iterator[None]:
        """Run a stage's forward for the first time, or else as it ran then."""
        if at not in self.runner.rerun:
            self.generators = None
            yield
            return
        step = self.steps[at - 1]
        if at not in self.found:
            devices = {leaf.device for leaf in (*source.leaves, *step.parameters) if isinstance(leaf, Tensor)}
            habits = self.runner.habits[at - 1]
            with remembering(step.stage, devices, habits, self.generators) as self.found[at]:
                yield
            self.generators = self.found[at].generators
        else:
            if self.versions[at] != versions(step.parameters):
                raise ElbowroomError(f"a parameter of stage {at} has changed since its forward, which must run again")
            if at == 1 and self.versions[0] != versions(source.leaves):
                raise ElbowroomError("the input has changed since the forward, which must run again")
            with self.found[at].restored():
                yield
        self.versions[at] = versions(step.parameters)

    # --- for the two nodes below ---

    def take_output(self) -> Activation:
        """The last stage's output, which from now on is the caller's to keep."""
        last = len(self.steps)
        if last in self.plain:
            return self.plain.pop(last)
        return self.saved[last].take_output()

    def start_backward(self, gradients: Gradients) -> None:
        if self.used:
            raise ElbowroomError(
                "the backward of this output has run: a schedule frees what it saved as it goes, so there is no "
                "second one (retain_graph=True); run the forward again, or add the losses up first"
            )
        if not _accumulating() and any(p.requires_grad for step in self.steps for p in step.parameters):
            raise ElbowroomError(
                "torch.autograd.grad and backward(inputs=…) do not reach the parameters of a chain that runs by a "
                "schedule; call backward() and read .grad"
            )
        if torch.is_grad_enabled():
            raise ElbowroomError("create_graph=True: the backward of a schedule has no graph of its own")
        self.used = True
        self.gradients = gradients
        self.runner.on_backward()

    def finish_backward(self, inputs: int) -> Gradients:
        """Run the rest of the schedule: the gradients of the inputs, then those of the shared parameters."""
        if any(gradient is not None for gradient in self.gradients):
            self.execute(self.runner.after)
        reached = any(gradient is not None for gradient in self.gradients)
        gradients = self.gradients if reached else (None,) * inputs
        self.plain.clear()
        self.saved.clear()
        self.found.clear()
        self.gradients = ()
        self.runner.runs.discard(self)
        return (*gradients, *(self.sums.pop(key, None) for key in self.shared))


class _MovingRun(_Run):
    """One pass through a schedule with moves. What is on the host is in neither `plain` nor, but for its graph, in
    `saved`."""

    def __init__(self, runner: ChainRunner, steps: Sequence[Step], source: Activation) -> None:
        super().__init__(runner, steps, source)
        side = runner.host
        assert side is not None
        self.lease: Lease | None = side.room.lease(Slab({}, runner.host_bytes), side.device)
        host = Host(HostSpace(self.lease.memory), lanes_of(side.device))
        self.values = MovingValues(side.device, tensors_of_modules(steps), host)
        self.values.hold(("plain", 0), source)
        self.values.stay(("plain", 0))

    def execute(self, operations: Iterable[Entry]) -> None:
        try:
            super().execute(operations)
        except BaseException:
            self.values.abandon()
            self.lease = None
            raise

    def _save(self, at: int, step: Step, source: Activation) -> None:
        with self.values.packing() if at in self.runner.packed else nullcontext():
            saved = save_all(step, source)
        for key in (("saved", at), ("plain", at)):
            self.values.drop(key)
        self.values.hold(("saved", at), saved.output)
        self.saved[at] = saved
        self.plain.pop(at, None)

    def _take_saved(self, at: int) -> SavedSet:
        self.values.drop(("saved", at))
        return super()._take_saved(at)

    def _keep(self, at: int, activation: Activation) -> None:
        self.values.drop(("plain", at))
        self.values.hold(("plain", at), activation)
        super()._keep(at, activation)

    def _let_go(self, at: int) -> None:
        if not self.values.is_leaving(("plain", at)):  # else it goes by itself
            self.values.drop(("plain", at))
            super()._let_go(at)

    def _move(self, operation: Entry) -> None:
        assert isinstance(operation, Offload | Release | Prefetch | Await)
        key = key_of(operation)
        if isinstance(operation, Offload):
            self.values.offload(key)
        elif isinstance(operation, Release):
            if key[0] == "plain":
                self.plain.pop(key[1], None)
            else:
                self.saved[key[1]].set_output(None)
            self.values.release(key)
        elif isinstance(operation, Prefetch):
            self.values.prefetch(key, keep=operation.keep)
        else:
            self.values.arrive(key)
            if key[0] == "plain":
                self.plain[key[1]] = self.values.activation(key)
            else:
                self.saved[key[1]].set_output(self.values.activation(key))

    def take_output(self) -> Activation:
        last = len(self.steps)
        key = ("plain" if last in self.plain else "saved", last)
        self.values.stay(key)
        output = super().take_output()
        if key[0] == "plain":
            self.values.drop(key)
        return output

    def finish_backward(self, inputs: int) -> Gradients:
        try:
            return super().finish_backward(inputs)
        finally:
            self._finish_moving()

    def _finish_moving(self) -> None:
        self.values.finish()
        self.lease = None


def _packed(schedule: Iterable[Entry]) -> frozenset[int]:
    """The stages whose graphs refer to a value that moves: their own saved set, or their input."""
    moves = [(op.at, op.what) for op in schedule if isinstance(op, Offload) and isinstance(op.at, int)]
    return frozenset(stage for at, what in moves for stage in ((at, at + 1) if what == "all" else (at,)))


def _number(operation: Forward | Backward | Discard) -> int:
    assert isinstance(operation.at, int)  # the referee has checked
    return operation.at


def _accumulating() -> bool:
    """Whether autograd is adding to every leaf's `.grad`, as backward() without `inputs` does."""
    return torch.autograd._is_checkpoint_valid()  # type: ignore[attr-defined, no-any-return, no-untyped-call]


# --- the two nodes in the caller's graph ---------------------------------------------------------------------


def _attach(run: _Run, value: Any) -> Any:
    """The run's output as a part of the caller's graph."""
    output = run.take_output()
    if not output.taking:
        return output.value()
    inputs = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    # The token makes the output require a gradient even where no input does.
    token = torch.empty(0, device=output.taking[0].device, requires_grad=True)
    token = _Rest.apply(run, len(inputs), token, *inputs, *run.shared.values())  # type: ignore[no-untyped-call]
    # Autograd holds on to what it passes to a node until that node returns. The catch returns at once; while the rest
    # of the schedule runs, only the run holds the gradients, and lets go of them when the referee does.
    return output.value(Catch.apply(run.start_backward, token, *output.taking))  # type: ignore[no-untyped-call]


class _Rest(torch.autograd.Function):
    """Executes the rest of the schedule.

    Parameters that several stages share are inputs of this node, so that the caller's graph adds to their `.grad`
    once: the order of the sum, and what hooks see, is that of plain execution. All others get theirs stage by stage.
    """

    @staticmethod
    def forward(ctx: Any, run: _Run, inputs: int, token: Tensor, *leaves: Tensor) -> Tensor:
        ctx.run, ctx.inputs = run, inputs
        return torch.empty_like(token)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Gradients:
        return (None, None, None, *ctx.run.finish_backward(ctx.inputs))
