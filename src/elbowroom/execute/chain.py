"""The road that always works: run a schedule over the stages of a model, with nothing captured.

`ChainRunner(stages, schedule)(x)` gives what the stages give one after the other, attached to autograd. The forward
executes the operations up to the loss, which is outside; the backward executes the rest. What comes out is what
plain execution gives, bit for bit: the output, every gradient, buffers that a forward changes (once, however often
it is replayed), the random streams. Parameters' gradients go into `.grad` as soon as they are known.

What differs from plain execution, because a stage runs more than once and its graph is not the caller's:

- `torch.autograd.grad`, `backward(inputs=…)` and `create_graph=True` are refused; so is a second backward through the
  same output. If they ask for parameters alone, torch finds no way to them: `grad` says so, `backward` does nothing.
- Forward hooks, and anything else a forward does besides changing buffers, happen again in every replay.
- Dropout between the layers of a recurrent network on a GPU draws other masks (see `remembering`).
- A stage must not write into its input: `fuse_stages` joins one that does to the stage before it.
- A parameter that several calls before one backward share gets their gradients one by one, not their sum, and so do
  its hooks. Under autocast, one that several stages share is cast for each of them, so the parts of its gradient are
  summed in its own precision and not in the lower one. Both change no more than rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from elbowroom.errors import ElbowroomError, InputError
from elbowroom.problem import Chain, Saving, Stage
from elbowroom.schedule import Backward, Discard, Forward, Operation, Schedule, simulate

Place: TypeAlias = tuple[dict[str, Any], str, Tensor]  # a module's own table, a name in it, a tensor of that name


class ChainRunner:
    """Runs stages by a schedule whose last stage, one more than there are stages, is what happens outside."""

    def __init__(self, stages: Sequence[nn.Module], schedule: Schedule) -> None:
        self.stages = tuple(stages)
        self.schedule = tuple(schedule)
        _check(len(self.stages), self.schedule)
        turn = self.schedule.index(Backward(len(self.stages) + 1))
        self.before, self.after = self.schedule[:turn], self.schedule[turn + 1 :]
        runs = Counter(op.at for op in self.schedule if isinstance(op, Forward))
        self.replayed = frozenset(at for at, count in runs.items() if count > 1)
        self.habits = tuple(Habits() for _ in self.stages)

    def __call__(self, value: Any) -> Any:
        if not torch.is_grad_enabled():
            for stage in self.stages:
                value = stage(value)
            return value
        run = _Run(self, steps_of(self.stages), Activation.of(value))
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
        self.found: dict[int, Found] = {}
        self.versions = {0: _versions(source.leaves)}  # of the input; of the parameters of stage 1, 2, …
        self.autocast = Autocast.now()
        self.used = False

    def execute(self, operations: Iterable[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, Forward):
                self._forward(operation)
            elif isinstance(operation, Discard):
                self._discard(operation)
            elif isinstance(operation, Backward):
                self._backward(operation)
                if all(gradient is None for gradient in self.gradients):
                    break  # nothing below takes a gradient, so the rest of the schedule has no purpose

    def _forward(self, operation: Forward) -> None:
        at, save = _number(operation), operation.save
        if at > len(self.steps):
            return  # the loss: the caller's
        step, source = self.steps[at - 1], self._input_of(at)
        with self.autocast.in_force(), self._as_first(at, source):
            if save == "all":
                self.saved[at] = save_all(step, source)
                self.plain.pop(at, None)
            else:
                self.plain[at] = forward(step, source, self.runner.habits[at - 1], self.found[at])
        if save == "nothing":
            self.plain.pop(at - 1, None)

    def _backward(self, operation: Backward) -> None:
        at = _number(operation)
        saved, gradients = self.saved.pop(at), self.gradients
        self.plain.pop(at - 1, None)  # the saved set refers to it as long as it needs it
        self.gradients, shared = saved.backward(gradients)
        for key, part in shared.items():
            self.sums[key] = self.sums[key] + part if key in self.sums else part

    def _discard(self, operation: Discard) -> None:
        at = _number(operation)
        if operation.what == "all":
            del self.saved[at]
        else:
            del self.plain[at - 1]

    def _input_of(self, at: int) -> Activation:
        return self.plain[at - 1] if at - 1 in self.plain else self.saved[at - 1].output

    @contextmanager
    def _as_first(self, at: int, source: Activation) -> Iterator[None]:
        """Run a stage's forward for the first time, or else as it ran then."""
        if at not in self.runner.replayed:
            yield
            return
        step = self.steps[at - 1]
        if at not in self.found:
            devices = {leaf.device for leaf in (*source.leaves, *step.parameters) if isinstance(leaf, Tensor)}
            with remembering(step.stage, devices, self.runner.habits[at - 1]) as self.found[at]:
                yield
        else:
            if self.versions[at] != _versions(step.parameters):
                raise ElbowroomError(f"a parameter of stage {at} has changed since its forward, which must run again")
            if at == 1 and self.versions[0] != _versions(source.leaves):
                raise ElbowroomError("the input has changed since the forward, which must run again")
            with self.found[at].restored():
                yield
        self.versions[at] = _versions(step.parameters)

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
        return (*gradients, *(self.sums.pop(key, None) for key in self.shared))


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
    return output.value(_Output.apply(run, token, *output.taking))  # type: ignore[no-untyped-call]


