"""The stages of a model that cannot be captured, and what each costs, measured as the chain executor runs it.

`stages_of` takes a model apart, `fuse_stages` joins what cannot be apart, and `measure_stages` makes a `Chain` for
which the referee never predicts less memory than `ChainRunner` takes. It can predict more:

- What running again needs to be exact (random states, buffers that change), the loss, and twice the bytes of
parameters that
  several stages share are counted for the whole step, in `input_bytes`.
- What a stage hands through as it is, forward or backward, counts twice while the stage runs.
- A backward lets go of the stage's input and output, and of what it has used, earlier than the referee does. For a
  stage that does not need its own output, as a linear layer, that is one activation less.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from elbowroom.errors import InputError
from elbowroom.execute.by_stages.python_state import PythonState, generators_now, plain_tensors
from elbowroom.execute.by_stages.rerun import Autocast, FirstRun, Habits, Place, remembering, swapped
from elbowroom.execute.by_stages.stage_step import Activation, Gradients, SavedSet, Step, forward, save_all, steps_of
from elbowroom.measure.allocator_reports import changes_during
from elbowroom.problem import Chain, Saving, Stage
from elbowroom.progress import Progress
from elbowroom.step.allocator import BLOCK

REPEATS = 5  # every time is the median of so many
HAIR = 1 + 1e-6

# --- which stages there are ----------------------------------------------------------------------------------


def stages_of(model: nn.Module) -> list[nn.Module]:
    """What a model calls one after the other: nested `nn.Sequential`s taken apart."""
    if isinstance(model, nn.Sequential) and _only_calls_children(model):
        return [stage for child in model for stage in stages_of(child)]
    return [model]


def _only_calls_children(module: nn.Sequential) -> bool:
    """Hooks, and whatever a subclass does, would be lost with the container."""
    inherited = type(module).forward is nn.Sequential.forward and type(module).__call__ is nn.Sequential.__call__
    return inherited and "forward" not in vars(module) and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether something else happens when a module is called."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in hooks)


def fuse_stages(stages: Sequence[nn.Module], example: Any) -> list[nn.Module]:
    """Stages whose borders can be saved, found by running each once.

    A stage that writes into its input (`nn.ReLU(inplace=True)`) joins the one before it: what lies on a border may be
    saved to run the stage again, and must then still be what it was. A stage that only hands out its input or a view
    of it joins too: that border costs memory without ever freeing any.
    """
    groups: list[list[nn.Module]] = []
    with undisturbed_stages(stages, example), torch.no_grad():
        value = tree_map_only(Tensor, torch.clone, example)
        at_input = True  # whether everything so far is views of the model's input
        for i, stage in enumerate(stages):
            sources = tensors_in(value)
            versions = [source._version for source in sources]
            value = stage(value)
            wrote = versions != [source._version for source in sources]
            views = _storages(tensors_in(value)) <= _storages(sources)
            if wrote and at_input:
                raise InputError(
                    f"stages[{i}]", f"{_name(stage)} writes into the model's input, which running again needs"
                )
            if groups and (wrote or views or at_input):
                groups[-1].append(stage)
            else:
                groups.append([stage])
            at_input = at_input and views
    return [group[0] if len(group) == 1 else nn.Sequential(*group) for group in groups]


# --- what they cost ------------------------------------------------------------------------------------------


def measure_stages(
    stages: Sequence[nn.Module],
    example: Any,
    *,
    device: str | torch.device | None = None,
    outside_bytes: int = 0,
    keeps_output: bool = False,
    progress: Progress = lambda part: None,
) -> Chain:
    """The chain of some stages (as `fuse_stages` leaves them) for an example input, plus one for what is outside.

    Bytes are those of `device`, by default the example's, on top of parameters and their gradients, which are taken
    to be there. Call it under the autocast of the training step. `outside_bytes` is what the loss takes besides the
    output and its gradient; `keeps_output` says that the caller has the output in a variable during the backward.
    Stages are run, but gradients, buffers and random streams are afterwards what they were.
    """
    if not stages:
        raise InputError("stages", "is empty; there is nothing to measure")
    chosen = torch.empty(0, device=device).device if device is not None else _device_of(stages, example)
    with undisturbed_stages(stages, example):
        steps = steps_of(stages)
        forwards: list[_Forward] = []
        sources = [Activation.of(example)]
        for step in steps:
            cost, output = _measured_forward(step, sources[-1], chosen)
            forwards.append(cost)
            sources[-1] = moved_to(sources[-1], torch.device("cpu"))  # together they may be too much for a device
            sources.append(output)
            progress(len(forwards) / len(steps) / 2)
        # From the last to the first, so that each gets gradients as it will: which there are, how they are laid out.
        backwards: list[_Backward] = []
        candidates = _gradients_from_outside(sources.pop())
        for step in reversed(steps):
            back, gradients = _measured_backward(step, moved_to(sources.pop(), chosen), candidates, chosen)
            backwards.insert(0, back)
            candidates = [gradients]
            progress(0.5 + len(backwards) / len(steps) / 2)
    shared = {id(p): p for step in steps for _, _, p in step.shared}
    scalar = torch.empty((), dtype=torch.float64, device=chosen)  # the loss; autograd also holds its gradient
    held_bytes = 2 * bytes_on([scalar], chosen)
    held_bytes += sum(cost.kept_bytes for cost in forwards) + 2 * bytes_on(shared.values(), chosen)
    if keeps_output:
        held_bytes += forwards[-1].output_bytes
    measured = [_stage(*each) for each in zip(steps, forwards, backwards, strict=True)]
    outside = Stage("outside", 0, 0, 0, 0, 0, outside_bytes, outside_bytes)
    return Chain(
        bytes_on(tensors_in(example), chosen) + held_bytes, bytes_on(gradients, chosen), (*measured, outside)
    )


@dataclass(frozen=True)
class _Forward:
    """A forward that saves nothing: `through_bytes` are handed through, `kept_bytes` are needed to run it again."""

    time: float
    output_bytes: int
    overhead_bytes: int
    through_bytes: int
    kept_bytes: int


@dataclass(frozen=True)
class _Backward:
    """A forward that saves all, and the backward after it, which starts from `gradient_bytes`."""

    saving_time: float
    time: float
    saved_bytes: int
    saving_overhead_bytes: int
    overhead_bytes: int
    gradient_bytes: int


def _stage(step: Step, alone: _Forward, back: _Backward) -> Stage:
    """A stage and, where that differs, an alternative.

    A stage has one overhead for both kinds of forward, so it has to be the larger one. The alternative is to save the
    same with the overhead that saving really has, which is often none: what the other forward frees, this one saves.
    It is better or equal in all respects, and a hair faster, so that a solver does not take the other one on a tie.
    """
    time = max(alone.time, back.saving_time)
    saved_bytes = max(alone.output_bytes, back.saved_bytes + alone.through_bytes)
    saving_bytes = max(alone.output_bytes + alone.overhead_bytes, saved_bytes + back.saving_overhead_bytes)
    least_bytes = saving_bytes - saved_bytes
    most_bytes = max(alone.overhead_bytes, least_bytes)
    better = Saving(time, back.time, saved_bytes, least_bytes, back.overhead_bytes)
    alternatives = (better,) if least_bytes < most_bytes else ()
    return Stage(
        name=_name(step.stage),
        forward_time=time,
        backward_time=back.time * HAIR if alternatives else back.time,
        output_bytes=alone.output_bytes,
        saved_bytes=saved_bytes,
        gradient_bytes=back.gradient_bytes,
        forward_overhead_bytes=most_bytes,
        backward_overhead_bytes=back.overhead_bytes,
        alternatives=alternatives,
    )


def _measured_forward(step: Step, source: Activation, device: torch.device) -> tuple[_Forward, Activation]:
    """What a forward costs that saves nothing, and its output."""
    habits = Habits()
    run_once(step, source, habits, saving=False)  # warm-up
    habits.silent.clear()  # learning that takes memory too
    (output, found), [level] = observe(device, lambda _: run_once(step, source, habits, saving=False))
    time = statistics.median(
        _timed(device, lambda: run_once(step, source, habits, saving=False))[1] for _ in range(REPEATS)
    )
    through = _storages(tensors_in(source.leaves))
    through_bytes = bytes_on([leaf for leaf in tensors_in(output.leaves) if _storages([leaf]) <= through], device)
    kept_bytes = bytes_on([*found.random.values(), *(kept.copy for kept in found.buffers)], device)
    output_bytes = level.end - kept_bytes + through_bytes
    return _Forward(time, output_bytes, max(0, level.peak - output_bytes), through_bytes, kept_bytes), output


def _measured_backward(
    step: Step, source: Activation, candidates: Sequence[Gradients], device: torch.device
) -> tuple[_Backward, Gradients]:
    """What saving costs and what the dearest backward does that starts from one of some gradients; its result."""
    for parameter in step.parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    tried = []
    for gradients in candidates:
        _backward(gradients, run_once(step, source, Habits(), saving=True))  # warm-up
        results, levels = observe(
            device, lambda _: run_once(step, source, Habits(), saving=True), partial(_backward, gradients)
        )
        tried.append((results, levels, gradients))
    results, [saving, level], gradients = max(tried, key=lambda each: each[1][-1].peak)
    habits, savings, backwards = Habits(), [], []
    for _ in range(REPEATS):
        made, seconds = _timed(device, lambda: run_once(step, source, habits, saving=True))
        savings.append(seconds)
        backwards.append(_timed(device, partial(_backward, gradients, made))[1])
    for parameter in step.parameters:
        parameter.grad = None
    cost = _Backward(
        saving_time=statistics.median(savings),
        time=statistics.median(backwards),
        saved_bytes=saving.end,
        saving_overhead_bytes=max(0, saving.peak - saving.end),
        overhead_bytes=max(0, level.peak - saving.end - bytes_on(results, device)),
        gradient_bytes=bytes_on(gradients, device),
    )
    return cost, results


def _gradients_from_outside(output: Activation) -> list[Gradients]:
    """Laid out like the output, or in order of its dimensions: nobody knows what the loss will do."""
    alike = tuple(torch.ones_like(leaf) for leaf in output.taking)
    ordered = tuple(gradient.contiguous() for gradient in alike)
    return [alike] if all(gradient.is_contiguous() for gradient in alike) else [alike, ordered]


def run_once(step: Step, source: Activation, habits: Habits, *, saving: bool) -> tuple[Any, FirstRun]:
    """A forward that may run again."""
    devices = {tensor.device for tensor in (*tensors_in(source.leaves), *step.parameters)}
    with Autocast.now().in_force(), remembering(step.stage, devices, habits) as found:
        made = save_all(step, source) if saving else forward(step, source, habits, found)
    return made, found


def _backward(gradients: Gradients, made: tuple[SavedSet, FirstRun]) -> Gradients:
    return made[0].backward(gradients)[0]


# --- what it takes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Level:
    """Bytes above the start: the most while a part ran, and at its end."""

    peak: int
    end: int


def observe(device: torch.device, *parts: Callable[[Any], Any]) -> tuple[Any, list[_Level]]:
    """Run the parts, each on what the one before returned: the last result, and the memory each took."""
    if device.type == "cuda":
        return _observe_cuda(device, *parts)
    value, levels, level, autocast = None, [], 0, Autocast.now()
    for part in parts:
        value, changes = changes_during(partial(_under, autocast, part, value))
        heights = [*accumulate(changes, initial=level)]
        level = heights[-1]
        levels.append(_Level(max(heights), level))
    return value, levels


def _under(autocast: Autocast, part: Callable[[Any], Any], value: Any) -> Any:
    """In another thread, perhaps, where autocast is off."""
    with autocast.in_force():
        return part(value)


def _observe_cuda(device: torch.device, *parts: Callable[[Any], Any]) -> tuple[Any, list[_Level]]:
    value, levels, start = None, [], torch.cuda.memory_allocated(device)
    for part in parts:
        torch.cuda.reset_peak_memory_stats(device)
        value = part(value)
        peak, end = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        levels.append(_Level(peak - start, end - start))
    return value, levels


def _timed(device: torch.device, run: Callable[[], Any]) -> tuple[Any, float]:
    """A result and the seconds it took."""
    if device.type != "cuda":
        started = time.perf_counter()
        return run(), time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record(torch.cuda.current_stream(device))
    value = run()
    end.record(torch.cuda.current_stream(device))
    end.synchronize()
    return value, begin.elapsed_time(end) / 1000


# --- small things --------------------------------------------------------------------------------------------


@contextmanager
def undisturbed_stages(stages: Sequence[nn.Module], example: Any) -> Iterator[None]:
    """Parameters with gradients and hooks of their own, copies of buffers; attributes and random streams put back."""
    modules = dict.fromkeys(module for stage in stages for module in stage.modules())
    places: list[Place] = [
        (table, name, tensor)
        for module in modules
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]
    places += [place for module in modules for place in plain_tensors(module)]
    python = PythonState.of(modules, generators_now())
    others = {id(tensor): _other(tensor) for _, _, tensor in places}
    tensors = (*tensors_in(example), *(tensor for _, _, tensor in places))
    cuda = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    collecting = gc.isenabled()
    gc.disable()  # older garbage must not be freed in the middle of a measurement
    try:
        with torch.random.fork_rng(cuda), swapped([(table, name, others[id(x)]) for table, name, x in places]):
            yield
    finally:
        python.put_back()
        if collecting:
            gc.enable()


def _other(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    return tensor.detach().clone()


def moved_to(activation: Activation, device: torch.device) -> Activation:
    leaves = [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in activation.leaves]
    return replace(activation, leaves=tuple(leaves))


def _device_of(stages: Sequence[nn.Module], example: Any) -> torch.device:
    tensors = [*tensors_in(example), *(p for stage in stages for p in stage.parameters())]
    return tensors[0].device if tensors else torch.device("cpu")


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def bytes_on(tensors: Iterable[Tensor | None], device: torch.device) -> int:
    """What the storages behind some tensors take on a device, as its allocator counts."""
    storages = [t.untyped_storage() for t in tensors if t is not None and t.device == device]
    block = BLOCK if device.type == "cuda" else 1
    return sum(-(-s.nbytes() // block) * block for s in {s._cdata: s for s in storages}.values())


def _name(stage: nn.Module) -> str:
    parts = list(stage) if isinstance(stage, nn.Sequential) else [stage]
    return "+".join(type(part).__name__ for part in parts)
