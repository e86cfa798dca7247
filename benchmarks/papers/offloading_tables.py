"""The tables of offloading.py, as Markdown: what the figures of 001 ch. 3 and 4 come to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from offloading_plots import FAMILIES, divided, moved, times
from offloading_points import (
    ALPHAS,
    BOTH,
    CHAPTER_4,
    DIVISORS,
    FASTER,
    LIMITS,
    LINKS,
    OFFLOADING,
    REPRESENTATIVE,
    Case,
    Point,
    Study,
)
from tables import markdown, mean, percent, ratio

SLIGHTLY = 1.05  # how much slower than pofo the combined method may be
NOTICEABLY = 1.001
MUCH = 1.2  # the thesis' bound on offload-dynprog over LB, and on time with activations ÷ 4 to ÷ 6


def tables(study: Study, chapters: Sequence[int]) -> dict[str, str]:
    """By the names under which docs/papers.md has them."""
    found: dict[str, str] = {}
    if 3 in chapters:
        found["3.5"] = ratios(study, {"3.5": study.cases(REPRESENTATIVE, (224, 500))})
        found["3.6"] = against_recomputation(study)
        found["3.7–3.13"] = ratios(study, dict(_figures(study, 7)))
        found["slower"] = slower(study)
        found["3.14–3.20"] = crossings(study)
    if 4 in chapters:
        found["4.2"] = overheads(study, ALPHAS, lambda case: list(case.alphas(ALPHAS)), "α")
        found["4.3"] = overheads(study, LINKS, lambda case: list(case.faster_links(LINKS)), "multiple of the link")
        found["4.4"] = shares(study, ALPHAS, lambda case: list(case.alphas(ALPHAS)), "α")
        found["4.5"] = shares(study, LINKS, lambda case: list(case.faster_links(LINKS)), "multiple of the link")
        for link in study.divisor_links():
            found["divided" if link else "divided, measured link"] = divisions(study, link)
        found["reckoned"] = reckoned(study)
        found["combined"] = combined(study)
    return found


def _figures(study: Study, first: int) -> Iterator[tuple[str, list[Case]]]:
    number = first
    for family, networks in FAMILIES.items():
        for side in (224, 500, 1000):
            yield f"3.{number} {family}, {side}²", study.cases(networks, (side,))
            number += 1
    yield f"3.{number} Inception v3", study.cases(("inception_v3",))


def _ratios(study: Study, case: Case, method: str) -> list[float]:
    """To LB, where the method answered."""
    points = list(case.limits(LIMITS))
    found = divided(times(study, points, method), [study.bound(point) for point in points])
    return [value for value in found if value is not None]


def ratios(study: Study, figures: dict[str, list[Case]]) -> str:
    """Mean and worst ratio to LB, and at how many limits a method has a schedule."""
    rows = []
    for figure, cases in figures.items():
        row = [figure]
        for method in OFFLOADING:
            found = [value for case in cases for value in _ratios(study, case, method)]
            points = [point for case in cases for point in case.limits(LIMITS)]
            few = fitting(study, points, method, len(found))
            row.append(f"{ratio(mean(found))}, {ratio(max(found))}{few}" if found else "–")
        rows.append(row)
    return markdown(["mean, worst", *OFFLOADING], rows)


def fitting(study: Study, points: Sequence[Point], method: str, fit: int) -> str:
    """At how many of the points that were asked something fits, if not at all; a star where not all were asked."""
    asked = sum(study.answer(point, method) is not None for point in points)
    return (f" ({fit}/{asked})" if fit < asked else "") + ("\\*" if asked < len(points) else "")


def against_recomputation(study: Study) -> str:
    """At how many of the memory limits the thesis' offloading is at least as fast as recomputation, by link."""
    rows = []
    for case in study.cases(REPRESENTATIVE, (224, 500)):
        row = [f"{case.setting.network}, {case.setting.side}²"]
        for link in FASTER:
            points = [Point(point.setting, point.x, point.budget, link) for point in case.limits(LIMITS)]
            ours, other = times(study, points, "offload-dynprog"), times(study, points, "persistent")
            both = [(a, b) for a, b in zip(ours, other, strict=True) if a is not None and b is not None]
            row.append(f"{sum(a <= 1.001 * b for a, b in both)} of {len(both)}" if both else "–")
        rows.append(row)
    return markdown(["limits where offload-dynprog ≤ persistent", *(f"{link:.0f} β" for link in FASTER)], rows)


def slower(study: Study) -> str:
    """At how many limits the thesis' dynamic program is slower than others that have a schedule."""
    others = [method for method in OFFLOADING if not method.startswith("offload-dyn")]
    groups = {"those of Fig. 3.5": study.cases(REPRESENTATIVE, (224, 500)), "all": study.cases()}
    rows = []
    for name, cases in groups.items():
        points = [point for case in cases for point in case.limits(LIMITS)]
        ours, row = times(study, points, "offload-dynprog"), [f"{name}, {len(points)} limits"]
        for method in others:
            pairs = zip(ours, times(study, points, method), strict=True)
            both = [a / b for a, b in pairs if a is not None and b is not None]
            worse = [value for value in both if value > NOTICEABLY]
            row.append(f"{len(worse)} of {len(both)}" + (f", worst {ratio(max(worse))}" if worse else ""))
        rows.append(row)
    return markdown(["limits where offload-dynprog is slower than", *others], rows)


