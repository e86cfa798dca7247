"""Finds the fastest program of a captured graph that stays within a number of bytes.

The dynamic program plans stages of a chain, whose sizes are sums that leave out what only shows operator by operator:
tensors that cross several cuts, values that die early, operators that turn out not to be needed again. So its budget
is a dial, not the truth: the planner turns it, translates each schedule into a program, predicts that program
exactly, and keeps the fastest one that fits. Several ways to cut and to count are tried: where little crosses, more
finely, and where one value crosses. The last is what tools for chains do; here it is one way among others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from elbowroom.joint import Joint
from elbowroom.problem import Chain
from elbowroom.program import (
    Prediction,
    Program,
    Surroundings,
    bytes_between,
    make_program,
    peak_in_a_row,
    predict,
)
from elbowroom.refining import Refiner
from elbowroom.schedule import Operation, simulate
from elbowroom.solve.persistent import Sweep
from elbowroom.stages.costs import Account, Staged, stage
from elbowroom.stages.cuts import Piece, cut
from elbowroom.stages.savings import MOST_WAYS
from elbowroom.stages.structure import Structure, structure_of
from elbowroom.stages.translate import order_of

_TURNS = 7  # of the dial, per way to cut and count
_BY_VALUE = ", then value by value"
_WORTH = 0.003  # of the time, for choosing value by value
_LOWER = 0.95, 0.9, 0.85, 0.75, 0.6, 0.5  # of the room, to look for programs that fit by another count than the peak
_LARGER = 1.5  # times the room: programs that take no more are a beginning for smaller ones
_BEGINNINGS = 3  # of those, spread evenly
_TRIES = 60  # values considered for keeping after all, once a program is found


@dataclass(frozen=True, eq=False)
class Planned:
    """A program, what it takes, where it came from, and why it was chosen."""

    program: Program
    prediction: Prediction
    method: str
    recorded: bool = False  # replayed as CUDA graphs rather than launched
    why: str = ""

    def measured(self, peak_bytes: int, *, recorded: bool = False) -> Planned:
        """The same with the peak that was measured, moment by moment as much above or below what was predicted."""
        prediction, surplus = self.prediction, peak_bytes - self.prediction.peak_bytes
        moved = replace(
            prediction,
            forward_bytes=tuple(size + surplus for size in prediction.forward_bytes),
            backward_bytes=tuple(size + surplus for size in prediction.backward_bytes),
            between_bytes=prediction.between_bytes + surplus,
        )
        return replace(self, prediction=moved, recorded=recorded)


class _Way(NamedTuple):
    """How the graph is made a chain: by which cut and account, and what a stage is charged that is run again right
    before its backward. Nobody wants its output then, so it takes less than a forward. But programs spare operators
    in more ways than one, and with the plain charge the dynamic program may happen upon a better one."""

    number: int
    account: Account
    spares_outputs: bool


class _Candidate(NamedTuple):
    """A way to cut, and the ways to count that are tried with it."""

    staged: Staged
    accounts: tuple[Account, ...]
    is_chain: bool  # cut wherever one value crosses, and nowhere else
    apart: bool = True  # parts of gradients are copied where that lets the rest go


class Planner:
    """Plans one captured graph; asked for several budgets, it cuts and counts only once.

    For comparison only: `as_chain` plans as tools for chains do, cut where one value crosses and nowhere else, and
    with `whole_stages` every stage is saved whole or not at all.
    """

    def __init__(
        self,
        joint: Joint,
        around: Surroundings,
        report: Callable[[float], None] = lambda part: None,
        *,
        as_chain: bool = False,
        whole_stages: bool = False,
    ) -> None:
        self.joint = joint
        self.around = around
        self.report = report
        self.as_chain = as_chain
        program = make_program(joint, joint.backward, apart=False)
        why = "it fits, and nothing runs again"
        self.everything = Planned(program, predict(joint, program, around), "everything is saved", why=why)
        most_ways = 1 if whole_stages else MOST_WAYS
        plannable = joint.forward and joint.backward
        self._candidates = list(_candidates(joint, as_chain, most_ways)) if plannable else []
        if plannable and joint.apart:
            shown = _candidates(joint.with_parts_shown(), as_chain, most_ways)
            self._candidates += [candidate._replace(apart=False) for candidate in shown]
        self._known = [self.everything]  # every program found that none beats in both time and peak
        self._made = [self.everything]  # every program found
        self._refined: set[int] = set()  # rooms for which that was improved value by value
        self._sweeps: dict[_Way, list[Sweep]] = {}
        self._lowest: set[_Way] = set()  # ways whose lowest schedule is among what is known
        self._translated: dict[tuple[int, tuple[Operation, ...]], Planned] = {}  # by cut and schedule
        self._found: dict[_Way, list[Prediction]] = {}  # of the programs of each way

    @cached_property
    def structure(self) -> Structure:
        """What the graph looks like, for people: plans do not depend on it."""
        return structure_of(self.joint)

    def best(self, room: int, *, refine: bool = True) -> Planned | None:
        """The fastest program found within `room` bytes above what is resident; None if there is none.

        Without `refine` it is not improved value by value, which takes as long as the rest.
        """
        if self.everything.prediction.peak_bytes <= room:
            return self.everything
        ways = self._ways()
        for done, way in enumerate(ways):
            self._turn(way, room)
            self.report((done + 1) / len(ways))
        if self.least.prediction.peak_bytes > room:
            return None
        best = self._fastest(room)
        if best is not None and not self.as_chain and room not in self._refined:
            kept = self._keep_more(best, room)
            if refine:
                self._refined.add(room)
                self._refine(kept, room)
            best = self._fastest(room)
        return None if best is None else replace(best, why=self._reason(best, room))

    def best_sized(self, room: int, size_of: Callable[[Program], int]) -> Planned | None:
        """The fastest program found that takes no more than `room` as `size_of` counts; None if there is none.

        By that count a program takes its peak or more. How much more differs from one to the next, and a smaller one
        may well take more: so many are counted, those that were made for less room, too.
        """

        def fits(program: Program, prediction: Prediction) -> bool:
            return prediction.peak_bytes <= room and size_of(program) <= room

        unsized = self.best(room)
        if unsized is None or fits(unsized.program, unsized.prediction):
            return unsized
        dropped = None
        for start in () if self.as_chain else (unsized, *self._larger(room)):
            found = (start.program, start.prediction)
            dropped = self._refiner.dropping.until(fits, found, room, dropped) or dropped
        if dropped:
            self._learn(Planned(*dropped, _by_value(unsized.method)))
        for share in () if dropped else _LOWER:
            lower = self.best(int(share * room))
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
        for way in self._ways():
            if way not in self._lowest:
                sweep = self._new_sweep(way, 0)
                self._translate(way, sweep, sweep.least_bytes)
                self._lowest.add(way)
        lowest = min(self._known, key=lambda plan: plan.prediction.peak_bytes)
        return lowest if lowest is self.everything else replace(lowest, why="the lowest peak found")

    def _ways(self) -> list[_Way]:
        charges = (False,) if self.as_chain else (True, False)
        each = enumerate(self._candidates)
        return [_Way(n, account, spares) for n, c in each for account in c.accounts for spares in charges]

    def _reason(self, plan: Planned, room: int) -> str:
        """Why this plan: how much longer the best programs of the other ways to cut and count take."""
        times: dict[tuple[int, Account], list[float]] = {(way.number, way.account): [] for way in self._ways()}
        chains: list[float] = []
        for way in self._ways():
            time = _least_time(self._found.get(way, ()), room)
            if time is None:
                continue
            times[way.number, way.account].append(time)
            if self._candidates[way.number].is_chain and way.account == "full" and not way.spares_outputs:
                chains.append(time)
        if len(times) == 1:
            return "the only way to cut and count that was tried"
        fitting = sorted(min(each) for each in times.values() if each)
        said = [f"next best {_longer(fitting[1], plan)}" if len(fitting) > 1 else "no other fits"]
        if not chains:
            said.append("as a chain it does not fit")
        elif min(chains) > fitting[0]:
            said.append(f"as a chain {_longer(min(chains), plan)}")
        least_s = self._refiner.least_s(room)
        gap = max(0.0, plan.prediction.time_s / least_s - 1) if least_s else 0.0
        said.append(f"at most {gap:.1%} above the least possible")
        return f"fastest of {len(times)} ways to cut; {', '.join(said)}"

    def _fastest(self, room: int) -> Planned | None:
        fitting = [plan for plan in self._known if _fits(plan.prediction, room)]
        return min(fitting, key=lambda plan: plan.prediction.time_s, default=None)

    def _turn(self, way: _Way, room: int) -> None:
        """Find programs for budgets around the largest that fits when predicted exactly: a bisection."""
        guess = room + self.around.late_bytes
        sweep = self._sweep(way, 2 * guess)
        low, high = sweep.least_bytes, sweep.most_bytes
        if not self._translate(way, sweep, low) <= room or low >= high:
            return
        if low < guess < high:
            if self._translate(way, sweep, guess) <= room:
                low = guess
            else:
                high = guess
        for _ in range(_TURNS):
            middle = (low + high) // 2
            if self._translate(way, sweep, middle) <= room:
                low = middle
            else:
                high = middle

    def _sweep(self, way: _Way, most_bytes: int) -> Sweep:
        """A table that reaches `most_bytes`, and not so far beyond that its slots are coarse."""
        sweeps = self._sweeps.setdefault(way, [])
        for sweep in sweeps:
            if (
                most_bytes <= sweep.most_bytes <= 2 * most_bytes
                or sweep.most_bytes == sweep.useful_bytes <= most_bytes
            ):
                return sweep
        sweeps.append(self._new_sweep(way, most_bytes))
        return sweeps[-1]

    def _new_sweep(self, way: _Way, most_bytes: int) -> Sweep:
        last_times = self._candidates[way.number].staged.last_times if way.spares_outputs else None
        return Sweep(self._chain(way.number, way.account), most_bytes, last_times=last_times)

    def _translate(self, way: _Way, sweep: Sweep, budget: int) -> int:
        """Learn the program of the chain's best schedule within a budget; returns its true peak."""
        number, account = way.number, way.account
        schedule = sweep.schedule(budget)
        plan = self._translated.get((number, schedule))  # neighbouring budgets often have the same
        if plan is None:
            simulate(sweep.chain, schedule)  # the referee: raises if the schedule cannot run
            staged = self._candidates[number].staged
            method = self._method(number, account)
            program = make_program(self.joint, order_of(staged, schedule), apart=self._candidates[number].apart)
            plan = Planned(program, predict(self.joint, program, self.around), method)
            self._translated[number, schedule] = plan
            self._learn(plan)
        self._found.setdefault(way, []).append(plan.prediction)
        return plan.prediction.peak_bytes

    def _method(self, number: int, account: Account) -> str:
        candidate = self._candidates[number]
        where = " where one value crosses" if candidate.is_chain else ""
        parts = ", parts of gradients apart" if candidate.apart and self.joint.apart else ""
        return f"persistent, {len(candidate.staged.pieces)} stages{where}, {account} account{parts}"

    def _learn(self, plan: Planned) -> None:
        self._made.append(plan)
        time, peak = plan.prediction.time_s, plan.prediction.peak_bytes
        if any(k.prediction.time_s <= time and k.prediction.peak_bytes <= peak for k in self._known):
            return
        beaten = [k for k in self._known if k.prediction.time_s >= time and k.prediction.peak_bytes >= peak]
        self._known = [k for k in self._known if k not in beaten] + [plan]

    def _chain(self, number: int, account: Account) -> Chain:
        return self._candidates[number].staged.chain(account, bytes_between(self.joint, self.around))

    @cached_property
    def _refiner(self) -> Refiner:
        return Refiner(self.joint, self.around)

    def _refine(self, plan: Planned, room: int) -> None:
        """Choose value by value, beginning with a plan; one that gains little is not worth its irregularity."""
        enough_s = (1 - _WORTH) * plan.prediction.time_s
        if enough_s <= self._refiner.least_s(room):
            return
        larger = [(other.program, other.prediction) for other in self._larger(room)]
        programs = self._refiner.programs((plan.program, plan.prediction), room, larger)
        fitting = [Planned(*found, _by_value(plan.method)) for found in programs if _fits(found[1], room)]
        refined = min(fitting, default=plan, key=lambda found: found.prediction.time_s)
        if refined.prediction.time_s < enough_s:
            self._learn(refined)
            self._keep_more(refined, room)

    def _keep_more(self, plan: Planned, room: int) -> Planned:
        """Use up what room is left: keep values from the forward that the plan would recompute, dearest first."""
        joint = self.joint
        tried: set[int] = set()
        for _ in range(_TRIES):
            slack = room - plan.prediction.peak_bytes
            replays = plan.program.replays
            worth = [
                (joint.ops[op].time * count / max(1, size), op)
                for op, count in replays.items()
                if op not in tried and joint.ops[op].storable and 0 < (size := _bytes(joint, op)) <= slack
            ]
            if not worth:
                break
            _, op = max(worth)
            tried.add(op)
            order = [i.op for i in plan.program.backward if i.op != op]
            program = make_program(joint, order, apart=plan.program.apart)
            prediction = predict(joint, program, self.around)
            if prediction.peak_bytes <= room and prediction.time_s < plan.prediction.time_s:
                plan = Planned(program, prediction, plan.method)
                self._learn(plan)
        return plan


