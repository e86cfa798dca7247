"""Checkpoints that a person would place by hand: the peers that gpu_fit.py compares elbowroom with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cases import Case
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

EVERY = (1, 2, 4)  # `checkpoint` is put on every block, on every second and on every fourth
SEGMENTS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48)  # of `checkpoint_sequential`; also as many as the chain is long


@dataclass(frozen=True)
class Peer:
    """One way to place checkpoints. `call` runs the model's forward, and `placed` is entered around its steps."""

    how: str
    kind: str  # of its row: eager, blocks or chain
    call: Callable[..., Any]
    placed: AbstractContextManager[None] = field(default_factory=nullcontext)


def peers_of(case: Case) -> Iterator[Peer]:
    """The model as it is, its blocks under `checkpoint`, its own switch if it has one, `checkpoint_sequential`."""
    yield Peer("eager", "eager", case.model)
    for block, modules in case.blocks.items():
        for every in EVERY:
            if every < len(modules):
                placed = checkpointed(modules[::every])
                yield Peer(f"checkpoint, {ordinal(every)} {block}", "blocks", case.model, placed)
    if switches := [module for module in case.model.modules() if getattr(module, "memory_efficient", None) is False]:
        yield Peer("the model's own memory_efficient", "blocks", case.model, memory_efficient(switches))
    chain = nn.Sequential(*case.chain)
    for segments in [n for n in SEGMENTS if n < len(chain)] + [len(chain)] * bool(case.chain):
        split = partial(checkpoint_sequential, chain, segments, use_reentrant=False)
        yield Peer(f"checkpoint_sequential, {segments} segments", "chain", lambda x, split=split: split(input=x))


@contextmanager
def checkpointed(modules: Sequence[nn.Module], *, reentrant: bool = False) -> Iterator[None]:
    """Keep only the inputs of these modules, and compute in the backward again what is inside them.

    If it is `reentrant`, hooks of saved tensors see the inputs that are kept.
    """
    for module in modules:
        module.forward = partial(run_checkpointed, module.forward, reentrant=reentrant)
    try:
        yield
    finally:
        for module in modules:
            del module.forward  # the instance's own; the one of its class is in force again


def run_checkpointed(forward: Callable[..., Any], *args: Any, reentrant: bool = False, **kwargs: Any) -> Any:
    # A dense block appends to the list that it hands to its layers. The second run must see what the first one saw,
    # so it gets a copy of the list.
    args = tuple(list(value) if isinstance(value, list) else value for value in args)
    if reentrant:  # which takes no keywords
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=True)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


@contextmanager
def memory_efficient(modules: Sequence[Any]) -> Iterator[None]:
    """Turn on torchvision's switch for DenseNet: concatenations and their normalizations are computed again."""
    for module in modules:
        module.memory_efficient = True
    try:
        yield
    finally:
        for module in modules:
            module.memory_efficient = False


def ordinal(every: int) -> str:
    return {1: "every", 2: "every 2nd", 3: "every 3rd"}.get(every, f"every {every}th")
