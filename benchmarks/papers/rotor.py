"""Fig. 2.4–2.6 and 2.8–2.15 of paper 001: images per second against memory, for ways to recompute, on chains.

    python benchmarks/papers/rotor.py [--networks resnet50 …] [--plot-dir DIR] [--again METHOD …] [--stored]

The ways are the thesis': everything saved (PyTorch), equal segments (sequential), checkpoints as in automatic
differentiation (revolve), the optimum (`persistent`, 500 slots, ten limits), and Checkmate's rounding on chains of up
to 60 stages. All are simulated by the referee, without the weights, on chains that were measured on an H200 or else
are estimated for a V100; every plot says which. `rotor_runs.py` runs four of the networks.

Answers are kept in the results, as those of offloading.py are. What Fig. 2.4 has as running times are seconds of this
machine while nothing else of the script ran.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from answers import Answers, jobs_there, path_there
from chain_files import RESULTS
from rotor_points import CARD_BYTES, CHECKMATE, OPTIMAL, PLAIN, REVOLVE, SEQUENTIAL, Curves, settings_of
from tables import markdown, mean, percent, save
from vision_settings import CHAPTER_2, DENSENETS, RESNETS, Setting

ANSWERS = RESULTS / "paper-001-rotor.json"
STYLES = {PLAIN: "C3s", SEQUENTIAL: "C4x", OPTIMAL: "C0-^", REVOLVE: "C2-o", CHECKMATE: "C1:s"}
WIDE = 4  # times the card: figures in which anything takes so much have logarithmic axes for memory
HEADROOM = 1.08
POWERS = (1, 4, 16, 64, 256)
RESNETS_200 = (*RESNETS, "resnet200")


def main() -> int:
    options = parse()
    answers = Answers.load(options.answers, path_there())
    curves = Curves(answers, settings_of(options.networks))
    if not options.stored:
        curves.ask(options.jobs, options.again)
        if len(curves.settings) == len(CHAPTER_2):
            answers.forget_others()
    print(f"Chains {curves.file.kind}: {curves.file.device}.\n")
    for name, table in tables(curves).items():
        print(f"Fig. {name}\n\n{table}\n")
    if options.plot_dir:
        save_plots(curves, options.plot_dir)
    return 0


def parse() -> argparse.Namespace:
    networks = list(dict.fromkeys(setting.network for setting in CHAPTER_2))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=networks, default=networks, metavar="NAME")
    parser.add_argument("--answers", type=Path, default=ANSWERS, metavar="FILE", help=f"default: {ANSWERS}")
    parser.add_argument("--again", nargs="+", default=[], metavar="METHOD", help="ask these once more")
    parser.add_argument("--stored", action="store_true", help="ask nothing, show what is there")
    parser.add_argument("--jobs", type=int, default=jobs_there(), help="processes (default: one a core)")
    parser.add_argument("--plot-dir", type=Path, metavar="DIR", help="also save plots here")
    return parser.parse_args()


def figures(curves: Curves) -> dict[str, tuple[str, list[Setting]]]:
    """The settings of each figure that has curves, in the order of its panels."""

    def of(networks: Sequence[str], side: int | None = None) -> list[Setting]:
        found = [s for s in curves.settings if s.network in networks and side in (None, s.side)]
        return sorted(found, key=lambda s: (networks.index(s.network), s.side, s.batch))

    made = {
        "2.5": ("ResNet-101, 1000²", of(["resnet101"], 1000)),
        "2.6": ("ResNet-1001, 224²", of(["resnet1001"], 224)),
    }
    sides = (224, 500, 1000)
    made |= {f"2.{8 + k}": (f"ResNet, {side}²", of(RESNETS_200, side)) for k, side in enumerate(sides)}
    made |= {f"2.{11 + k}": (f"DenseNet, {side}²", of(DENSENETS, side)) for k, side in enumerate(sides)}
    made["2.14"] = ("Inception v3", of(["inception_v3"]))
    made["2.15"] = ("ResNet-1001", of(["resnet1001"]))
    return {name: each for name, each in made.items() if each[1]}


# --- tables --------------------------------------------------------------------------------------------------


def tables(curves: Curves) -> dict[str, str]:
    """By the names under which docs/papers.md has them."""
    found = {"2.4": solving_times(curves)}
    found |= {name: throughputs(curves, settings) for name, (_, settings) in figures(curves).items()}
    found["gain"] = gain(curves)
    return found


def solving_times(curves: Curves) -> str:
    longest: dict[int, list[tuple[float, float, float]]] = {}
    for stages, *figures_of in curves.solving():
        longest.setdefault(stages, []).append(tuple(figures_of))
    rows = []
    for stages, found in sorted(longest.items()):
        cells = [max(column) if not math.isnan(column[0]) else math.nan for column in zip(*found, strict=True)]
        shown = [f"{cell:.2f}" if not math.isnan(cell) else "–" for cell in cells[:2]]
        rows.append([stages, *shown, "–" if math.isnan(cells[2]) else percent(cells[2], 2)])
    return markdown(["stages", "persistent, s", "floating, s", "largest difference of their times"], rows)


def throughputs(curves: Curves, settings: Sequence[Setting]) -> str:
    """The plain run, the fastest segments that fit the thesis' card, and the optimum with their memory."""
    rows = []
    for setting in settings:
        runs = list(curves.runs(setting))
        plain = next((run for run in runs if run.how == PLAIN), None)
        if plain is None:
            continue
        row = [f"{setting.network}, {setting.side}², {setting.batch}", f"{plain.peak_bytes / 2**30:.2f}"]
        row.append(f"{plain.images_per_s:.2f}")
        best = curves.gain(setting)
        if best is None:
            row += ["–", "–", "–"]
        else:
            images = setting.batch / (best[0].time or math.nan)
            row += [f"{best[0].peak_bytes / 2**30:.2f}", f"{images:.2f}", f"{images * (1 + best[1]):.2f}"]
        on_card = [run.images_per_s for run in runs if run.how == OPTIMAL and run.peak_bytes <= CARD_BYTES]
        least = min((run.peak_bytes for run in runs if run.how == OPTIMAL), default=None)
        row.append(f"{max(on_card):.2f}" if on_card else "–")
        row.append("–" if least is None else f"{least / 2**30:.2f}")
        rows.append(row)
    header = ["network, image, batch", "plain, GiB", "images/s", "sequential, GiB", "images/s", "optimal there"]
    return markdown([*header, "optimal on the card", "its least here, GiB"], rows)


