"""Planning graphs that run one after another: what one saves stays while the next ones run."""

from __future__ import annotations

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
    best = [planner.least for planner in planners]
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


def peak_together(plans: list[Planned]) -> int:
    return peak_in_a_row((plan.prediction.peak_bytes, plan.prediction.saved_bytes) for plan in plans)


def _shared(planners: list[Planner], share: float, *, refine: bool) -> list[Planned]:
    found = {}
    for planner in dict.fromkeys(planners):
        least, most = planner.least.prediction.peak_bytes, planner.everything.prediction.peak_bytes
        found[planner] = planner.best(int(least + share * (most - least)), refine=refine) or planner.least
    return [found[planner] for planner in planners]
