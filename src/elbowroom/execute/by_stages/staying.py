"""What stays on the device of values that move, measured stage by stage as `ChainRunner` moves them.

The referee takes a value that is on the host to have left with all of its bytes. Some may stay: what hooks of saved
tensors do not see, such as attributes on the context of an `autograd.Function`, and what a module keeps a reference
to. They are counted for the whole step, and again among the bytes of the value, which is never too little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from elbowroom.execute.by_stages.measuring import (
    bytes_on,
    moved_to,
    observe,
    run_once,
    tensors_in,
    undisturbed_stages,
)
from elbowroom.execute.by_stages.moving_values import MovingValues
from elbowroom.execute.by_stages.rerun import Habits
from elbowroom.execute.by_stages.stage_step import Activation, Step, steps_of, tensors_of_modules
from elbowroom.problem import Chain


@dataclass(frozen=True)
class Staying:
    """Bytes that stay at most, of all stages together, and the stages (from 1) whose graphs cannot be packed: what
    they need stays."""

    bytes: int = 0
    sealed: frozenset[int] = frozenset()


def measure_staying(stages: Sequence[nn.Module], example: Any, chain: Chain, device: torch.device) -> Staying:
    """What stays of the saved sets and inputs of a chain's stages. Leaves everything as `measure_stages` does."""
    total, sealed = 0, set()
    with undisturbed_stages(stages, example):
        source = Activation.of(example)
        for number, step in enumerate(steps_of(stages), start=1):
            source = moved_to(source, device)
            output = run_once(step, source, Habits(), saving=True)[0].output
            if _packs(step, source, device):
                total += _stays(step, source, device, is_first=number == 1)
            else:
                sealed.add(number)
                total += chain.stages[number - 1].saved_bytes + bytes_on(tensors_in(source.leaves), device)
            source = output
    return Staying(total, frozenset(sealed))


def _packs(step: Step, source: Activation, device: torch.device) -> bool:
    """Whether autograd's graph of a stage can be packed: torch.func, for one, refuses it."""
    try:
        with MovingValues(device, ()).packing():
            run_once(step, source, Habits(), saving=True)
    except RuntimeError as failure:
        if "saved tensor hooks" not in str(failure):
            raise
        return False
    return True


def _stays(step: Step, source: Activation, device: torch.device, *, is_first: bool) -> int:
    """Run a stage that saves all; let what it saved go, then its input; and see what has not gone."""
    values = MovingValues(device, tensors_of_modules([step]))
    habits = Habits()
    run_once(step, source, habits, saving=True)  # so that nothing is learned, and kept, while it counts
    given: list[Activation] = []

    def take_input(_: Any) -> None:
        if is_first:
            given.append(source)  # the caller's, which never leaves
        else:
            given.append(_copied(source))
            values.hold(("plain", 0), given[0])

    def save(_: Any) -> Any:
        with values.packing():
            saved, found = run_once(step, given[0], habits, saving=True)
        values.hold(("saved", 1), saved.output)
        saved.set_output(None)
        return saved, found

    def let_saved_go(made: Any) -> Any:
        values.forget(("saved", 1))
        return made

    def let_input_go(made: Any) -> Any:
        given.clear()
        if not is_first:
            values.forget(("plain", 0))
        return made

    (_, found), [_, _, _, level] = observe(device, take_input, save, let_saved_go, let_input_go)
    kept_bytes = bytes_on([*found.random.values(), *(kept.copy for kept in found.buffers)], device)
    return max(0, level.end - kept_bytes)


def _copied(activation: Activation) -> Activation:
    """In storages that nobody else has."""
    copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in activation.leaves]
    return replace(activation, leaves=tuple(copies))
