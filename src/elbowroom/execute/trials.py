"""Fused programs on trial: each is run and measured before it may serve, because no model of fusion is exact.

What a compiled program takes differs from its prediction: the compiler fuses more or less than was assumed, picks
another layout, needs a workspace. So a plan is compiled and measured; if another one, made with the difference in
mind, promises to be better, that is tried next. All programs measured so far are remembered: the fastest that fits
serves, so a larger budget never gets a slower one. On a GPU, programs whose kernels wait for the host are also tried
as recordings. These hold their memory, so each is given up after its trial; the one that serves is made again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from elbowroom.execute import rehearsal
from elbowroom.execute.plannable import Plannable, recordable
from elbowroom.execute.rehearsal import Trial
from elbowroom.plan.planner import Planned
from elbowroom.plan.together import least_together, peak_together, plan_together
from elbowroom.step.allocator import CUDA_MARGIN_SHARE
from elbowroom.step.pool import pool_bytes
from elbowroom.step.program import Program
from elbowroom.step.referee import peak_in_a_row
from elbowroom.units import MAX_BYTES

# Times faster than what has been found: less is not worth another compilation, which takes as long as hundreds of
# steps.
_GAIN = 1.01
# Shares of the room to stay away from it. Each further attempt stays 0.3 % more away, so that a near miss costs
# little; where nothing has fit and only one more may be compiled, it must not miss again.
_AWAY, _FAR_AWAY = 0.003, 0.05
# Of what was missing last time: the next program may miss so much more.
_UNSURE = 0.06
_POOL_UNSURE = 0.01  # of the room, the same for recordings, whose pools are played
_WORTH = 1.03  # times faster than launched, for a recording to be worth the memory that it holds between steps
_WAITS = 1.05  # times as long as its kernels take: a single step runs at higher clocks, by up to 4 % on an H200
# Times as long as on trial, for a host that has training to do besides: a T5's took about 39 ms a step, then 60.
_HOST_IN_TRAINING = 1.5
_DOUBTFUL = 2.0  # the same, where a recording is worth a look: a CLIP's host took 27 of 51 ms, and a recording 49
# Seconds of a kernel, on average: kernels of ResNet-101 and T5 are shorter, and wait for a host that launches them;
# those of GPT-2 and ViT are longer, and do not.
_SHORT_S = 40e-6
# Of the room, for what happens between steps: a first plan leaves so much, if it costs no more, to serve a recording.
_SPARED = 0.05
_LITTLE_LONGER = 1.02  # times as long as planned for launching: a first plan may take that to serve a recording


@dataclass(frozen=True)
class Tried:
    """Plans for all graphs of a step, measured together."""

    planned: tuple[Planned, ...]
    trials: tuple[Trial, ...]
    recorded: bool = False
    expected_bytes: int = 0

    @property
    def measured(self) -> list[Planned]:
        """The plans with what was measured of them."""
        pairs = zip(self.planned, self.trials, strict=True)
        return [replace(plan, measured_peak_bytes=trial.peak_bytes, recorded=self.recorded) for plan, trial in pairs]

    @property
    def peak_bytes(self) -> int:
        pairs = zip(self.trials, self.planned, strict=True)
        return peak_in_a_row((trial.peak_bytes, plan.prediction.saved_bytes) for trial, plan in pairs)

    @property
    def time_s(self) -> float:
        return sum(trial.time_s for trial in self.trials)

    @property
    def moves(self) -> bool:
        """Whether values move to the host."""
        return any(plan.program.moves for plan in self.planned)

    @property
    def surplus(self) -> int:
        """How much more was measured than expected. Of a recording's gaps the larger play is expected: one that took
        less had luck, which the next need not have."""
        more = self.peak_bytes - self.expected_bytes
        return max(0, more) if self.recorded else more

    @property
    def ranked_s(self) -> float:
        """Its time, as far as another's is compared with it.

        A recording has to be worth the memory that it holds. But the host is slower in training, where it has more to
        do, and not alone: a T5 on an H200 took 49.2 ms on trial, and its steps 72.
        """
        expected = max(self.time_s, _HOST_IN_TRAINING * self.host_s)
        return expected * (_WORTH if self.recorded or self.waits else 1)

    def ranked_as(self, planned: Sequence[Planned]) -> float:
        """What to expect of other plans, run in the same way."""
        return self.ranked_s * _predicted_s(planned) / _predicted_s(self.planned)

    @property
    def waits(self) -> bool:
        """Whether its kernels wait for the host, or would in training."""
        if self.recorded:
            return False
        if self.time_s > _WAITS * self.kernels_s > 0:
            return True
        return _HOST_IN_TRAINING * self.host_s > self._kernels_at_most_s

    @property
    def may_wait(self) -> bool:
        """Whether that is not ruled out: how long its kernels take is not known where they are too many."""
        return self.waits or (not self.kernels_s and _DOUBTFUL * self.host_s > self._kernels_at_most_s)

    @property
    def _kernels_at_most_s(self) -> float:
        """A host that was disturbed makes the step look long, and itself look fast."""
        return self.kernels_s or min(self.time_s, _kernels_s(self.planned))

    @property
    def host_s(self) -> float:
        """No longer than the step: a host that took longer, when it was asked, was disturbed."""
        return min(self.time_s, sum(trial.host_s for trial in self.trials))

    @property
    def kernels_s(self) -> float:
        """0 if that is not known."""
        return sum(trial.kernels_s for trial in self.trials)

    def if_recorded(self, planned: Sequence[Planned]) -> float:
        """The least to expect of other plans as a recording, ranked."""
        return _WORTH * self.kernels_s * _predicted_s(planned) / _predicted_s(self.planned)


class _Hope(NamedTuple):
    """Plans that are worth a trial, launched or as a recording, and their time, as ranked, if all goes as before."""

    ranked_s: float
    planned: list[Planned]
    recorded: bool = False


class Trials:
    """The programs of one step that were compiled and measured.

    A recording must leave `left_free` bytes for what happens between steps, while it holds its memory; None: do not
    record. Steps of several graphs are not recorded: each would have a pool of its own.
    """

    def __init__(self, graphs: Sequence[Plannable], left_free: int | None = None) -> None:
        self.graphs = graphs
        self.left_free = left_free if len(graphs) == 1 else None
        self.known: list[Tried] = []
        self._sizes: dict[int, tuple[int, Program]] = {}  # recorded, by a program's identity, which it keeps here

    def best(self, room: int, most: int, report: Callable[[float], None]) -> Tried | None:
        """The fastest measured within `room`, compiling at most so many; None if not even the lowest fits."""
        for attempt in range(most):
            hope = self._next(room, attempt, last=attempt == most - 1)
            if hope is None or self._is_known(hope.planned):
                break
            report(attempt / most)
            for graph in self.graphs:
                graph.region.release()
            self.known += self._try(hope.planned, room, recorded=hope.recorded)
        return self._fitting(room)

    def _next(self, room: int, attempt: int, *, last: bool) -> _Hope | None:
        """What to compile next: what promises to be best, further from the edge each time.

        If nothing new does, or for the last chance after far misses, the lowest.
        """
        found = self._fitting(room)
        missed = found is None and last and attempt > 0
        away = int((_FAR_AWAY if missed else attempt * _AWAY) * room)
        hope = min(self._hopes(room, away, last=last), default=None, key=lambda hope: hope.ranked_s)
        if found is not None:
            return hope if hope is not None and hope.ranked_s * _GAIN < found.ranked_s else None
        if hope is None or (missed and self.least_bytes > (1 + _FAR_AWAY) * room):
            return _Hope(0.0, least_together([graph.planner for graph in self.graphs]))
        return hope

    def _hopes(self, room: int, away: int, *, last: bool) -> Iterator[_Hope]:
        """The best plan launched and the best recorded, as far as they were not tried yet.

        Each leaves as much of the room as was missing in the nearest trial of its kind; a last recording, if none has
        fit, as much as was ever missing.
        """
        if not self.known:
            if planned := self._first(room):
                yield _Hope(0.0, planned)
            return
        launched = [tried for tried in self.known if not tried.recorded]
        recorded = [tried for tried in self.known if tried.recorded]
        for alike in (launched, recorded):
            yield from self._instead_of_moving(alike, room - away)
            nearest = _nearest(alike, room)
            if nearest is None or self._is_hopeless(nearest, room):
                continue
            surplus = nearest.surplus
            if last and alike is recorded and all(tried.peak_bytes > room for tried in alike):
                surplus = max(tried.surplus for tried in alike)
            spared = max(away, int(_UNSURE * abs(surplus)), self._doubt(room) if nearest.recorded else 0)
            moves = nearest.moves or not any(tried.moves for tried in alike)
            planned = self._plan(room - surplus - spared, recorded=nearest.recorded, moves=moves)
            if planned is not None and not self._is_known(planned):
                yield _Hope(nearest.ranked_as(planned), planned, nearest.recorded)
        waiting = _nearest([tried for tried in launched if tried.waits], room)
        if waiting is not None and not recorded and self._records:  # it did not fit as it was
            planned = self._plan(room - self._allocators(room) - max(away, self._doubt(room)), recorded=True)
            if planned is not None and not self._is_known(planned):
                yield _Hope(waiting.if_recorded(planned), planned, recorded=True)

    def _instead_of_moving(self, alike: Sequence[Tried], room: int) -> Iterator[_Hope]:
        """What runs in the same way and moves nothing, if all that was tried moves: it may be faster, where moving
        took longer than was expected."""
        moving = _nearest(alike, room)
        wanted = any(graph.planner.prefers_moves for graph in self.graphs)
        if moving is None or wanted or not all(tried.moves for tried in alike):
            return
        planned = self._plan(room - max(0, moving.surplus), recorded=moving.recorded, moves=False)
        if planned is not None and not self._is_known(planned):
            yield _Hope(min(moving.ranked_as(planned), _predicted_s(planned)), planned, moving.recorded)

    def _is_hopeless(self, tried: Tried, room: int) -> bool:
        """Whether it took too much, and all the same no less time than another that fits: with less, it is slower."""
        found = self._fitting(room)
        return tried.peak_bytes > room and found is not None and tried.ranked_s * _GAIN >= found.ranked_s

    def _plan(self, room: int, *, recorded: bool, moves: bool = True) -> list[Planned] | None:
        if not recorded:
            return plan_together([graph.planner for graph in self.graphs], room, moves=moves)
        found = self.graphs[0].planner.best_sized(room, self._recorded_bytes, moves=moves)
        return None if found is None else [found]

    def _first(self, room: int) -> list[Planned] | None:
        """Leaves the allocator's share and, if that is little, what a recording needs; all that it needs, if one is
        likely, and that costs little time."""
        left = room - self._allocators(room)
        spared = self._held if self._records and self._held <= _SPARED * room else 0
        launched = self._plan(left - spared, recorded=False)
        if launched is None or not self._records or not self._has_short_kernels(launched):
            return launched
        recorded = self._plan(left - 2 * self._doubt(room), recorded=True)
        if recorded is None or _predicted_s(recorded) > _LITTLE_LONGER * _predicted_s(launched):
            return launched
        return recorded

    def _has_short_kernels(self, planned: Sequence[Planned]) -> bool:
        """Whether the host is likely to take longer to launch them."""
        count = sum(
            graph.planner.graph.ops[run.op].time > 0
            for graph, plan in zip(self.graphs, planned, strict=True)
            for run in (*plan.program.forward_runs, *plan.program.backward_runs)
        )
        return _kernels_s(planned) < _SHORT_S * count

    def _doubt(self, room: int) -> int:
        """What recordings leave, because more may be missing next time."""
        return int(_POOL_UNSURE * room)

    def _recorded_bytes(self, program: Program) -> int:
        """What a recording of a program is expected to take: its pool, and what happens outside and between steps."""
        if id(program) not in self._sizes:
            (graph,) = self.graphs
            around = graph.planner.around
            fixed, platform = graph.measured.captured.fixed_inputs, graph.planner.platform
            pool = pool_bytes(graph.planner.graph, program, around, fixed, platform)
            self._sizes[id(program)] = pool + around.outside_bytes - around.late_bytes + self._held, program
        return self._sizes[id(program)][0]

    def _allocators(self, room: int) -> int:
        on_gpu = self.graphs[0].device.type == "cuda"
        return int(CUDA_MARGIN_SHARE * room) if on_gpu else 0

    @property
    def _records(self) -> bool:
        return self.left_free is not None and recordable(self.graphs[0].measured.captured)

    @property
    def _held(self) -> int:
        """What a recording needs and a launch does not: room for what happens between steps."""
        return self.left_free or 0

    def measure_least(self, room: int) -> None:
        """Know what the lowest programs take: a budget that is named as the least must do when it is given."""
        planned = least_together([graph.planner for graph in self.graphs])
        if not self._is_known(planned):
            self.known.append(self._all_launched(planned, room))

    @property
    def least_bytes(self) -> int:
        """The lowest peak measured."""
        return min((tried.peak_bytes for tried in self.known), default=0)

    def _is_known(self, planned: list[Planned]) -> bool:
        programs = [plan.program for plan in planned]
        return any([plan.program for plan in tried.planned] == programs for tried in self.known)

    def _fitting(self, room: int) -> Tried | None:
        fitting = [tried for tried in self.known if tried.peak_bytes <= room]
        return min(fitting, key=lambda tried: tried.ranked_s, default=None)

    def _try(self, planned: list[Planned], room: int, *, recorded: bool) -> list[Tried]:
        """Launched and, where its kernels wait for the host, as a recording; or at once as a recording."""
        if recorded and (replayed := self._recorded(planned, room)):
            return replayed
        tried = self._all_launched(planned, room)
        return [tried, *(self._recorded(planned, room) if tried.may_wait and not recorded else [])]

    def _all_launched(self, planned: list[Planned], room: int) -> Tried:
        launched = [self._launched(graph, plan, room) for graph, plan in zip(self.graphs, planned, strict=True)]
        return Tried(tuple(planned), tuple(launched), expected_bytes=peak_together(planned))

    def _launched(self, graph: Plannable, plan: Planned, room: int) -> Trial:
        """A program is measured once: a budget that was named for it does when it is given."""
        region, number = graph.region, graph.region.add(graph.build(plan.program))
        between_bytes, late_bytes = plan.prediction.between_bytes, self.graphs[0].planner.around.late_bytes
        known: Trial | None = region.launched.get((number, between_bytes, late_bytes))
        if known is not None:
            return known
        trial = rehearsal.launched_within(room, region, number, between_bytes, late_bytes)
        if math.isfinite(trial.time_s):  # if memory ran out, there may be more the next time
            region.launched[number, between_bytes, late_bytes] = trial
        return trial

    def _recorded(self, planned: list[Planned], room: int) -> list[Tried]:
        """Nothing if that cannot fit, or cannot be recorded, which is tried but once."""
        (plan, *_), graph = planned, self.graphs[0]
        between_bytes = plan.prediction.between_bytes
        if not self._records or between_bytes + self._held > room:
            return []
        around = graph.planner.around
        outside_bytes = around.outside_bytes + self._held
        number = graph.region.add(graph.build(plan.program))
        trial = rehearsal.recorded(graph.region, number, between_bytes, outside_bytes, around.late_bytes)
        if trial is None:
            self.left_free = None
            return []
        return [Tried((plan,), (trial,), recorded=True, expected_bytes=self._recorded_bytes(plan.program))]

    def try_again(self, planned: list[Planned]) -> Tried | None:
        """Measure plans made earlier, run as they were meant to; None if they cannot be recorded any more."""
        if any(plan.recorded for plan in planned):
            found = self._recorded(planned, MAX_BYTES) if len(planned) == 1 else []
            return found[0] if found else None
        return self._all_launched(planned, MAX_BYTES)


def _nearest(alike: Sequence[Tried], room: int) -> Tried | None:
    return min(alike, default=None, key=lambda tried: abs(tried.peak_bytes - room))


def _kernels_s(planned: Sequence[Planned]) -> float:
    return sum(plan.prediction.time_s for plan in planned)


def _predicted_s(planned: Sequence[Planned]) -> float:
    return sum(plan.time_s for plan in planned)