def plan_together(planners: list[Planner], room: int) -> list[Planned] | None:
    """Plans for graphs that run one after another; None if they do not fit. The same planner may come twice."""
    if len(planners) == 1:
        found = planners[0].best(room)
        return None if found is None else [found]
    plans = [planner.everything for planner in planners]
    if peak_together(plans) <= room:
        return plans
    best = [planner.least for planner in planners]
    if peak_together(best) > room:
        return None
    low, high = 0.0, 1.0
    for _ in range(8):  # every graph gets the same share between its least and its most
        share = (low + high) / 2
        plans = _shared(planners, share, refine=False)
        if peak_together(plans) <= room:
            low, best = share, plans
        else:
            high = share
    refined = _shared(planners, low, refine=True)  # one may save more than before, within the same peak
    return refined if peak_together(refined) <= room else best


def peak_together(plans: list[Planned]) -> int:
    """The peak of graphs in a row: what one saves stays while the next ones run."""
    return peak_in_a_row((plan.prediction.peak_bytes, plan.prediction.saved_bytes) for plan in plans)


def _shared(planners: list[Planner], share: float, *, refine: bool) -> list[Planned]:
    found = {}
    for planner in dict.fromkeys(planners):
        least, most = planner.least.prediction.peak_bytes, planner.everything.prediction.peak_bytes
        found[planner] = planner.best(int(least + share * (most - least)), refine=refine) or planner.least
    return [found[planner] for planner in planners]


