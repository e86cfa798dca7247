"""Finds the fastest program of a captured step that stays within a number of bytes.

The dynamic program plans stages of a chain, whose sizes are sums that leave out what only shows operator by operator:
tensors that cross several cuts, values that die early, operators that turn out not to be needed again. So its budget
is a dial, not the truth: the planner turns it, translates each schedule into a program, has the referee predict that
program exactly, and keeps the fastest one that fits. Several readings of the graph as a chain are tried
(`plan/readings.py`).

Where there is a link to the host, values may also move there and back. Programs that do are looked for beside those
that do not, and the faster one is taken.

Everybody who plans a graph does it with a `Planner`: sessions, the compile backend, benchmarks. What it has found so
far is offered as data, the `frontier`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from elbowroom.plan.readings import Reading, Readings
from elbowroom.plan.stages.staging import Account
from elbowroom.plan.stages.structure import Structure, structure_of
from elbowroom.plan.stages.translate import order_of
from elbowroom.plan.values.choices import Predicted
from elbowroom.plan.values.least import Least
from elbowroom.plan.values.move_search import MoveSearch
from elbowroom.plan.values.moves import Moved
from elbowroom.plan.values.search import Refiner
from elbowroom.plan.words import BY_VALUE, LOWEST, MOVED, MOVED_LEAST
from elbowroom.problem.platform import Platform
from elbowroom.progress import Progress
from elbowroom.schedule import Operation, simulate
from elbowroom.solve.persistent import Sweep
from elbowroom.step.graph import StepGraph
from elbowroom.step.program import Program, make_program
from elbowroom.step.referee import Prediction, Surroundings, bytes_between, predict

# Each turn halves the range of the dial: after seven, the budget of the chain is known to 1 % of that range. More
# would be of no use, because chain and program differ by more than that.
_TURNS = 7
# Of the time. A program chosen value by value is less regular, and what is predicted to gain less than this may gain
# nothing when it runs.
_WORTH = 0.003
# Of the room. Where programs must fit by another count than their peak, those planned for less room are looked at,
# too: recordings take up to 30 % more than their peak. The shares lie further apart towards the end, because each
# costs a whole search and few plans need them.
_LOWER_SHARES = 0.95, 0.9, 0.85, 0.75, 0.6, 0.5
# Programs that drop values one by one begin at some that take up to this many times the room: three of those, spread
# evenly, because each beginning costs up to 60 plays of a program.
_LARGER = 1.5
_BEGINNINGS = 3
_TRIES = 60  # values considered for keeping after all: each costs one play of the program, so this bounds the time


@dataclass(frozen=True, eq=False)
class Planned:
    """A program, what it takes, where it came from, and why it was chosen.

    Where it moves values, it does so over the link of a `platform`, for which computing waits for `waits_s`.
    """

    program: Program
    prediction: Prediction
    method: str
    recorded: bool = False  # replayed as CUDA graphs rather than launched
    why: str = ""
    measured_peak_bytes: int | None = None  # where it was run on trial; what was predicted stays beside it
    waits_s: float = 0.0
    platform: Platform | None = None

    @property
    def time_s(self) -> float:
        """As predicted: the operators' time, and the waiting for the link."""
        return self.prediction.time_s + self.waits_s

    @property
    def predicted(self) -> Predicted:
        return Predicted(self.program, self.prediction)

    @property
    def peak_bytes(self) -> int:
        """As measured, if it was; else as predicted."""
        return self.prediction.peak_bytes if self.measured_peak_bytes is None else self.measured_peak_bytes


@dataclass(frozen=True)
class Point:
    """What one program takes: seconds, bytes at the peak, bytes saved between forward and backward."""

    time_s: float
    peak_bytes: int
    saved_bytes: int


