"""The judge: fits a model, lets things happen, and says what is wrong, if anything."""

from __future__ import annotations

import contextlib
import io
import math
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy
import torch

import elbowroom
from campaign.bystander import Bystander
from campaign.comparing import Failure, Generators, drawing_as_plainly, state_differences, state_of
from campaign.pair import SLOW_S, Pair, Side, Trial

Event = Callable[[Pair], None]
MUCH = 0.01  # apart; other kernels differ by less, and a trace may have faults of its own


def judge(trial: Trial, text: ModuleType, events: Sequence[Event], bystander: Bystander | None = None) -> Verdict:
    """Everything that one case gets wrong first; nothing if it is right. `text` has `Model` and `Criterion`.

    Where numbers differ by more than rounding, but not by much, tracing alone may be the reason: then the planned
    steps must be those of PyTorch's own tracing without a plan. Where kernels are not those of plain execution, a
    last bit may decide on which side of zero a value is, and a gradient changes by much: then all must be right in
    double precision.
    """
    bystander = bystander or Bystander(trial.kernels, trial.device)
    with drawing_as_plainly(trial.kernels):
        verdict = _judge_against(trial, text, events, bystander)
    if trial.kernels == "torch" and verdict.failures and all(each.share < MUCH for each in verdict.failures):
        traced = _judge_against(replace(trial, reference="aot_eager"), text, events, bystander)
        if not traced.failures:
            return Verdict([], rounded=True)
    other_kernels = trial.kernels != "torch" or trial.device != "cpu"
    if other_kernels and verdict.failures and all(math.isfinite(each.share) for each in verdict.failures):
        with drawing_as_plainly(trial.kernels):
            exact = _judge_against(replace(trial, exact=True), text, events, bystander)
        if not exact.failures:
            return Verdict([], rounded=True)
    return verdict


def _judge_against(trial: Trial, text: ModuleType, events: Sequence[Event], bystander: Bystander) -> Verdict:
    pair = make_pair(trial, text)
    fit(pair)
    if not pair.failures and not pair.ended:
        pair.check("after fit")
    for event in events:
        if pair.failures or pair.ended:
            break
        name = event.__name__.replace("_", " ")
        event(pair)
        if not pair.failures and not pair.ended:
            pair.check(f"after: {name}")
        if not pair.failures:
            pair.failures += bystander.check(f"after: {name}")
    if not pair.failures and not pair.ended:
        check_speed(pair)
    return Verdict(pair.failures, pair.rounded)


class Verdict:
    """What went wrong, and whether some bits were rounded otherwise than plainly."""

    def __init__(self, failures: list[Failure], rounded: bool = False) -> None:
        self.failures, self.rounded = failures, rounded


def make_pair(trial: Trial, text: ModuleType) -> Pair:
    sides = []
    for is_planned in (False, True):
        seed_all(trial.seed)
        model, criterion = text.Model().to(trial.device), text.Criterion()
        if trial.exact:
            model.to(torch.float64)
        sides.append(Side(model, criterion, is_planned))
    return Pair(trial, *sides)


def seed_all(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def fit(pair: Pair) -> None:
    """Fit the planned side within its share; neither fitting nor another budget may change anything."""
    plain_peak = measure_plainly(pair)
    args, y = pair.draw_batch()
    wishes: dict[str, Any] = {"kernels": pair.trial.kernels, "strict": pair.trial.strict}
    if pair.trial.loss_inside:
        args, wishes["loss"] = (*args, y), pair.planned.criterion
    if pair.trial.optimizer:
        wishes["optimizer"] = pair.planned.optimizer

    def fitted() -> None:
        pair.planned.model = elbowroom.fit(pair.planned.model, *args, budget="1GiB", **wishes)

    def within_its_share() -> None:
        set_share(pair, plain_peak, pair.trial.share)

    changes_nothing(pair, "fit", fitted)
    if not pair.failures and not pair.ended:
        changes_nothing(pair, "set_budget", within_its_share)


def set_share(pair: Pair, plain_peak: int, share: float) -> None:
    """Another budget, between the least that it names and what the plain step takes."""
    pair.new_plan()
    session = pair.planned.model.elbowroom
    least = plain_peak // 2
    try:
        session.set_budget(1)
    except elbowroom.BudgetTooSmall as refusal:
        least = refusal.least_budget
    pair.budget = max(1, int(least + share * max(0, plain_peak - least)))
    with pair.noting():
        session.set_budget(pair.budget)


def changes_nothing(pair: Pair, what: str, action: Callable[[], None]) -> None:
    """Run something that must leave the model, the generators and the user's terminal as they are."""
    before, chance, printed = state_of(pair.planned.model), Generators.now(), io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        try:
            action()
        except elbowroom.Unplanned as refusal:
            pair.ended = True
            if not pair.trial.strict:
                pair.fail(f"{what} raised Unplanned", f"though it is not strict: {refusal}"[:200])
        except Exception as failure:
            pair.fail(f"{what} raised {type(failure).__name__}", (str(failure).splitlines() or [""])[0][:200])
            return
    pair.note_said(str(each.message) for each in caught)
    found = [*chance.differences(Generators.now()), *state_differences(before, state_of(pair.planned.model))]
    for each in found[:3]:
        pair.fail(f"{what} changed {each.kind}", f"{each.where} {each.text}")
    if printed.getvalue():
        pair.fail(f"{what} printed", f"{printed.getvalue()!r:.100}")
    if found and not pair.failures:  # they are tolerated
        pair.take_over()
    chance.put_back()


def measure_plainly(pair: Pair) -> int:
    """The bytes of a plain step, on a third model, after one that shows what PyTorch allocates but once."""
    trial = pair.trial
    third = make_pair(trial, sys.modules[type(pair.plain.model).__module__])
    chance = Generators.now()
    peaks = [third.run(third.plain, *third.draw_batch(), metered=True).peak_bytes for _ in range(2)]
    chance.put_back()
    return max(peaks)


def check_speed(pair: Pair) -> None:
    """What changes in every step must not mean a new plan in every step."""
    times = []
    while len(times) < 4 and not pair.ended:
        times.append(pair.step()[1].time_s)
    if not pair.failures and not pair.ended and min(times[1:]) > SLOW_S:
        pair.fail("planned in every step", f"steps take {min(times[1:]) * 1e3:.0f} ms at the end")