def _candidates(joint: Joint, as_chain: bool, most_ways: int) -> Iterator[_Candidate]:
    """Ways to cut: only where little crosses, more finely inside large stages, and where one value crosses."""
    single = cut(joint, single=True)
    by_bytes = {} if as_chain else {_ends(pieces): pieces for pieces in _cut_by_bytes(joint)}
    for ends, pieces in by_bytes.items():
        yield _Candidate(stage(joint, pieces, most_ways), ("full", "once"), ends == _ends(single))
    if _ends(single) not in by_bytes:  # little crosses two cuts, so the accounts are nearly the same
        yield _Candidate(stage(joint, single, most_ways), ("full",), True)


def _cut_by_bytes(joint: Joint) -> Iterator[list[Piece]]:
    coarse, fine = cut(joint, divide=False), cut(joint, divide=True)
    if len(coarse) > 1:
        yield coarse
    yield fine


def _ends(pieces: Sequence[Piece]) -> tuple[int, ...]:
    return tuple(piece.forward[-1] for piece in pieces)


def _least_time(found: Iterable[Prediction], room: int) -> float | None:
    return min((prediction.time_s for prediction in found if _fits(prediction, room)), default=None)


def _fits(prediction: Prediction, room: int) -> bool:
    return prediction.peak_bytes <= room


def _longer(time: float, plan: Planned) -> str:
    own = plan.prediction.time_s
    return f"{(time / own - 1 if own else 0.0):+.1%}"


def _by_value(method: str) -> str:
    return method if method.endswith(_BY_VALUE) else method + _BY_VALUE


def _bytes(joint: Joint, op: int) -> int:
    return joint.bytes_of(set(joint.storages(op)))
