"""Tables 2 and 3 of paper 003 again: peaks and times of checkpoints on VGG-19 and AlexNet, its figures beside ours.

    python benchmarks/papers/checkpoint_selection.py [--table 2 3] [--plot-dir DIR] [--json FILE]
    python benchmarks/papers/checkpoint_selection.py --measure [--networks AlexNet] [--batches 128] [--plot-dir DIR]

Sizes come from the shapes of the layers, in float32. The bytes of data are predicted in two ways:

- Eq. 12 is the paper's model, which `least-peak` minimizes: the checkpoints so far, the segment, and one buffer for
  gradients.
- by layer is what should be allocated when a layer's backward has ended, the only moments at which the paper looks:
  the checkpoints before the segment, what the segment's earlier layers saved (with the indices of max-pools, 8 bytes
  a value, and the masks of dropouts), and the gradients of the layer's input and output.

The paper's figures include weights. They are explained by the data and three times the weights: the weights
themselves, their gradients and a momentum. `--measure` takes real steps on a CUDA device, looks at the same moments,
and says how far off each prediction is.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from selection_measuring import measure
from selection_networks import ALEXNET, VGG
from selection_plots import save_plots
from selection_rows import SETTINGS, Setting, rows_of
from selection_tables import show_peaks, show_search_times, show_times, show_traces


def main() -> int:
    options = parse()
    if options.measure:
        import torch

        if not torch.cuda.is_available():
            print("checkpoint_selection: --measure needs a CUDA device, and there is none here", file=sys.stderr)
            return 2
    rows = [row for setting in SETTINGS if chosen(setting, options) for row in rows_of(setting)]
    if options.measure:
        for row in rows:
            measure(row, options.reps)
    if 2 in options.table:
        show_peaks(rows)
    if 3 in options.table:
        show_times(rows)
        show_search_times()
    show_traces(rows)
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": [row.to_json() for row in rows]}, indent=1) + "\n")
    if options.plot_dir is not None:
        save_plots(rows, options.plot_dir)
    return 0


def parse() -> argparse.Namespace:
    names = [network.name for network in (VGG, ALEXNET)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", nargs="+", type=int, choices=(2, 3), default=[2, 3], help="which of the tables")
    parser.add_argument("--networks", nargs="+", choices=names, default=names, help="only these")
    parser.add_argument("--batches", nargs="+", type=int, metavar="N", help="only these of the paper's batches")
    parser.add_argument(
        "--measure", action="store_true", help="also take real steps; needs PyTorch and a CUDA device"
    )
    parser.add_argument("--reps", type=int, default=5, help="timed steps of each row that is measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all rows here")
    parser.add_argument("--plot-dir", type=Path, metavar="DIR", help="also save plots here")
    options = parser.parse_args()
    if options.reps < 1:
        parser.error("--reps: must be at least 1")
    if not any(chosen(setting, options) for setting in SETTINGS):
        parser.error("--batches: none is in the paper: 128 to 400 for VGG-19, 128 and 4096 for AlexNet")
    return options


def chosen(setting: Setting, options: argparse.Namespace) -> bool:
    return setting.network.name in options.networks and (not options.batches or setting.batch in options.batches)


if __name__ == "__main__":
    sys.exit(main())
