"""Fused programs on trial: each is run and measured before it may serve, because no model of fusion is exact.

What a compiled program takes differs from its prediction: the compiler fuses more or less than was assumed, picks
another layout, needs a workspace. So a plan is compiled and measured; if it is over the budget, or far below, it is
planned again with the difference added. All programs measured so far are remembered: the fastest that fits serves, so
a larger budget never gets a slower one. On a GPU each is measured twice: launched by the host, and recorded as CUDA
graphs. Recordings hold their memory, so each is given up after its trial; the one that serves is made again.
"""

from __future__ import annotations

import statistics
import time as clock
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from elbowroom.capture.joint_graph import made_real
from elbowroom.execute.fused import Fused, inductors_layout
from elbowroom.execute.recording import LOG, Recording, recordable
from elbowroom.execute.region import Region
from elbowroom.execute.settings import CUDA_MARGIN_SHARE
from elbowroom.measuring.memory import garbage_collected, measure
from elbowroom.measuring.ops import cuda_seconds, made_up
from elbowroom.planning import Planned, Planner, peak_together, plan_together
from elbowroom.program import peak_in_a_row

_TIMED = 3  # steps
_CLOSE_ENOUGH = 0.95  # of the room: below that, another plan may be worth its compilation
_AWAY = 0.003  # of the room, to stay away from it when a first plan has missed it
_FAR_AWAY = 0.05  # the same when nothing has fit and only one more may be compiled
_WORTH = 1.03  # times faster than launched
_BUSY = 0.6  # of a step's time, for the host: below that it waits for the GPU, and a recording gains nothing


@dataclass(frozen=True)
class Trial:
    """What a compiled program took: its peak above what is resident, and its time."""

    peak_bytes: int
    time_s: float


@dataclass(frozen=True)
class Tried:
    """Plans for all graphs of a step, measured together."""

    planned: tuple[Planned, ...]
    trials: tuple[Trial, ...]
    recorded: bool = False

    @property
    def measured(self) -> list[Planned]:
        pairs = zip(self.planned, self.trials, strict=True)
        return [plan.measured(trial.peak_bytes, recorded=self.recorded) for plan, trial in pairs]

    @property
    def peak_bytes(self) -> int:
        pairs = zip(self.trials, self.planned, strict=True)
        return peak_in_a_row((trial.peak_bytes, plan.prediction.saved_bytes) for trial, plan in pairs)

    @property
    def time_s(self) -> float:
        return sum(trial.time_s for trial in self.trials)

    @property
    def surplus(self) -> int:
        """How much more was measured than predicted."""
        return self.peak_bytes - peak_together(list(self.planned))

    @property
    def is_everything(self) -> bool:
        return not any(plan.program.replays for plan in self.planned)


class Trials:
    """The programs of one step that were compiled and measured.

    A recording must leave `left_free` bytes for what happens between steps, while it holds its memory; None: do not
    record. Steps of several graphs are not recorded: each would have a pool of its own.
    """

    def __init__(self, regions: Sequence[Region], planners: Sequence[Planner], left_free: int | None = None) -> None:
        self.regions = regions
        self.planners = planners
        self.left_free = left_free if len(regions) == 1 else None
        self.known: list[Tried] = []
        self._trials: dict[tuple[Region, int], list[Trial]] = {}

    def best(self, room: int, most: int, report: Callable[[float], None]) -> Tried | None:
        """The fastest measured within `room`, compiling at most so many; None if not even the lowest fits."""
        for attempt in range(most):
            planned = self._next(room, attempt, last=attempt == most - 1)
            if planned is None or self._is_known(planned):
                break
            report(attempt / most)
            for region in self.regions:
                region.release()
            self.known += self._try(planned)
        return self._fitting(room)

    def _next(self, room: int, attempt: int, *, last: bool) -> list[Planned] | None:
        """What to compile next: what is predicted to be best, further from the edge each time.

        If that is not new, or the last chance after far misses, the lowest.
        """
        found = self._fitting(room)
        if found is not None and self._is_enough(found, room):
            return None
        missed = found is None and last and attempt > 0
        away = _FAR_AWAY if missed else attempt * _AWAY
        planned = plan_together(list(self.planners), room - self._surplus(room) - int(away * room))
        far_off = missed and self.least_bytes > (1 + _FAR_AWAY) * room
        if found is None and (planned is None or far_off or self._is_known(planned)):
            return [planner.least for planner in self.planners]
        return planned

    @property
    def least_bytes(self) -> int:
        """The lowest peak measured."""
        return min((tried.peak_bytes for tried in self.known), default=0)

    def _is_known(self, planned: list[Planned]) -> bool:
        programs = [plan.program for plan in planned]
        return any([plan.program for plan in tried.planned] == programs for tried in self.known)

    def _fitting(self, room: int) -> Tried | None:
        fitting = [tried for tried in self.known if tried.peak_bytes <= room]
        return min(fitting, key=_handicapped, default=None)

    def _is_enough(self, found: Tried, room: int) -> bool:
        """Whether a better plan is not to be expected: all is saved, or a known program comes close to the room."""
        if found.recorded != self._recording_pays:
            return False
        return found.is_everything or any(_CLOSE_ENOUGH * room <= tried.peak_bytes <= room for tried in self._of_use)

    @property
    def _recording_pays(self) -> bool:
        return min(self.known, key=_handicapped).recorded if self.known else False

    @property
    def _of_use(self) -> list[Tried]:
        return [tried for tried in self.known if tried.recorded == self._recording_pays]

    def _surplus(self, room: int) -> int:
        """What measurement added to the prediction, in the nearest trial; before any, the allocator's share."""
        nearest = min(self._of_use, key=lambda tried: abs(tried.peak_bytes - room), default=None)
        if nearest is not None:
            return nearest.surplus
        return int(CUDA_MARGIN_SHARE * room) if self.regions[0].captured.device.type == "cuda" else 0

    def _try(self, planned: list[Planned]) -> list[Tried]:
        trials = []
        for region, plan in zip(self.regions, planned, strict=True):
            if region.channels_last is None:
                region.channels_last = self._faster_layout(region, plan)
            trials.append(self._trial(region, plan))
        ways = zip(*trials, strict=True)  # launched; recorded, if it can be
        return [Tried(tuple(planned), way, recorded=number > 0) for number, way in enumerate(ways)]

    def _trial(self, region: Region, plan: Planned) -> list[Trial]:
        number = region.add(plan.program)
        if (region, number) not in self._trials:
            outside = self.planners[0].around.outside_bytes + self.left_free if self.left_free is not None else None
            late = self.planners[0].around.late_bytes
            self._trials[region, number] = try_program(region, number, plan.prediction.between_bytes, outside, late)
        return self._trials[region, number]

    def _faster_layout(self, region: Region, plan: Planned) -> bool:
        """Channels last if Inductor says so. Where it doubts, on a GPU, by trial: its rule is older than the GPUs."""
        wish = inductors_layout(region.captured)
        convolves = any("convolution" in op.target for op in region.captured.joint.ops)
        if wish or not convolves or region.captured.device.type != "cuda":
            return wish
        times = {}
        for layout in (False, True):
            region.channels_last = layout
            times[layout] = min(trial.time_s for trial in self._trial(region, plan))
        return times[True] < times[False]


