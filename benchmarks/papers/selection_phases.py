"""Fig. 5–9 of paper 003: memory at the end of every layer's forward and backward, predicted and measured.

    python benchmarks/papers/selection_phases.py [--measure] [--plot-dir DIR]

What was measured on an H200 is stored in the results by `checkpoint_selection.py --measure`, but for the AlexNet
whose max-pools belong to its convolutions (Fig. 8), which `--measure` here takes steps of on a CUDA device and
stores; that is a matter of seconds. The paper's figures are pictures; what their text says is in docs/papers.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chain_files import RESULTS
from selection_measuring import measure
from selection_networks import ALEXNET, PLAIN_ALEXNET, VGG, Network
from selection_rows import FIGURE_5, WEIGHT_COPIES, Row, Setting, equation_trace, found, layer_trace, rows_of
from selection_rows import SETTINGS as ALL_SETTINGS
from tables import markdown, mean, percent, save

STORED = RESULTS / "paper-003-h200.json"
STORED_PLAIN = RESULTS / "paper-003-plain-alexnet.json"
BATCH = 128
PAPER_PLAIN_SET = (3, 4, 5, 9, 11, 12)  # section 5.6.1
PAPER_ERROR = 0.028  # section 5.2, the mean over the phases
MIB = 2**20
NOT_YET = "not yet measured"


@dataclass(frozen=True)
class Curve:
    """Memory over the phases for one set of checkpoints; `measured` is None if it has not been."""

    name: str
    network: Network
    checkpoints: tuple[int, ...]
    measured: dict[str, Any] | None

    @property
    def predicted(self) -> list[int]:
        """By Eq. 12."""
        return self._above_base(equation_trace(self.network.sizes(BATCH), self.checkpoints))

    @property
    def by_layer(self) -> list[int]:
        """What each layer keeps, counted by itself, as checkpoint_selection.py explains."""
        sizes, saved = self.network.sizes(BATCH), self.network.saved(BATCH)
        return self._above_base(layer_trace(sizes, saved, self.checkpoints))

    def _above_base(self, trace: Sequence[int]) -> list[int]:
        """On what was there before the step, or on three times the weights."""
        weights = WEIGHT_COPIES * self.network.weight_bytes()
        base = self.measured["base_bytes"] if self.measured else weights
        return [base + held for held in trace]

    def error(self, predicted: Sequence[int]) -> float | None:
        """The mean over the phases of how far off a prediction is."""
        if not self.measured:
            return None
        pairs = zip(predicted, self.measured["trace_bytes"], strict=True)
        return mean([abs(ours - there) / there for ours, there in pairs])


def main() -> int:
    options = parse()
    if options.measure:
        import torch

        if not torch.cuda.is_available():
            print("selection_phases: --measure needs a CUDA device, and there is none here", file=sys.stderr)
            return 2
        rows = plain_rows()
        for row in rows:
            measure(row, 5)
        options.plain.write_text(json.dumps({"rows": [row.to_json() for row in rows]}) + "\n")
    curves = figures(options.plain)
    print(table(curves))
    if options.plot_dir:
        save_plots(curves, options.plot_dir)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="take the steps of Fig. 8 on a CUDA device")
    parser.add_argument("--plain", type=Path, default=STORED_PLAIN, metavar="FILE", help=f"default: {STORED_PLAIN}")
    parser.add_argument("--plot-dir", type=Path, metavar="DIR", help="also save plots here")
    return parser.parse_args()


def plain_rows() -> list[Row]:
    """The AlexNet of Fig. 8: the paper's set and what `least-peak` finds."""
    setting = Setting(PLAIN_ALEXNET, BATCH, (), ())
    rows = [Row(setting, "Algorithm 6", "the paper's", PAPER_PLAIN_SET)]
    ours = found(PLAIN_ALEXNET, "least-peak")
    return rows if ours == PAPER_PLAIN_SET else [*rows, Row(setting, None, "least-peak", ours)]


def figures(plain: Path = STORED_PLAIN) -> dict[str, list[Curve]]:
    stored = [row for path in (STORED, plain) if path.exists() for row in json.loads(path.read_text())["rows"]]

    def curve(name: str, network: Network, checkpoints: Sequence[int]) -> Curve:
        for row in stored:
            if (row["network"], row["batch"], row["checkpoints"]) == (network.name, BATCH, list(checkpoints)):
                return Curve(name, network, tuple(checkpoints), row["measured"] or None)
        return Curve(name, network, tuple(checkpoints), None)

    ours = curve("Algorithm 6", VGG, (2, 4, 6, 9, 11, 14, 16, 19, 21, 23, 24))
    small = [setting for setting in ALL_SETTINGS if setting.network is ALEXNET and setting.batch == BATCH]
    best = next(row for row in rows_of(small[0]) if row.column == "Algorithm 6")
    return {
        "5": [curve("section 5.2's set", VGG, FIGURE_5)],
        "6": [ours, curve("O(√n)", VGG, (5, 10, 15, 20, 24))],
        "7": [ours, curve("ACG solver", VGG, (3, 6, 24))],
        "8": [curve(row.how, PLAIN_ALEXNET, row.checkpoints) for row in plain_rows()],
        "9": [curve("Algorithm 6", ALEXNET, best.checkpoints)],
    }


def table(curves: dict[str, list[Curve]]) -> str:
    """Peaks at the phases in which the paper looks, and the true ones, which lie between phases."""
    rows = []
    for number, these in curves.items():
        for each in these:
            row = [f"Fig. {number}", each.network.name, each.name, "{" + ", ".join(map(str, each.checkpoints)) + "}"]
            row.append(f"{max(each.predicted) / MIB:,.0f}")
            if each.measured:
                row += [
                    f"{max(each.measured['trace_bytes']) / MIB:,.0f}",
                    f"{each.measured['peak_bytes'] / MIB:,.0f}",
                ]
            else:
                row += [NOT_YET, "–"]
            rows.append([*row, percent(each.error(each.predicted), 1), percent(each.error(each.by_layer), 1)])
    header = ["figure", "network", "set of", "checkpoints", "Eq. 12, MiB", "measured at the phases", "true peak"]
    return markdown([*header, "mean error of Eq. 12", "counted by layer"], rows)


def save_plots(curves: dict[str, list[Curve]], folder: Path) -> None:
    from matplotlib import pyplot

    for number, these in curves.items():
        figure, axis = pyplot.subplots(figsize=(7, 3.2))
        for k, each in enumerate(these):
            axis.plot([held / MIB for held in each.predicted], f"C{k}:", label=f"{each.name}, Eq. 12")
            if each.measured:
                measured = [held / MIB for held in each.measured["trace_bytes"]]
                axis.plot(measured, f"C{k}", label=f"{each.name}, measured")
        last = these[-1]
        n = len(last.network.layers)
        axis.set_xticks([*last.checkpoints, *(2 * n + 1 - k for k in last.checkpoints)])
        axis.tick_params(axis="x", labelsize=6, rotation=90)
        axis.set(xlabel="phase", ylabel="MiB", ylim=(0, None))
        axis.set_title(f"{last.network.name}, batch {BATCH}, H200", fontsize=9)
        axis.legend(fontsize=7)
        save(figure, folder / f"003-{number}.png")


if __name__ == "__main__":
    sys.exit(main())
