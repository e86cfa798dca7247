"""Planning graphs that run one after another: what one saves stays while the next ones run."""

from __future__ import annotations

from collections.abc import Sequence

from elbowroom.plan.planner import Planned, Planner
from elbowroom.progress import Progress
from elbowroom.step.referee import peak_in_a_row

_TURNS = 8  # every turn halves the range of the share: after eight it is known to half a percent


def plan_together(planners: list[Planner], room: int, report: Progress = lambda part: None) -> list[Planned] | None:
    """Plans for graphs that run one after another; None if they do not fit. The same planner may come twice."""
    if len(planners) == 1:
        found = planners[0].best(room, report=report)
        return None if found is None else [found]
    plans = [planner.everything for planner in planners]
    if peak_together(plans) <= room:
        return plans
    best = least_together(planners)
    if peak_together(best) > room:
        return None
    low, high = 0.0, 1.0
    for turn in range(_TURNS):  # every graph gets the same share between its least and its most
        report(turn / _TURNS)
        share = (low + high) / 2
        plans = _shared(planners, share, refine=False)
        if peak_together(plans) <= room:
            low, best = share, plans
        else:
            high = share
    refined = _shared(planners, low, refine=True)  # one may save more than before, within the same peak
    return refined if peak_together(refined) <= room else best


def least_together(planners: Sequence[Planner]) -> list[Planned]:
    """Of the programs found, those that take the least in a row: it counts, too, what the earlier ones save."""
    lowest = [planner.least for planner in planners]
    if len(set(planners)) < len(planners):  # one program runs each time
        return lowest
    low, high = 0, peak_together(lowest)
    while low < high:
        middle = (low + high) // 2
        found = _saving_least(planners, middle)
        if found is None:
            low = middle + 1
        else:
            lowest, high = found, peak_together(found)
    return lowest


def _saving_least(planners: Sequence[Planner], room: int) -> list[Planned] | None:
    """Programs that fit in a row, if any do: whatever comes later, it is best if the earlier ones save little."""
    held, chosen = 0, []
    for planner in planners:
        fitting = [plan for plan in planner.found if held + plan.prediction.peak_bytes <= room]
        if not fitting:
            return None
        chosen.append(min(fitting, key=lambda plan: (plan.prediction.saved_bytes, plan.prediction.time_s)))
        held += chosen[-1].prediction.saved_bytes
    return chosen


def peak_together(plans: list[Planned]) -> int:
    return peak_in_a_row((plan.prediction.peak_bytes, plan.prediction.saved_bytes) for plan in plans)


def _shared(planners: list[Planner], share: float, *, refine: bool) -> list[Planned]:
    found = {}
    for planner in dict.fromkeys(planners):
        least, most = planner.least.prediction.peak_bytes, planner.everything.prediction.peak_bytes
        found[planner] = planner.best(int(least + share * (most - least)), refine=refine) or planner.least
    return [found[planner] for planner in planners]
