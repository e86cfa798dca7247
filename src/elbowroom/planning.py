"""Finds the fastest program of a captured graph that stays within a number of bytes.

The dynamic program plans stages of a chain, whose sizes are sums that leave out what only shows operator by operator:
tensors that cross several cuts, values that die early, operators that turn out not to be needed again. So its budget
is a dial, not the truth: the planner turns it, translates each schedule into a program, predicts that program
exactly, and keeps the fastest one that fits. Several ways to cut and to count are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from elbowroom.joint import Joint
from elbowroom.problem import Chain
from elbowroom.program import Prediction, Program, Surroundings, make_program, peak_in_a_row, predict
from elbowroom.schedule import Operation, simulate
from elbowroom.solve.persistent import Sweep
from elbowroom.stages.costs import Account, Staged, stage
from elbowroom.stages.cuts import cut
from elbowroom.stages.translate import program_for

_TURNS = 7  # of the dial, per way to cut and count
_TRIES = 60  # values considered for keeping after all, once a program is found


@dataclass(frozen=True, eq=False)
class Planned:
    """A program, what it takes, and where it came from."""

    program: Program
    prediction: Prediction
    method: str
    schedule: tuple[Operation, ...] = ()
    staged: Staged | None = None
    recorded: bool = False  # replayed as CUDA graphs rather than launched

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


class Planner:
    """Plans one captured graph; asked for several budgets, it cuts and counts only once."""

    def __init__(
        self, joint: Joint, around: Surroundings, report: Callable[[float], None] = lambda part: None
    ) -> None:
        self.joint = joint
        self.around = around
        self.report = report
        program = make_program(joint, joint.backward)
        self.everything = Planned(program, predict(joint, program, around), "everything is saved")
        self._candidates = list(_candidates(joint)) if joint.forward and joint.backward else []
        self._known = [self.everything]  # every program found that none beats in both time and peak
        self._sweeps: dict[tuple[int, Account], list[Sweep]] = {}
        self._lowest: set[tuple[int, Account]] = set()  # ways whose lowest schedule is among what is known
        self._translated: dict[tuple[int, tuple[Operation, ...]], Planned] = {}  # by cut and schedule

    def best(self, room: int) -> Planned | None:
        """The fastest program found within `room` bytes above what is resident; None if there is none."""
        if self.everything.prediction.peak_bytes <= room:
            return self.everything
        ways = self._ways()
        for done, (number, account) in enumerate(ways):
            self._turn(number, account, room)
            self.report((done + 1) / len(ways))
        if self.least.prediction.peak_bytes > room:
            return None
        best = self._fastest(room)
        if best is not None:
            self._keep_more(best, room)
        return self._fastest(room)

    @property
    def least(self) -> Planned:
        """The program of the lowest peak found."""
        for number, account in self._ways():
            if (number, account) not in self._lowest:
                sweep = Sweep(self._chain(number, account), 0)
                self._translate(number, account, sweep, sweep.least_bytes)
                self._lowest.add((number, account))
        return min(self._known, key=lambda plan: plan.prediction.peak_bytes)

    def _ways(self) -> list[tuple[int, Account]]:
        return [(number, account) for number in range(len(self._candidates)) for account in ("full", "once")]

    def _fastest(self, room: int) -> Planned | None:
        fitting = [plan for plan in self._known if plan.prediction.peak_bytes <= room]
        return min(fitting, key=lambda plan: plan.prediction.time_s, default=None)

    def _turn(self, number: int, account: Account, room: int) -> None:
        """Find programs for budgets around the largest that fits when predicted exactly: a bisection."""
        guess = room + self.around.late_bytes
        sweep = self._sweep(number, account, 2 * guess)
        low, high = sweep.least_bytes, sweep.most_bytes
        if not self._translate(number, account, sweep, low) <= room or low >= high:
            return
        if low < guess < high:
            if self._translate(number, account, sweep, guess) <= room:
                low = guess
            else:
                high = guess
        for _ in range(_TURNS):
            middle = (low + high) // 2
            if self._translate(number, account, sweep, middle) <= room:
                low = middle
            else:
                high = middle

    def _sweep(self, number: int, account: Account, most_bytes: int) -> Sweep:
        """A table that reaches `most_bytes`, and not so far beyond that its slots are coarse."""
        sweeps = self._sweeps.setdefault((number, account), [])
        for sweep in sweeps:
            if (
                most_bytes <= sweep.most_bytes <= 2 * most_bytes
                or sweep.most_bytes == sweep.useful_bytes <= most_bytes
            ):
                return sweep
        sweeps.append(Sweep(self._chain(number, account), most_bytes))
        return sweeps[-1]

    def _translate(self, number: int, account: Account, sweep: Sweep, budget: int) -> int:
        """Learn the program of the chain's best schedule within a budget; returns its true peak."""
        staged = self._candidates[number]
        schedule = sweep.schedule(budget)
        if (number, schedule) in self._translated:  # neighbouring budgets often have the same
            return self._translated[number, schedule].prediction.peak_bytes
        simulate(sweep.chain, schedule)  # the referee: raises if the schedule cannot run
        program = program_for(staged, schedule)
        prediction = predict(self.joint, program, self.around)
        method = f"persistent, {len(staged.pieces)} stages, {account} account"
        plan = self._translated[number, schedule] = Planned(program, prediction, method, schedule, staged)
        self._learn(plan)
        return prediction.peak_bytes

    def _learn(self, plan: Planned) -> None:
        time, peak = plan.prediction.time_s, plan.prediction.peak_bytes
        if any(k.prediction.time_s <= time and k.prediction.peak_bytes <= peak for k in self._known):
            return
        beaten = [k for k in self._known if k.prediction.time_s >= time and k.prediction.peak_bytes >= peak]
        self._known = [k for k in self._known if k not in beaten] + [plan]

    def _chain(self, number: int, account: Account) -> Chain:
        results = {s for op in self.joint.results for s in self.joint.storages(op)}
        arriving = {s for op in self.joint.arriving for s in self.joint.storages(op)}
        outside = self.around.outside_bytes + self.joint.bytes_of(results | arriving)
        return self._candidates[number].chain(account, outside)

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
            program = make_program(joint, order)
            prediction = predict(joint, program, self.around)
            if prediction.peak_bytes <= room and prediction.time_s < plan.prediction.time_s:
                plan = Planned(program, prediction, plan.method, plan.schedule, plan.staged)
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
        shared = {planner: _share(planner, share) for planner in planners}
        plans = [shared[planner] for planner in planners]
        if peak_together(plans) <= room:
            low, best = share, plans
        else:
            high = share
    return best


def peak_together(plans: list[Planned]) -> int:
    """The peak of graphs in a row: what one saves stays while the next ones run."""
    return peak_in_a_row((plan.prediction.peak_bytes, plan.prediction.saved_bytes) for plan in plans)


def _share(planner: Planner, share: float) -> Planned:
    least, most = planner.least.prediction.peak_bytes, planner.everything.prediction.peak_bytes
    return planner.best(int(least + share * (most - least))) or planner.least


def _candidates(joint: Joint) -> Iterator[Staged]:
    """Ways to cut: only where little crosses, and more finely inside large stages."""
    coarse, fine = cut(joint, divide=False), cut(joint, divide=True)
    if len(coarse) > 1:
        yield stage(joint, coarse)
    if len(fine) != len(coarse) or len(coarse) <= 1:
        yield stage(joint, fine)


def _bytes(joint: Joint, op: int) -> int:
    return joint.bytes_of(set(joint.storages(op)))