def crossings(study: Study) -> str:
    """From which limit on, as a share of the peak, offloading stays at least as fast as recomputation."""
    rows = []
    for case in study.cases():
        points = list(case.limits(LIMITS))
        ours, other = times(study, points, "offload-best"), times(study, points, "persistent")
        if any(value is None for value in (*ours, *other)):
            continue
        better = [a <= 1.001 * b for a, b in zip(ours, other, strict=True)]
        first = next(k for k in range(len(points)) if all(better[k:]))
        at_least = [case.setting.batch / value for value in (ours[0], other[0], case.once)]
        share = percent(points[first].budget / case.peak)
        name = f"{case.setting.network}, {case.setting.side}²"
        rows.append([name, f"{case.peak / 2**30:.2f}", *(f"{value:.1f}" for value in at_least), share])
    header = ["network", "peak, GiB", "offload-best at its least", "persistent there", "no limit", "offload from"]
    return markdown([f"images/s, {header[0]}", *header[1:]], rows)


PointsOf = Callable[[Case], list[Point]]


def overheads(study: Study, xs: Sequence[float], points_of: PointsOf, what: str) -> str:
    """The mean time over that without a limit, and how many networks fit where not all do."""
    cases = study.cases(sides=(500,))
    rows = []
    for place, x in enumerate(xs):
        row = [f"{x:g}"]
        for method in CHAPTER_4:
            found = [times(study, [points_of(case)[place]], method)[0] for case in cases]
            there = [t / case.once - 1 for t, case in zip(found, cases, strict=True) if t is not None]
            few = fitting(study, [points_of(case)[place] for case in cases], method, len(there)) if there else ""
            row.append(percent(mean(there), 1) + few)
        rows.append(row)
    return markdown([what, *CHAPTER_4], rows)


def shares(study: Study, xs: Sequence[float], points_of: PointsOf, what: str) -> str:
    """The mean share of the activations that goes to the host."""
    methods = (*BOTH, "offload-dynprog", "offload-best")
    rows = []
    for place, x in enumerate(xs):
        row = [f"{x:g}"]
        for method in methods:
            found = [moved(study, case, [points_of(case)[place]], method)[0] for case in study.cases(sides=(500,))]
            row.append(percent(mean([share for share in found if share is not None])))
        rows.append(row)
    return markdown([what, *methods], rows)


def divisions(study: Study, link: float) -> str:
    """Time over that without a limit when the memory of the activations is divided."""
    methods = ("persistent", "offload-best", "pofo", "combined")
    header = [f"÷{divisor}: {method}" for divisor in DIVISORS[1:4] for method in methods]
    rows, few = [], [0] * len(header)
    for case in study.cases(sides=(500,)):
        cells = []
        for point in case.divided(DIVISORS[1:4], link):
            for method in methods:
                answer = study.answer(point, method)
                if answer is None or answer.time is None:
                    cells.append("–" if answer is None else "no room")
                else:
                    few[len(cells)] += answer.time < MUCH * case.once
                    cells.append(percent(answer.time / case.once - 1, 1))
        rows.append([case.setting.network, *cells])
    rows.append([f"below {percent(MUCH - 1)}", *(f"{count} of {len(rows)}" for count in few)])
    return markdown(["time added", *header], rows)


def reckoned(study: Study) -> str:
    """What a step leaves to win: the part of it that the forward is, and the part of the activations that the link
    carries there and back in the time of a step. What neither stays nor moves is computed again, roughly at the price
    of that part of the forward."""
    rows = []
    for case in study.cases(sides=(500,)):
        forward = sum(stage.forward_time for stage in case.saved.chain.stages) / case.once
        carried = min(1.0, study.rate * case.once / 2 / sum(case.saved.value_bytes))
        row = [case.setting.network, percent(forward), percent(carried), f"{case.peak / case.recompute_least:.1f}"]
        row += [percent(max(0.0, 1 - 1 / divisor - carried) * forward, 1) for divisor in DIVISORS[1:4]]
        rows.append(row)
    header = ["network", "forward, of the step", "carried, of the activations", "M_high ÷ M_low"]
    return markdown([*header, *(f"÷{divisor}, reckoned" for divisor in DIVISORS[1:4])], rows)


def combined(study: Study) -> str:
    """Where the combined method is slower than others by more than it may be, over all points of chapter 4."""
    points = [
        (case, point)
        for case in study.cases(sides=(500,))
        for point in (
            *case.alphas(ALPHAS),
            *case.faster_links(LINKS[1:]),
            *(point for link in study.divisor_links() for point in case.divided(DIVISORS, link)),
        )
    ]
    rows = []
    for method in (*CHAPTER_4[:3], *CHAPTER_4[4:]):
        answers = [(study.answer(point, "combined"), study.answer(point, method)) for _, point in points]
        pairs = [(a.time, b.time) for a, b in answers if a is not None and b is not None]
        both = [a / b for a, b in pairs if a is not None and b is not None]
        alone = sum(a is not None and b is None for a, b in pairs)
        lost = sum(a is None and b is not None for a, b in pairs)
        if both:
            slower = sum(value > 1 + 1e-6 for value in both)
            much = sum(value > SLIGHTLY for value in both)
            rows.append([method, len(both), ratio(mean(both)), ratio(max(both)), slower, much, alone, lost])
    header = [
        "combined ÷",
        "points",
        "mean",
        "worst",
        "slower",
        "by 5 % or more",
        "only combined fits",
        "only it fits",
    ]
    return markdown(header, rows)