class Planner:
    """Plans one captured graph; asked for several budgets, it cuts and counts only once.

    With the link of a `platform` and its host memory, values may move to the host and back. If it `prefers_moves`, a
    program that moves values is taken before a faster one that does not.

    For comparison only: `as_chain` plans as tools for chains do, cut where one value crosses and nowhere else, and
    with `whole_stages` every stage is saved whole or not at all.
    """

    def __init__(
        self,
        graph: StepGraph,
        around: Surroundings,
        *,
        platform: Platform | None = None,
        prefers_moves: bool = False,
        as_chain: bool = False,
        whole_stages: bool = False,
    ) -> None:
        self.graph = graph
        self.around = around
        self.platform = platform if platform is not None and platform.has_link and not as_chain else None
        self.prefers_moves = prefers_moves
        self.as_chain = as_chain
        program = make_program(graph, graph.backward, copies_parts=False)
        why = "it fits, and nothing runs again"
        self.everything = Planned(program, predict(graph, program, around), "everything is saved", why=why)
        self._whole_stages = whole_stages
        self._known = [self.everything]  # every program found that none beats in both time and peak
        self._made = [self.everything]  # every program found
        self._refined: set[int] = set()  # rooms for which that was improved value by value
        self._moving: list[Planned] = []  # programs found that move values
        self._moved: set[int] = set()  # rooms for which those were looked for
        self._lowest: set[Reading] = set()  # readings whose lowest schedule is among what is known
        self._translated: dict[tuple[int, tuple[Operation, ...]], Planned] = {}  # by cut and schedule
        self._predictions: dict[Reading, list[Prediction]] = {}  # of the programs of each reading

    @cached_property
    def structure(self) -> Structure:
        """What the graph looks like, for people: plans do not depend on it."""
        return structure_of(self.graph)

    def best(
        self, room: int, *, refine: bool = True, moves: bool = True, report: Progress = lambda part: None
    ) -> Planned | None:
        """The fastest program found within `room` bytes above what is resident; None if there is none.

        Without `refine` it is not improved value by value, which takes as long as the rest. Without `moves` it moves
        nothing to the host.
        """
        best = self._best_still(room, refine=refine, report=report)
        if self.platform is None or best is self.everything or not refine or not moves:
            return best
        if room not in self._moved:
            self._moved.add(room)
            self._move(best, room)
        moving = self._fastest_of(self._moving, room)
        if moving is None or (best is not None and moving.time_s >= best.time_s and not self.prefers_moves):
            return best
        without = "without moves it does not fit" if best is None else f"without moves {_longer(best.time_s, moving)}"
        return replace(moving, why=f"{self._reason(moving, room)}, {without}")

    def _best_still(self, room: int, *, refine: bool = True, report: Progress = lambda part: None) -> Planned | None:
        """The fastest program found that moves nothing."""
        if self.everything.prediction.peak_bytes <= room:
            return self.everything
        count = len(self._readings)
        for done, reading in enumerate(self._readings):
            self._turn(reading, room)
            report((done + 1) / count)
        if self._least_still.prediction.peak_bytes > room:
            return None
        best = self._fastest(room)
        if best is not None and not self.as_chain and room not in self._refined:
            kept = self._keep_more(best, room)
            if refine:
                self._refined.add(room)
                self._refine(kept, room)
            best = self._fastest(room)
        return None if best is None else replace(best, why=self._reason(best, room))

    def best_sized(self, room: int, size_of: Callable[[Program], int], *, moves: bool = True) -> Planned | None:
        """The fastest program found that takes no more than `room` as `size_of` counts; None if there is none.

        By that count a program takes its peak or more. How much more differs from one to the next, and a smaller one
        may well take more: so many are counted, those that were made for less room, too.
        """

        def fits(program: Program, prediction: Prediction) -> bool:
            return prediction.peak_bytes <= room and size_of(program) <= room

        moving = self.best(room) if moves and self.platform is not None else None
        if moving is not None and not fits(moving.program, moving.prediction):
            smaller = room * room // max(room, size_of(moving.program))  # by the share that its gaps take
            moving = self.best(smaller) if smaller < room else None
            if moving is not None and not fits(moving.program, moving.prediction):
                moving = None
        still = self._best_sized_still(room, fits)
        if moving is None or (still is not None and still.time_s <= moving.time_s and not self.prefers_moves):
            return still
        return moving

    def _best_sized_still(self, room: int, fits: Callable[[Program, Prediction], bool]) -> Planned | None:
        unsized = self._best_still(room)
        if unsized is None or fits(unsized.program, unsized.prediction):
            return unsized
        dropped = None
        for start in () if self.as_chain else (unsized, *self._larger(room)):
            dropped = self._refiner.eviction.until(fits, start.predicted, room, dropped) or dropped
        if dropped:
            self._learn(Planned(*dropped, _by_value(unsized.method)))
        for share in () if dropped else _LOWER_SHARES:
            lower = self._best_still(int(share * room))
            if lower is None or fits(lower.program, lower.prediction):
                break
        in_time = sorted(self._made, key=lambda plan: plan.prediction.time_s)
        best = next((plan for plan in in_time if fits(plan.program, plan.prediction)), None)
        if best is None:
            return None
        without = _longer(unsized.prediction.time_s, best)
        return replace(best, why=f"the fastest found that fits with the gaps in its memory; without gaps {without}")

    def _larger(self, room: int) -> list[Planned]:
        """Programs that take somewhat more than the room."""
        known = sorted(self._known, key=lambda plan: plan.prediction.peak_bytes)
        larger = [plan for plan in known if room < plan.prediction.peak_bytes <= _LARGER * room]
        return larger[:: -(-len(larger) // _BEGINNINGS) or 1]

    @property
    def least(self) -> Planned:
        """The program of the lowest peak found."""
        still = self._least_still
        if self.platform is None:
            return still
        lowest = self._least_moving
        return lowest if lowest.prediction.peak_bytes < still.prediction.peak_bytes else still

    @cached_property
    def _least_moving(self) -> Planned:
        """The program of the lowest peak, of those known and found here that move all that they save."""
        starts = [plan.predicted for plan in (*self._known, self._least_still)]
        found = self._move_search.lowest(starts)
        return self._planned(found, MOVED_LEAST, LOWEST)

    @property
    def _least_still(self) -> Planned:
        """The program of the lowest peak found that moves nothing."""
        for reading in self._readings:
            if reading not in self._lowest:
                sweep = self._readings.new_sweep(reading, 0)
                self._translate(reading, sweep, sweep.least_bytes)
                self._lowest.add(reading)
        lowest = min(self._known, key=lambda plan: plan.prediction.peak_bytes)
        return lowest if lowest is self.everything else replace(lowest, why=LOWEST)

    @property
    def made(self) -> tuple[Planned, ...]:
        """Every program found, that of the lowest peak among them. Asking for more budgets adds to it."""
        return self.least, *self._made

    @property
    def frontier(self) -> tuple[Point, ...]:
        """What the programs found so far take, from the fastest to the smallest; none beats another in time and peak.

        Asking for more budgets adds to it. Pipelines multiply the saved bytes by the steps that are under way.
        """
        known: list[Planned] = []
        for plan in (*self._known, *self._moving):
            known = _unbeaten(known, plan)
        return tuple(
            Point(plan.time_s, plan.prediction.peak_bytes, plan.prediction.saved_bytes)
            for plan in sorted(known, key=lambda plan: plan.time_s)
        )

    def _reason(self, plan: Planned, room: int) -> str:
        """Why this plan: how much longer the best programs of the other ways to cut and count take."""
        times: dict[tuple[int, Account], list[float]] = {(each.cut, each.account): [] for each in self._readings}
        chains: list[float] = []
        for reading in self._readings:
            time = _least_time(self._predictions.get(reading, ()), room)
            if time is None:
                continue
            times[reading.cut, reading.account].append(time)
            if self._readings.is_plain_chain(reading):
                chains.append(time)
        if len(times) == 1:
            return "the only way to cut and count that was tried"
        fitting = sorted(min(each) for each in times.values() if each)
        said = [f"next best {_longer(fitting[1], plan)}" if len(fitting) > 1 else "no other fits"]
        if not chains:
            said.append("as a chain it does not fit")
        elif min(chains) > fitting[0]:
            said.append(f"as a chain {_longer(min(chains), plan)}")
        least_s = self.least_s(room)
        gap = max(0.0, plan.time_s / least_s - 1) if least_s else 0.0
        said.append(f"at most {gap:.1%} above the least possible")
        return f"fastest of {len(times)} ways to cut; {', '.join(said)}"

    def least_s(self, room: int) -> float:
        """Seconds that any program within the room takes, at the least; with a link, those that move values, too."""
        return self._refiner.least_s(room) if self._least is None else self._least.seconds(room)

    def _fastest(self, room: int) -> Planned | None:
        return self._fastest_of(self._known, room)

    def _fastest_of(self, plans: Iterable[Planned], room: int) -> Planned | None:
        fitting = [plan for plan in plans if _fits(plan.prediction, room)]
        return min(fitting, key=lambda plan: plan.time_s, default=None)

    def _turn(self, reading: Reading, room: int) -> None:
        """Find programs for budgets around the largest that fits when predicted exactly: a bisection."""
        guess = room + self.around.late_bytes
        sweep = self._readings.sweep(reading, 2 * guess)
        low, high = sweep.least_bytes, sweep.most_bytes
        if not self._translate(reading, sweep, low) <= room or low >= high:
            return
        if low < guess < high:
            if self._translate(reading, sweep, guess) <= room:
                low = guess
            else:
                high = guess
        for _ in range(_TURNS):
            middle = (low + high) // 2
            if self._translate(reading, sweep, middle) <= room:
                low = middle
            else:
                high = middle

    def _translate(self, reading: Reading, sweep: Sweep, budget: int) -> int:
        """Learn the program of the chain's best schedule within a budget; returns its true peak."""
        schedule = sweep.schedule(budget)
        plan = self._translated.get((reading.cut, schedule))  # neighbouring budgets often have the same
        if plan is None:
            simulate(sweep.chain, schedule)  # the referee: raises if the schedule cannot run
            cut = self._readings.cuts[reading.cut]
            program = make_program(self.graph, order_of(cut.staged, schedule), copies_parts=cut.copies_parts)
            plan = Planned(program, predict(self.graph, program, self.around), self._readings.method(reading))
            self._translated[reading.cut, schedule] = plan
            self._learn(plan)
        self._predictions.setdefault(reading, []).append(plan.prediction)
        return plan.prediction.peak_bytes

    def _learn(self, plan: Planned) -> None:
        self._made.append(plan)
        self._known = _unbeaten(self._known, plan)

    @cached_property
    def _readings(self) -> Readings:
        """Made when first asked for: a plan that was loaded is not planned again."""
        between = bytes_between(self.graph, self.around)
        return Readings(self.graph, between, as_chain=self.as_chain, whole_stages=self._whole_stages)

    @cached_property
    def _refiner(self) -> Refiner:
        return Refiner(self.graph, self.around)

    @cached_property
    def _least(self) -> Least | None:
        return None if self.platform is None else Least(self.graph, self.around, self.platform)

    @cached_property
    def _move_search(self) -> MoveSearch:
        assert self.platform is not None
        return MoveSearch(self.graph, self.around, self.platform)

    def _move(self, best: Planned | None, room: int) -> None:
        """Look for programs that move values, beginning with the best that does not; they should gain something."""
        start = self._least_still if best is None else best
        enough_s = float("inf") if best is None or self.prefers_moves else (1 - _WORTH) * best.time_s
        starts = [self.everything.predicted, start.predicted]
        for found in self._move_search.programs(starts, room, self.least_s(room)):
            if found.program.moves and found.time_s < enough_s:
                self._moving = _unbeaten(self._moving, self._planned(found, start.method + MOVED))
        if best is None and self._fastest_of(self._moving, room) is None and _fits(self.least.prediction, room):
            self._moving = _unbeaten(self._moving, self.least)

    def _planned(self, found: Moved, method: str, why: str = "") -> Planned:
        waits_s = found.waits_s
        return Planned(found.program, found.prediction, method, why=why, waits_s=waits_s, platform=self.platform)

    def _refine(self, plan: Planned, room: int) -> None:
        """Choose value by value, beginning with a plan; one that gains little is not worth its irregularity."""
        enough_s = (1 - _WORTH) * plan.prediction.time_s
        if enough_s <= self._refiner.least_s(room):
            return
        larger = [other.predicted for other in self._larger(room)]
        programs = self._refiner.programs(plan.predicted, room, larger)
        fitting = [Planned(*found, _by_value(plan.method)) for found in programs if _fits(found.prediction, room)]
        refined = min(fitting, default=plan, key=lambda found: found.prediction.time_s)
        if refined.prediction.time_s < enough_s:
            self._learn(refined)
            self._keep_more(refined, room)

    def _keep_more(self, plan: Planned, room: int) -> Planned:
        """Use up what room is left: keep values from the forward that the plan would recompute, dearest first."""
        graph = self.graph
        tried: set[int] = set()
        for _ in range(_TRIES):
            slack = room - plan.prediction.peak_bytes
            worth = [
                (graph.ops[op].time * count / max(1, size), op)
                for op, count in plan.program.reruns.items()
                if op not in tried and graph.ops[op].storable and 0 < (size := graph.value_bytes(op)) <= slack
            ]
            if not worth:
                break
            _, op = max(worth)
            tried.add(op)
            order = [run.op for run in plan.program.backward_runs if run.op != op]
            program = make_program(graph, order, copies_parts=plan.program.copies_parts)
            prediction = predict(graph, program, self.around)
            if prediction.peak_bytes <= room and prediction.time_s < plan.prediction.time_s:
                plan = Planned(program, prediction, plan.method)
                self._learn(plan)
        return plan


def _least_time(found: Iterable[Prediction], room: int) -> float | None:
    return min((prediction.time_s for prediction in found if _fits(prediction, room)), default=None)


def _unbeaten(plans: list[Planned], plan: Planned) -> list[Planned]:
    """These and another, without those that another one beats in both time and peak."""
    time, peak = plan.time_s, plan.prediction.peak_bytes
    if any(known.time_s <= time and known.prediction.peak_bytes <= peak for known in plans):
        return plans
    return [known for known in plans if known.time_s < time or known.prediction.peak_bytes < peak] + [plan]


def _fits(prediction: Prediction, room: int) -> bool:
    return prediction.peak_bytes <= room


def _longer(time: float, plan: Planned) -> str:
    own = plan.time_s
    return f"{(time / own - 1 if own else 0.0):+.1%}"


def _by_value(method: str) -> str:
    return method if method.endswith(BY_VALUE) else method + BY_VALUE
