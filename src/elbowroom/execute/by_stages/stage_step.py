"""One stage of a chain, executed: a forward that saves nothing, one that saves all, and the backward of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from elbowroom.errors import InputError
from elbowroom.execute.by_stages.python_state import plain_tensors
from elbowroom.execute.by_stages.rerun import FirstRun, Habits, Place, swapped


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


def tensors_of_modules(steps: Sequence[Step]) -> Iterator[Tensor]:
    """What never leaves: parameters, buffers, and other tensors that modules keep."""
    for step in steps:
        yield from step.parameters
        for module in step.stage.modules():
            yield from (buffer for buffer in module._buffers.values() if buffer is not None)
            yield from (tensor for _, _, tensor in plain_tensors(module))


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


def forward(step: Step, source: Activation, habits: Habits, found: FirstRun) -> Activation:
    """A stage's output; nothing else is kept.

    It runs as it does when it saves, only that all it would save is dropped. Without gradients some operations
    (nn.LSTM on a CPU, attention) use other kernels, whose results differ in the last bits. If it turns out that the
    stage itself needs what it saves, it runs again with that, from what was `found` before.
    """
    if not habits.differentiates:
        missed: list[None] = []  # what the stage itself wanted of what was dropped
        try:
            with saved_tensors_hooks(_forget, missed.append):  # type: ignore[arg-type]
                return save_all(step, source).output
        except (RuntimeError, TypeError) as failure:
            # Autograd gets None for a tensor, or torch.func refuses to run here. Other faults are the stage's own.
            if not missed and "saved tensor hooks" not in str(failure):
                raise
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
        # A leaf's `.grad` would do, but autograd copies a gradient into it that anything else refers to.
        tensors = Catch.apply(caught.extend, token, *wanted) if wanted else ()  # type: ignore[no-untyped-call]
        aliases = dict(zip(shared, tensors[len(source.taking) :], strict=True))
        with swapped([(table, name, aliases[id(p)]) for table, name, p in step.shared]):
            leaves, spec = _call(step.stage, source, source.with_taking(tensors))
    needs = tuple(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
    edges = tuple(get_gradient_edge(leaf) for leaf, need in zip(leaves, needs, strict=True) if need)
    return SavedSet(Activation(_detached(leaves), spec, needs), edges, caught, tuple(shared))


def _call(stage: nn.Module, source: Activation, given: list[Any]) -> tuple[list[Any], TreeSpec]:
    before = versions(source.leaves)
    leaves, spec = tree_flatten(stage(tree_unflatten(given, source.spec)))
    if before != versions(source.leaves):
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

    def set_output(self, output: Activation | None) -> None:
        """None while it is elsewhere."""
        self._output = output

    def backward(self, gradients: Gradients) -> tuple[Gradients, dict[int, Tensor]]:
        """The gradients of the stage's input, and those of its shared parameters; the others' go to `.grad`."""
        self._output = None
        starts = [(edge, g) for edge, g in zip(self.edges, gradients, strict=True) if g is not None]
        if starts:
            torch.autograd.backward([edge for edge, _ in starts], [g for _, g in starts])
        inputs = len(self.caught) - len(self.shared)
        found = zip(self.shared, self.caught[inputs:], strict=False)
        return tuple(self.caught[:inputs]), {key: gradient for key, gradient in found if gradient is not None}


class Catch(torch.autograd.Function):
    """Where a graph ends or begins: hands the gradients that reach its tensors to `receive`, and returns at once."""

    @staticmethod
    def forward(
        ctx: Any, receive: Callable[[Gradients], None], token: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.receive = receive
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Gradients:
        ctx.receive(gradients)
        return (None, None, *(None for _ in gradients))


def _detached(leaves: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)


def versions(leaves: Iterable[Any]) -> tuple[int, ...]:
    return tuple(leaf._version for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference())