class _Output(torch.autograd.Function):
    """Takes the gradients that arrive from outside and hands them to the run.

    Autograd holds on to what it passes to a node until that node returns. This one returns at once; while the next
    one runs the schedule, only the run holds them, and lets go of them when the referee does.
    """

    @staticmethod
    def forward(ctx: Any, run: _Run, token: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        return tuple(leaf.detach() for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Gradients:
        ctx.run.start_backward(gradients)
        return (None, None, *(None for _ in gradients))


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


# --- one stage -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A stage as it is when called: its parameters, and where those are that it trains and other stages have too."""

    stage: nn.Module
    parameters: tuple[Tensor, ...]
    shared: tuple[Place, ...]


def steps_of(stages: Sequence[nn.Module]) -> list[Step]:
    """Looked up at every call, because parameters get frozen, thawed and replaced between calls."""
    places = [
        [(m._parameters, name, p) for m in stage.modules() for name, p in m._parameters.items() if p is not None]
        for stage in stages
    ]
    users = Counter(key for of_stage in places for key in {id(p) for _, _, p in of_stage})
    return [
        Step(
            stage,
            tuple(p for _, _, p in of_stage),
            tuple(place for place in of_stage if place[2].requires_grad and users[id(place[2])] > 1),
        )
        for stage, of_stage in zip(stages, places, strict=True)
    ]


@dataclass(frozen=True)
class Activation:
    """A stage's output or the chain's input, taken apart; `needs` marks the leaves that take a gradient."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    needs: tuple[bool, ...]

    @classmethod
    def of(cls, value: Any) -> Activation:
        leaves, spec = tree_flatten(value)
        return cls(_detached(leaves), spec, tuple(isinstance(x, Tensor) and x.requires_grad for x in leaves))

    @property
    def taking(self) -> list[Tensor]:
        return [leaf for leaf, need in zip(self.leaves, self.needs, strict=True) if need]

    def with_taking(self, tensors: Iterable[Tensor]) -> list[Any]:
        """The leaves, with other tensors for those that take a gradient."""
        others = iter(tensors)
        return [next(others) if need else leaf for leaf, need in zip(self.leaves, self.needs, strict=True)]

    def value(self, taking: Iterable[Tensor] = ()) -> Any:
        return tree_unflatten(self.with_taking(taking) if any(self.needs) else self.leaves, self.spec)


Gradients: TypeAlias = tuple[Tensor | None, ...]  # one for each leaf that takes a gradient


@dataclass
class Habits:
    """What is learned about a stage by running it."""

    differentiates: bool = False  # in its forward
    silent: dict[tuple[bool, ...], frozenset[int]] = field(default_factory=dict)  # see `remembering`


def forward(step: Step, source: Activation, habits: Habits, found: Found) -> Activation:
    """A stage's output; nothing else is kept.

    It runs as it does when it saves, only that all it would save is dropped. Without gradients some operations
    (nn.LSTM on a CPU, attention) use other kernels, whose results differ in the last bits. If it turns out that the
    stage itself needs what it saves, it runs again with that, from what was `found` before.
    """
    if not habits.differentiates:
        try:
            with saved_tensors_hooks(_forget, _forget):  # type: ignore[arg-type]
                return save_all(step, source).output
        except (RuntimeError, TypeError):  # torch.func refuses to run here, autograd gets None for a tensor
            found.put_back()
    output = save_all(step, source).output
    habits.differentiates = True
    return output


def _forget(saved: Any) -> None:
    return None


def save_all(step: Step, source: Activation) -> SavedSet:
    """A stage's output, and everything its backward needs."""
    shared = {id(p): p for _, _, p in step.shared}
    wanted = (*source.taking, *(p.detach() for p in shared.values()))
    caught: list[Tensor | None] = []
    with torch.enable_grad():
        token = torch.empty(0, requires_grad=True)
        tensors = _Catch.apply(caught, token, *wanted) if wanted else ()  # type: ignore[no-untyped-call]
        aliases = dict(zip(shared, tensors[len(source.taking) :], strict=True))
        with swapped([(table, name, aliases[id(p)]) for table, name, p in step.shared]):
            leaves, spec = _call(step.stage, source, source.with_taking(tensors))
    needs = tuple(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
    edges = tuple(get_gradient_edge(leaf) for leaf, need in zip(leaves, needs, strict=True) if need)
    return SavedSet(Activation(_detached(leaves), spec, needs), edges, caught, tuple(shared))


def _call(stage: nn.Module, source: Activation, given: list[Any]) -> tuple[list[Any], TreeSpec]:
    versions = _versions(source.leaves)
    leaves, spec = tree_flatten(stage(tree_unflatten(given, source.spec)))
    if versions != _versions(source.leaves):
        name = type(stage).__name__
        raise InputError("stages", f"{name} writes into its input; fuse_stages joins it to the stage before it")
    return leaves, spec


class SavedSet:
    """What the backward of a stage needs, and the output of the stage.

    It refers to where its graph begins, not to the output: that can go as soon as the backward starts.
    """

    def __init__(
        self,
        output: Activation,
        edges: tuple[GradientEdge, ...],
        caught: list[Tensor | None],
        shared: tuple[int, ...],
    ) -> None:
        self._output: Activation | None = output
        self.edges = edges
        self.caught = caught  # not this object: the graph refers to it, and this refers to the graph
        self.shared = shared

    @property
    def output(self) -> Activation:
        assert self._output is not None
        return self._output

    def take_output(self) -> Activation:
        output, self._output = self.output, None
        return output

    def backward(self, gradients: Gradients) -> tuple[Gradients, dict[int, Tensor]]:
        """The gradients of the stage's input, and those of its shared parameters; the others' go to `.grad`."""
        self._output = None
        starts = [(edge, g) for edge, g in zip(self.edges, gradients, strict=True) if g is not None]
        if starts:
            torch.autograd.backward([edge for edge, _ in starts], [g for _, g in starts])
        inputs = len(self.caught) - len(self.shared)
        found = zip(self.shared, self.caught[inputs:], strict=False)
        return tuple(self.caught[:inputs]), {key: gradient for key, gradient in found if gradient is not None}


class _Catch(torch.autograd.Function):
    """Where a stage's graph ends: leaves the gradients of the stage's inputs in a list.

    A leaf's `.grad` would do, but autograd copies a gradient into it that anything else refers to.
    """

    @staticmethod
    def forward(ctx: Any, caught: list[Tensor | None], token: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.caught = caught
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Gradients:
        ctx.caught.extend(gradients)
        return (None, None, *(None for _ in gradients))


def _detached(leaves: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)


def _versions(leaves: Iterable[Any]) -> tuple[int, ...]:
    return tuple(leaf._version for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference())


# --- running again as the first time -------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """A buffer of a module, and a copy of it as it was."""

    table: dict[str, Any]
    name: str
    buffer: Tensor
    version: int
    copy: Tensor


@dataclass
class Found:
    """What the first forward of a stage found: random states, buffers. Once it is `over`, only what it changed."""

    random: dict[torch.device, Tensor]
    buffers: list[Kept]
    over: bool = False

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Everything as it was found; afterwards, as if nothing had run."""
        now = {device: _random_state(device) for device in self.random}
        try:
            for device, state in self.random.items():
                _set_random_state(device, state)
            # A replay gets copies: the buffers themselves keep their version, which graphs that saved them check.
            with swapped([(kept.table, kept.name, kept.copy.clone()) for kept in self.buffers]):
                yield
        finally:
            for device, state in now.items():
                _set_random_state(device, state)

    def put_back(self) -> None:
        """Undo a forward that failed, so that it can be tried again."""
        for device, state in self.random.items():
            _set_random_state(device, state)
        for kept in self.buffers:
            kept.table[kept.name] = kept.copy.clone() if self.over else kept.buffer.copy_(kept.copy)


@contextmanager
def remembering(stage: nn.Module, devices: Iterable[torch.device], habits: Habits) -> Iterator[Found]:
    """Find out what a forward uses up of the random streams and which buffers it changes.

    Batch normalization changes its statistics without a trace in their version, so values are compared too, but only
    the first time that the modules are in these modes: on a GPU it means waiting.

    For dropout in recurrent networks cuDNN has a random stream of its own, which cannot be read. But setting the
    GPU's random state makes it begin anew from there, which is done here too, so that a replay can do the same.
    """
    found = Found(
        {device: _random_state(device) for device in {torch.device("cpu"), *devices}},
        [
            Kept(module._buffers, name, buffer, buffer._version, buffer.detach().clone())
            for module in stage.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ],
    )
    for device, state in found.random.items():
        if device.type != "cpu":
            _set_random_state(device, state)
    yield found
    found.random = {d: state for d, state in found.random.items() if not torch.equal(state, _random_state(d))}
    modes = tuple(module.training for module in stage.modules())
    if modes not in habits.silent:
        pairs = enumerate(found.buffers)
        habits.silent[modes] = frozenset(i for i, kept in pairs if not torch.equal(kept.buffer, kept.copy))
    found.buffers = [
        kept
        for i, kept in enumerate(found.buffers)
        if i in habits.silent[modes]
        or kept.buffer._version != kept.version
        or kept.table[kept.name] is not kept.buffer
    ]
    found.over = True


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
