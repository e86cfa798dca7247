"""Planning graphs that run one after another: what one saves stays while the next ones run."""

from __future__ import annotations

from collections.abc import Sequence

from elbowroom.plan.planner import Planned, Planner
from elbowroom.progress import Progress
from elbowroom.step.referee import peak_in_a_row

_TURNS = 8  # every turn halves the range of the share: after eight it is known to half a percent
_REFINED = 3  # shares for which plans are improved value by value: each takes as long as all turns together
_MORE = 1.25  # of what was over: plans change by jumps, and the next is to fit


def plan_together(
    planners: list[Planner], room: int, *, moves: bool = True, report: Progress = lambda part: None
) -> list[Planned] | None:
    """Plans for graphs that run one after another; None if they do not fit. The same planner may come twice.

    Without `moves` values move to the host only where nothing else fits.
    """
    if len(planners) == 1:
        found = planners[0].best(room, moves=moves, report=report)
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
        plans = _shared(planners, share, refine=False, moves=moves)
        if peak_together(plans) <= room:
            low, best = share, plans
        else:
            high = share
    refined = _refined(planners, low, room, moves=moves)
    if refined is None or (_time_s(refined) >= _time_s(best) and not any(each.prefers_moves for each in planners)):
        return best
    return refined


def _refined(planners: Sequence[Planner], share: float, room: int, *, moves: bool) -> list[Planned] | None:
    """Plans improved value by value. One may save more than it did before, within the same peak: where they do not
    fit in a row any more, all get a smaller share."""
    range_bytes = peak_together([planner.everything for planner in planners]) - peak_together(
        least_together(planners)
    )
    for _ in range(_REFINED):
        plans = _shared(planners, share, refine=True, moves=moves)
        over = peak_together(plans) - room
        if over <= 0:
            return plans
        share -= _MORE * over / max(1, range_bytes)
        if share <= 0:
            break
    return None


def least_together(planners: Sequence[Planner]) -> list[Planned]:
    """The programs found that take the least in a row.

    One of the lowest peak may save more than another that takes as much, or little more, and what it saves stays
    while later ones run. So what is found for one budget never keeps a row from another that it was known to fit.
    """
    lowest = [planner.least for planner in planners]
    found: dict[Planner, Planned] = {}
    after = 0  # what the later ones take
    for planner in reversed(planners):
        if planner not in found:
            found[planner] = min(planner.made, key=lambda plan: _taken(plan, after))
        after = _taken(found[planner], after)[0]
    leanest = [found[planner] for planner in planners]
    return min(lowest, leanest, key=peak_together)


def _taken(plan: Planned, after: int) -> tuple[int, int, float]:
    """The peak of a program and of what runs after it; then what tells apart those for which that is the same."""
    peak, saved = plan.prediction.peak_bytes, plan.prediction.saved_bytes
    return max(peak, saved + after), peak, plan.time_s


def peak_together(plans: Sequence[Planned]) -> int:
    return peak_in_a_row((plan.prediction.peak_bytes, plan.prediction.saved_bytes) for plan in plans)


def _time_s(plans: Sequence[Planned]) -> float:
    return sum(plan.time_s for plan in plans)


def _shared(planners: Sequence[Planner], share: float, *, refine: bool, moves: bool) -> list[Planned]:
    found = {}
    for planner in dict.fromkeys(planners):
        least, most = planner.least.prediction.peak_bytes, planner.everything.prediction.peak_bytes
        room = int(least + share * (most - least))
        found[planner] = planner.best(room, refine=refine, moves=moves) or planner.least
    return [found[planner] for planner in planners]
