"""The plots of offloading.py: Fig. 3.5–3.20 and 4.2–4.5."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from offloading_points import (
    ALPHA,
    ALPHAS,
    BOTH,
    CHAPTER_4,
    FASTER,
    LIMITS,
    LINKS,
    OFFLOADING,
    RECOMPUTING,
    REPRESENTATIVE,
    Case,
    Point,
    Study,
)
from tables import save
from vision_settings import DENSENETS, RESNETS

HIGHEST = 2.0  # ratios above are cut off
STYLES = {
    "vdnn": "C4:s",
    "tflms": "C5:^",
    "autoswap": "C6:v",
    "offload-greedy": "C1-o",
    "offload-dynprog": "C0-D",
    "offload-best": "k--",
    "persistent": "C2-x",
    "pofo": "C3-o",
    "autocapper": "C9:s",
    "opportunist": "C8:^",
    "combined": "k-",
}
FAMILIES = {"ResNet": RESNETS, "DenseNet": DENSENETS}
Series = Callable[[Study, Case, str, Sequence[Point]], list[float | None]]


def save_plots(study: Study, folder: Path, chapters: Sequence[int]) -> None:
    plots = [*(chapter_3(study) if 3 in chapters else ()), *(chapter_4(study) if 4 in chapters else ())]
    for name, title, cases, draw in plots:
        if cases:
            figure = panels(study, title, cases, draw)
            save(figure, folder / f"{name}.png")


Plot = tuple[str, str, list[Case], Callable[[Study, Case, Any], None]]


def chapter_3(study: Study) -> Iterator[Plot]:
    few = study.cases(REPRESENTATIVE, (224, 500))
    yield "001-3.5", "Time over the bound LB", few, draw_ratios
    yield "001-3.6", "Images/s at one, two and three times the link", few, draw_links
    numbers = iter(range(7, 21))
    for what, draw in (("Time over the bound LB", draw_ratios), ("Images/s", draw_throughput)):
        for family, networks in FAMILIES.items():
            for side in (224, 500, 1000):
                yield f"001-3.{next(numbers)}", f"{what}: {family}, {side}²", study.cases(networks, (side,)), draw
        yield f"001-3.{next(numbers)}", f"{what}: Inception v3", study.cases(("inception_v3",)), draw


def chapter_4(study: Study) -> Iterator[Plot]:
    cases = study.cases(sides=(500,))
    yield "001-4.2", "Time over that without a limit, by memory", cases, draw_alphas
    yield "001-4.3", f"Time over that without a limit, by link, α = {ALPHA}", cases, draw_faster
    yield "001-4.4", "Share of all activations that is moved, by memory", cases, draw_moved_alphas
    yield "001-4.5", f"Share of all activations that is moved, by link, α = {ALPHA}", cases, draw_moved_faster


def panels(study: Study, title: str, cases: Sequence[Case], draw: Callable[[Study, Case, Any], None]) -> Any:
    """One panel a case, five in a row at most."""
    from matplotlib import pyplot

    columns = min(5, len(cases))
    lines = -(-len(cases) // columns)
    size = (max(6.0, 3.0 * columns), 2.6 * lines + 0.8)
    figure, axes = pyplot.subplots(lines, columns, figsize=size, squeeze=False)
    for axis in axes.flat[len(cases) :]:
        axis.axis("off")
    for case, axis in zip(cases, axes.flat, strict=False):
        draw(study, case, axis)
        setting = case.setting
        axis.set_title(f"{setting.network}, {setting.side}², batch {setting.batch}", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.xaxis.label.set_size(7)
    named: dict[str, Any] = {}
    for axis in axes.flat:
        for line, name in zip(*axis.get_legend_handles_labels(), strict=True):
            named.setdefault(name, line)
    figure.suptitle(f"{title} ({study.file.kind} chains)", fontsize=10)
    figure.tight_layout()
    figure.legend(named.values(), named, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=7, fontsize=8)
    return figure


def line(axis: Any, method: str, xs: Sequence[float], ys: Sequence[float | None], **more: Any) -> None:
    """Nothing where there is no answer or none that fits."""
    if any(y is not None for y in ys):
        shown = [float("nan") if y is None else y for y in ys]
        axis.plot(xs, shown, STYLES[method], label=more.pop("label", method), markersize=3, linewidth=1, **more)


def times(study: Study, points: Sequence[Point], method: str) -> list[float | None]:
    answers = [study.answer(point, method) for point in points]
    return [None if answer is None else answer.time for answer in answers]


def divided(values: Sequence[float | None], by: Sequence[float]) -> list[float | None]:
    return [None if value is None else value / unit for value, unit in zip(values, by, strict=True)]


def draw_ratios(study: Study, case: Case, axis: Any) -> None:
    points = list(case.limits(LIMITS))
    bounds = [study.bound(point) for point in points]
    for method in OFFLOADING:
        line(axis, method, LIMITS, divided(times(study, points, method), bounds))
    axis.axhline(1.2, color="0.8", linewidth=0.8)
    axis.set(xlabel="from least to peak", ylim=(0.98, HIGHEST))


def images(case: Case, values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else case.setting.batch / value for value in values]


def gib(points: Sequence[Point]) -> list[float]:
    return [point.budget / 2**30 for point in points]


def draw_throughput(study: Study, case: Case, axis: Any) -> None:
    points = list(case.limits(LIMITS))
    for method in (*OFFLOADING, *RECOMPUTING):
        line(axis, method, gib(points), images(case, times(study, points, method)))
    axis.set(xlabel="GiB", ylim=(0, 1.05 * case.setting.batch / case.once))


def draw_links(study: Study, case: Case, axis: Any) -> None:
    for link in FASTER:
        points = [Point(point.setting, point.x, point.budget, link) for point in case.limits(LIMITS)]
        values = images(case, times(study, points, "offload-dynprog"))
        shade = {"alpha": 0.25 + 0.25 * link, "label": f"offload-dynprog, {link:.0f} β"}
        line(axis, "offload-dynprog", gib(points), values, **shade)
    line(axis, "persistent", gib(points), images(case, times(study, points, "persistent")))
    axis.set(xlabel="GiB", ylim=(0, 1.05 * case.setting.batch / case.once))


def draw_alphas(study: Study, case: Case, axis: Any) -> None:
    points = list(case.alphas(ALPHAS))
    for method in CHAPTER_4:
        line(axis, method, ALPHAS, divided(times(study, points, method), [case.once] * len(points)))
    axis.set(xlabel="α", ylim=(0.98, HIGHEST))


def draw_faster(study: Study, case: Case, axis: Any) -> None:
    points = list(case.faster_links(LINKS))
    for method in CHAPTER_4:
        line(axis, method, LINKS, divided(times(study, points, method), [case.once] * len(points)))
    axis.set(xlabel="multiples of the link", ylim=(0.98, HIGHEST))


def moved(study: Study, case: Case, points: Sequence[Point], method: str) -> list[float | None]:
    """The share of all values, saved sets and input, that goes to the host."""
    total = sum(case.saved.value_bytes)
    answers = [study.answer(point, method) for point in points]
    return [None if answer is None or answer.time is None else answer.moved_bytes / total for answer in answers]


def draw_moved_alphas(study: Study, case: Case, axis: Any) -> None:
    _draw_moved(study, case, axis, list(case.alphas(ALPHAS)), "α")


def draw_moved_faster(study: Study, case: Case, axis: Any) -> None:
    _draw_moved(study, case, axis, list(case.faster_links(LINKS)), "multiples of the link")


def _draw_moved(study: Study, case: Case, axis: Any, points: Sequence[Point], xlabel: str) -> None:
    for method in (*BOTH, "offload-dynprog", "offload-best"):
        line(axis, method, [point.x for point in points], moved(study, case, points, method))
    axis.set(xlabel=xlabel, ylim=(0, 1.05))
