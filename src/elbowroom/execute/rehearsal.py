"""Runs a program on what the graph was last called with and measures it; nothing that the user sees changes.

Times are those of steps in a row, as in training, where the host runs ahead of the GPU. Single steps, with the host's
start in each, made recordings of GPT-2 look 6 % faster than launching it; they are no faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from elbowroom.capture.joint_graph import Captured, made_real
from elbowroom.capture.traced_values import number_in
from elbowroom.execute.accumulation import on_trial
from elbowroom.execute.fused import Fused
from elbowroom.execute.fused_graphs import Mode
from elbowroom.execute.recording import LOG, Recording
from elbowroom.execute.region import Region
from elbowroom.execute.to_host.moving_program import MovingProgram
from elbowroom.measure.allocator_reports import changes_during
from elbowroom.measure.memory import garbage_collected
from elbowroom.measure.plain_operators import asleep, cuda_seconds, host_seconds, is_like, launch_seconds, made_up

_SAMPLES = 3
_SAMPLE_S, _MOST_STEPS = 0.5, 8  # how many steps make a sample
_TOO_MUCH = 1.02  # times the room, for a program that ran out of memory: how much it takes is not known
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Trial:
    """What a program took: its peak above what is resident, and its time.

    `kernels_s` of that the GPU would need if it never waited for the host; 0 if that is not known. The host is busy
    for `host_s`; 0 if that makes no difference.
    """

    peak_bytes: int
    time_s: float
    kernels_s: float = 0.0
    host_s: float = 0.0


def launched(region: Region, number: int, between_bytes: int, late_bytes: int = 0) -> Trial:
    """`between_bytes` are in use between forward and backward, whatever the trial itself holds then. `late_bytes` of
    gradients count as resident and are not there before the backward makes them."""
    with _quietly():
        ready, device = region.programs[number], region.traced.device
        step = _step(region, number, keeps=bool(late_bytes))
        step()  # the first run loads kernels and picks algorithms
        if device.type != "cuda":
            peak, time = _measured_on_host(step)
        else:
            peak, time = _peak_during(partial(in_a_row, step), device)
        is_replayable = device.type == "cuda" and ready.fused is not None
        kernels, host = kernels_and_host(step) if is_replayable else (time, 0.0)
        return Trial(max(peak - late_bytes, between_bytes), time, kernels, host)


def launched_within(room: int, region: Region, number: int, between_bytes: int, late_bytes: int = 0) -> Trial:
    """The same where the process may take little more than the room: a program that it cannot run does not fit.

    Nothing is known of its time then. It took what was in use when there was no more, and more than the room.
    """
    try:
        return launched(region, number, between_bytes, late_bytes)
    except torch.OutOfMemoryError:
        highest = torch.cuda.max_memory_allocated(region.traced.device)
    with garbage_collected():  # the failed trial's values are part of its error, which is gone now
        torch.cuda.empty_cache()
    taken = highest - torch.cuda.memory_allocated(region.traced.device)
    return Trial(max(taken, int(_TOO_MUCH * room)), float("inf"))


def recorded(
    region: Region, number: int, between_bytes: int, outside_bytes: int, late_bytes: int = 0
) -> Trial | None:
    """The same as CUDA graphs, if that can be; `outside_bytes` are needed while the recording holds its memory.

    Gradients that come late lie in it. Now and then the program will be launched: that must fit, too.
    """
    with _quietly():
        ready, inputs = region.programs[number], _inputs(region, number)
        fused, makes = ready.fused, ready.build.makes
        assert fused is not None
        try:
            gradients = fused.gradient_buffers(inputs) if makes == "write" else []
            launch = _fused_step(fused, inputs, gradients, makes, ready.moving)
            launch()
            peak, _ = _peak_during(launch, region.traced.device)
            lease = None if ready.moving is None else ready.moving.lease()
            pool, time = _recorded(Recording(fused, inputs, gradients, makes, lease), inputs)
        except Exception as failure:  # what cannot be recorded is launched
            LOG.info("not recorded: %s", failure)
            return None
        return Trial(max(peak - late_bytes, between_bytes, pool + outside_bytes - late_bytes), time)


def _step(region: Region, number: int, *, keeps: bool) -> Callable[[], None]:
    """Forward and backward of a program that keeps the gradients that it makes, or adds them to others."""
    ready, inputs = region.programs[number], _inputs(region, number)
    if ready.fused is not None:
        makes = ready.build.makes
        gradients = ready.fused.gradient_buffers(inputs) if makes == "write" else []
        return _fused_step(ready.fused, inputs, gradients, makes, ready.moving)

    def step() -> None:
        with on_trial(keeps=keeps):
            _run(ready.build.measured.captured, ready.forward, ready.backward, inputs)

    return step


def _fused_step(
    fused: Fused,
    inputs: Sequence[Any],
    gradients: list[torch.Tensor],
    makes: Mode,
    moving: MovingProgram | None = None,
) -> Callable[[], None]:
    """Gradients go to memory of our own, if there is some, as they will if the program serves."""
    backward = partial(fused.run_backward, buffers=gradients, mode=makes)
    if moving is not None:
        return partial(_run, fused.captured, moving.forward, partial(moving.backward, run=backward), inputs)
    return partial(_run, fused.captured, fused.forward, backward, inputs)


def _run(
    captured: Captured,
    forward: Callable[[list[Any]], list[Any]],
    backward: Callable[[list[Any]], Any],
    inputs: Sequence[Any],
) -> None:
    """One after the other. What autograd would hold, is held."""
    outputs = forward(list(inputs))
    count = len(captured.forward_outputs)
    results, arguments = outputs[:count], outputs[count:]
    del outputs
    arguments += _arriving(captured)
    backward(arguments)
    del results


def _recorded(recording: Recording, inputs: Sequence[Any]) -> tuple[int, float]:
    arriving = _arriving(recording.fused.captured)

    def step() -> None:
        recording.forward(inputs)
        recording.backward(arriving)

    step()
    return recording.bytes, in_a_row(step)


# --- measuring -----------------------------------------------------------------------------------------------


def _measured_on_host(step: Callable[[], None]) -> tuple[int, float]:
    _, changes = changes_during(step)
    return max(accumulate(changes, initial=0)), statistics.median(host_seconds(step) for _ in range(_SAMPLES))


def _peak_during(call: Callable[[], _Result], device: torch.device) -> tuple[int, _Result]:
    """Bytes of the GPU above those in use before, and what the call returns."""
    torch.cuda.synchronize(device)
    with garbage_collected():  # a trial that failed leaves some
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        return torch.cuda.max_memory_allocated(device) - before, result


def in_a_row(step: Callable[[], None]) -> float:
    steps = min(_MOST_STEPS, 1 + int(_SAMPLE_S / cuda_seconds(step, 1)))
    return statistics.median(cuda_seconds(step, steps) / steps for _ in range(_SAMPLES))


def kernels_and_host(step: Callable[[], None]) -> tuple[float, float]:
    """What a step's kernels take, in line while the GPU is still busy with something else, and what the host takes.

    A GPU takes a thousand or so ahead, then the host waits. If they are more, nothing is learned of the kernels: 0.
    """
    host_s = min(launch_seconds(step) for _ in range(_SAMPLES))  # the rest was disturbance
    samples = [_behind_sleep(step, 1.5 * host_s) for _ in range(_SAMPLES)]
    return (statistics.median(samples) if all(samples) else 0.0), host_s


def _behind_sleep(step: Callable[[], None], sleep_s: float) -> float:
    awake, in_time = torch.cuda.Event(), True

    def sleep() -> None:
        asleep(sleep_s)()
        awake.record()

    def step_meanwhile() -> None:
        nonlocal in_time
        step()
        in_time = not awake.query()

    seconds = cuda_seconds(step_meanwhile, 1, sleep)
    return seconds if in_time else 0.0


# --- what a program is run with ------------------------------------------------------------------------------


@contextmanager
def _quietly() -> Iterator[None]:
    with _disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast():
        yield


def _inputs(region: Region, number: int) -> list[Any]:
    """What the graph was called with when looked at, as far as that is there unchanged; the rest is made up."""
    captured = region.programs[number].build.measured.captured
    inputs = []
    for i, given in zip(captured.graph.inputs, region.example, strict=True):
        tensor, traced = given(), captured.nodes[i].meta["val"]
        if not isinstance(traced, torch.Tensor):
            inputs.append(number_in(traced))
            continue
        if tensor is None or not is_like(tensor, traced):
            tensor = made_up(traced, limit=1)
        inputs.append(tensor.detach().clone() if i in captured.graph.overwritten else tensor.detach())
    return inputs


def _arriving(captured: Captured) -> list[torch.Tensor]:
    return [made_real(captured.nodes[i].meta["val"]).fill_(1) for i in captured.graph.arriving]