def gain(curves: Curves) -> str:
    """How much faster the optimum is than the fastest segments, with their memory."""
    groups = {
        "ResNet": RESNETS_200,
        "DenseNet": DENSENETS,
        "Inception v3": ["inception_v3"],
        "ResNet-1001": ["resnet1001"],
    }
    rows, everything = [], []
    for name, networks in groups.items():
        found = [g[1] for s in curves.settings if s.network in networks and (g := curves.gain(s)) is not None]
        everything += found
        rows.append([name, len(found), percent(mean(found), 1), percent(max(found, default=None), 1)])
    rows.append(["all", len(everything), percent(mean(everything), 1), percent(max(everything, default=None), 1)])
    return markdown(["optimal faster than sequential", "settings", "mean", "most"], rows)


# --- plots ---------------------------------------------------------------------------------------------------


def save_plots(curves: Curves, folder: Path) -> None:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.5))
    points = sorted(curves.solving())
    axis.loglog([p[0] for p in points], [p[1] for p in points], "o", label="persistent (Algorithm 3)")
    axis.loglog([p[0] for p in points], [p[2] for p in points], "x", label="floating (Algorithm 1)")
    axis.set(xlabel="stages", ylabel="seconds")
    axis.set_xticks([10, 20, 50, 100, 200, 400], ["10", "20", "50", "100", "200", "400"])
    axis.minorticks_off()
    axis.legend(fontsize=8)
    save(figure, folder / "001-2.4.png")
    for name, (title, settings) in figures(curves).items():
        save(panels(curves, title, settings), folder / f"001-{name}.png")


def panels(curves: Curves, title: str, settings: Sequence[Setting]) -> Any:
    from matplotlib import pyplot

    columns = min(3, len(settings))
    lines = -(-len(settings) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(max(6, 3.4 * columns), 2.7 * lines + 0.6), squeeze=False)
    for axis in axes.flat[len(settings) :]:
        axis.axis("off")
    shown = {setting: list(curves.runs(setting)) for setting in settings}
    wide = max((run.peak_bytes for runs in shown.values() for run in runs), default=0) > WIDE * CARD_BYTES
    for (setting, runs), axis in zip(shown.items(), axes.flat, strict=False):
        for how, style in STYLES.items():
            these = sorted((run.peak_bytes / 2**30, run.images_per_s) for run in runs if run.how == how)
            if these:
                axis.plot(*zip(*these, strict=True), style, label=how, markersize=4, linewidth=1)
        axis.set(
            xlabel="GiB", ylabel="images/s", ylim=(0, HEADROOM * max((run.images_per_s for run in runs), default=1))
        )
        if wide:
            axis.set_xscale("log")
            limits = axis.get_xlim()
            axis.set_xticks(POWERS, list(map(str, POWERS)))
            axis.minorticks_off()
            axis.set_xlim(limits)
        else:
            axis.set_xlim(0, None)
        axis.axvline(CARD_BYTES / 2**30, color="0.8", linewidth=0.8)
        axis.set_title(f"{setting.network}, {setting.side}², batch {setting.batch}", fontsize=8)
        axis.tick_params(labelsize=7)
    handles, names = axes.flat[0].get_legend_handles_labels()
    figure.suptitle(f"{title} ({curves.file.kind} chains; grey: 15.75 GiB)", fontsize=10)
    figure.tight_layout()
    figure.legend(handles, names, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=5, fontsize=8)
    return figure


if __name__ == "__main__":
    sys.exit(main())