def _handicapped(tried: Tried) -> float:
    """A recording has to be worth the memory that it holds."""
    return tried.time_s * (_WORTH if tried.recorded else 1)


def try_program(
    region: Region, number: int, between_bytes: int, outside_bytes: int | None, late_bytes: int = 0
) -> list[Trial]:
    """Run a compiled program on what the graph was last called with; nothing that the user sees changes.

    `between_bytes` are in use between forward and backward, whatever the trial itself holds then. With
    `outside_bytes`, needed while a recording holds its memory, the program is recorded and tried that way, too.
    `late_bytes` of gradients count as resident and are not there before the backward makes them.
    """
    fused = region.programs[number][1].fused
    assert isinstance(fused, Fused)
    device = region.captured.device
    with _disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast():
        inputs = _inputs(region)
        buffers = None if late_bytes else fused.gradient_buffers(inputs)
        step = partial(run_once, fused, inputs, buffers)
        step()  # the first run loads kernels and picks algorithms
        peak, times, host_time = _measured(step, device)
        launched = Trial(max(peak - late_bytes, between_bytes), statistics.median(times))
        if outside_bytes is None or host_time < _BUSY * launched.time_s or not recordable(region.captured):
            return [launched]
        try:
            recorded = _try_recorded(fused, inputs, buffers, outside_bytes)
        except Exception as failure:  # what cannot be recorded is launched
            LOG.info("not recorded: %s", failure)
            return [launched]
        # Now and then it will be launched all the same: both must fit.
        return [launched, replace(recorded, peak_bytes=max(launched.peak_bytes, recorded.peak_bytes))]


def _measured(step: Callable[[], None], device: torch.device) -> tuple[int, list[float], float]:
    """Peak, times, and for how long the host was busy with a step, which the GPU may still be running then."""
    if device.type != "cuda":
        with measure("cpu", timeline=False) as measured:
            step()
        times = [_host_time(step) for _ in range(_TIMED)]
        return measured.peak_bytes, times, min(times)
    torch.cuda.synchronize(device)
    with garbage_collected():  # a trial that failed leaves some
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        times = [cuda_seconds(step, 1) for _ in range(_TIMED)]
        peak = torch.cuda.max_memory_allocated(device) - before
    return peak, times, _host_time(step)


def _host_time(step: Callable[[], None]) -> float:
    started = clock.perf_counter()
    step()
    return clock.perf_counter() - started


def _try_recorded(
    fused: Fused, inputs: Sequence[Any], buffers: list[torch.Tensor] | None, outside_bytes: int
) -> Trial:
    if buffers is None:  # gradients in a fixed place take another backward
        buffers = fused.gradient_buffers(inputs)
        run_once(fused, inputs, buffers)
    recording = Recording(fused, inputs, buffers, "write")
    arriving = _arriving(fused)

    def step() -> None:
        recording.forward(inputs)
        recording.backward(arriving)

    step()
    times = [cuda_seconds(step, 1) for _ in range(_TIMED)]
    return Trial(recording.bytes + outside_bytes, statistics.median(times))


def _arriving(fused: Fused) -> list[torch.Tensor]:
    return [made_real(fused.captured.nodes[i].meta["val"]).fill_(1) for i in fused.captured.joint.arriving]


def run_once(fused: Fused, inputs: Sequence[Any], buffers: list[torch.Tensor] | None) -> None:
    """Forward and backward, gradients into buffers of our own if there are any. What autograd would hold, is held."""
    outputs = fused.forward(list(inputs))
    count = len(fused.captured.forward_outputs)
    results, arguments = outputs[:count], outputs[count:]
    del outputs
    arguments += _arriving(fused)
    fused.run_backward(arguments, buffers or [], "return" if buffers is None else "write")
    del results


def _inputs(region: Region) -> list[Any]:
    """What the graph was called with when it was looked at, as far as it still exists; the rest is made up."""
    captured = region.captured
    inputs = []
    for i, given in zip(captured.joint.inputs, region.example, strict=True):
        tensor = given()
        if tensor is None:
            tensor = made_up(captured.nodes[i].meta["val"], limit=1)
        inputs.append(tensor.detach().clone() if i in captured.joint.overwritten else tensor.detach())
    return inputs
