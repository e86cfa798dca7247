"""Tables 2 and 3 of paper 003 again: the peaks and times of checkpoints on VGG-19 and AlexNet, its figures beside ours.

    python benchmarks/papers/checkpoint_selection.py [--table 2 3] [--plot-dir DIR] [--json FILE]
    python benchmarks/papers/checkpoint_selection.py --measure [--networks AlexNet] [--batches 128] [--plot-dir DIR]

Sizes come from the shapes of the layers, in float32. Two predictions of the bytes of data:

- Eq. 12: the paper's model, which `least-peak` minimizes. The checkpoints so far, the segment, one gradient buffer.
- by layer: what should be allocated when a layer's backward has ended, the only moments at which the paper looks.
  The checkpoints before the segment, its values up to the layer's input, the gradients of the layer's input and
  output, and what the layers before it saved besides: indices of max-pools (8 bytes a value), masks of dropouts.

The paper's figures include weights; data and three times the weights (their gradients and a momentum) explain them.
`--measure` takes real steps on a CUDA device, looks at the same moments, and says how far off each prediction is.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elbowroom.networks import Machine
from elbowroom.problem import Chain, Graph, Node, Stage
from elbowroom.schedule import Forward
from elbowroom.solve import METHODS, Options, solve

if TYPE_CHECKING:
    from torch import Tensor, nn

MIB = 2**20
VALUE_BYTES, INDEX_BYTES, MASK_BYTES = 4, 8, 1
SIDE = 224
WEIGHT_COPIES = 3  # weights, gradients, a momentum: not said in the paper, but its figures fit
CARD_MIB = 24 * 1024
CARD = Machine(35.6e12, 936e9, "RTX 3090")  # the paper's card: float32 operations and bytes a second, by its maker
OOM = math.inf
LINEAR, CUBIC, ACG, ROOT, PLAIN = "Algorithm 6", "Algorithm 3", "ACG solver", "O(√n)", "PyTorch"
COLUMNS = (LINEAR, CUBIC, ACG, ROOT, PLAIN)
METHOD_OF = {LINEAR: "least-peak", CUBIC: "checkpoint-sum", ACG: "acg", ROOT: "sqrt", PLAIN: "store-all"}


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
    parser.add_argument("--measure", action="store_true", help="also take real steps; needs PyTorch and a CUDA device")
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


# --- the two networks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """`channels` is 0 where they stay as they are. A convolution and, if said, a linear layer end with a ReLU."""

    kind: str
    channels: int = 0
    window: int = 1
    stride: int = 1
    padding: int = 0
    relu: bool = False

    def output(self, channels: int, side: int) -> tuple[int, int]:
        if self.kind in ("linear", "flatten"):
            return self.channels or channels * side * side, 1
        return self.channels or channels, (side + 2 * self.padding - self.window) // self.stride + 1

    def weights(self, channels: int, side: int) -> int:
        """How many, with the biases."""
        if self.kind not in ("convolution", "linear"):
            return 0
        into = channels * (side * side if self.kind == "linear" else self.window**2)
        return (into + 1) * self.channels

    def module(self, channels: int, side: int) -> nn.Module:
        from torch import nn

        if self.kind == "max-pool":
            return nn.MaxPool2d(self.window, self.stride)
        if self.kind == "average-pool":
            return nn.AdaptiveAvgPool2d(side)
        if self.kind in ("flatten", "dropout"):
            return nn.Flatten() if self.kind == "flatten" else nn.Dropout()
        if self.kind == "convolution":
            product: nn.Module = nn.Conv2d(channels, self.channels, self.window, self.stride, self.padding)
        else:
            product = nn.Linear(channels * side * side, self.channels)
        flat = [nn.Flatten()] if self.kind == "linear" and side > 1 else []  # a view
        return nn.Sequential(*flat, product, *([nn.ReLU(inplace=True)] if self.relu else []))


@dataclass(frozen=True)
class Network:
    """`layers` are numbered from 1; value 0 is the images."""

    name: str
    layers: tuple[Layer, ...]

    def shapes(self) -> list[tuple[int, int]]:
        """Channels and side of each value."""
        shapes = [(3, SIDE)]
        for layer in self.layers:
            shapes.append(layer.output(*shapes[-1]))
        return shapes

    def sizes(self, batch: int) -> list[int]:
        return [batch * VALUE_BYTES * channels * side * side for channels, side in self.shapes()]

    def besides(self, batch: int) -> list[int]:
        """What each layer saves for its backward other than its input and output; nothing for the images."""
        each = {"max-pool": INDEX_BYTES, "dropout": MASK_BYTES}
        sizes = self.sizes(batch)[1:]
        return [0, *(size // VALUE_BYTES * each.get(x.kind, 0) for x, size in zip(self.layers, sizes, strict=True))]

    def weight_bytes(self) -> int:
        return VALUE_BYTES * sum(self._weights())

    def _weights(self) -> list[int]:
        return [layer.weights(*shape) for layer, shape in zip(self.layers, self.shapes(), strict=False)]

    def chain(self, batch: int) -> Chain:
        """Sizes as in the paper; times are estimates for its card. The images need no gradient."""
        sizes, stages = self.sizes(batch), []
        for i, (layer, weights) in enumerate(zip(self.layers, self._weights(), strict=True), start=1):
            side = self.shapes()[i][1]
            flops = 2 * batch * weights * side * side
            forward = CARD.seconds(flops, sizes[i - 1] + sizes[i] + VALUE_BYTES * weights)
            backward = 2 * forward if weights and i > 1 else forward
            stages.append(Stage(f"{i} {layer.kind}", forward, backward, sizes[i], sizes[i], sizes[i]))
        return Chain(sizes[0], sizes[0], tuple(stages))

    def graph(self, batch: int) -> Graph:
        """The same with the images as node 0."""
        sizes = self.sizes(batch)
        times = [0.0, *(stage.forward_time for stage in self.chain(batch).stages)]
        nodes = (Node(str(i), seconds, size) for i, (seconds, size) in enumerate(zip(times, sizes, strict=True)))
        return Graph(tuple(nodes), tuple(pairwise(range(len(sizes)))))


def conv(channels: int, window: int = 3, stride: int = 1, padding: int = 1) -> Layer:
    return Layer("convolution", channels, window, stride, padding, relu=True)


def pool(window: int) -> Layer:
    return Layer("max-pool", window=window, stride=2)


def linear(channels: int, relu: bool = True) -> Layer:
    return Layer("linear", channels, relu=relu)


LEVELS = ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))
VGG = Network(
    "VGG-19",
    (
        *(layer for count, channels in LEVELS for layer in (*(conv(channels),) * count, pool(2))),
        *(linear(4096), linear(4096), linear(1000, relu=False)),
    ),
)
ALEXNET = Network(  # with the widths of torchvision; max-pools apart, as in the paper's section 5.6.2
    "AlexNet",
    (
        *(conv(64, 11, 4, 2), pool(3), conv(192, 5, 1, 2), pool(3), conv(384), conv(256), conv(256), pool(3)),
        *(Layer("average-pool"), Layer("flatten"), Layer("dropout"), linear(4096), Layer("dropout"), linear(4096)),
        linear(1000, relu=False),
    ),
)


# --- what the paper has --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One line of the two tables, in the order of `COLUMNS`."""

    network: Network
    batch: int
    mib: tuple[float, ...]
    seconds: tuple[float, ...]


SETTINGS = (
    Setting(VGG, 128, (6444, 6835, 6836, 8404, 11262), (0.779, 0.779, 0.779, 0.780, 0.585)),
    Setting(VGG, 256, (11220, 12004, 12004, 15139, 20850), (1.541, 1.540, 1.540, 1.541, 1.158)),
    Setting(VGG, 320, (13609, 14592, 14592, 18511, OOM), (1.921, 1.920, 1.920, 1.922, OOM)),
    Setting(VGG, 384, (15997, 17177, 17177, OOM, OOM), (2.292, 2.289, 2.289, OOM, OOM)),
    Setting(VGG, 400, (16594, 17824, 17824, OOM, OOM), (2.849, 2.335, 2.335, OOM, OOM)),
    Setting(ALEXNET, 128, (1002, 1003, 1003, 1106, 1174), (0.046, 0.046, 0.046, 0.046, 0.038)),
    Setting(ALEXNET, 4096, (9866, 9866, 9866, 13182, 15275), (1.206, 1.206, 1.206, 1.216, 1.058)),
)
PAPER_SETS = {
    VGG: ((2, 4, 6, 9, 11, 14, 16, 19, 21, 23, 24), (3, 6, 24), (3, 6, 24), (5, 10, 15, 20, 24), ()),
    ALEXNET: ((2, 4, 6, 8, 12, 14, 15), (2, 4, 12, 15), (2, 4, 12, 15), (4, 8, 12, 15), ()),
}
FIGURE_5 = (3, 11, 24)  # section 5.2's set for VGG-19, with its error of the prediction
FIGURE_5_ERROR = 0.028
SEARCH_MS = {CUBIC: 20.0, LINEAR: 1.1}  # section 5.7, VGG-19


# --- the rows ------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One set of checkpoints. `checkpoints` ends with the last layer; empty means that nothing is checkpointed."""

    setting: Setting
    column: str | None  # of the paper
    how: str
    checkpoints: tuple[int, ...]
    paper_mib: float | None = None
    paper_s: float | None = None
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        return self.setting.network.sizes(self.setting.batch)

    @property
    def equation_bytes(self) -> int:
        return max(equation_trace(self.sizes, self.checkpoints))

    @property
    def by_layer_bytes(self) -> int:
        return max(layer_trace(self.sizes, self.setting.network.besides(self.setting.batch), self.checkpoints))

    @property
    def total_bytes(self) -> int:
        return self.equation_bytes + WEIGHT_COPIES * self.setting.network.weight_bytes()

    def slowdown(self, *, last_twice: bool) -> float:
        """Estimated, against running everything once. PyTorch's `checkpoint` runs the last segment twice, too."""
        stages = self.setting.network.chain(self.setting.batch).stages
        again = stages if last_twice else stages[: self.checkpoints[-2] if len(self.checkpoints) > 1 else 0]
        once = sum(stage.forward_time + stage.backward_time for stage in stages)
        return 1 + sum(stage.forward_time for stage in again) / once if self.checkpoints else 1.0

    def to_json(self) -> dict[str, Any]:
        mine = {name: value for name, value in asdict(self).items() if name != "setting"}
        mine |= {name: "OOM" for name in ("paper_mib", "paper_s") if mine[name] == OOM}
        computed = ("equation_bytes", "by_layer_bytes", "total_bytes")
        return {
            "network": self.setting.network.name,
            "batch": self.setting.batch,
            **mine,
            **{name: getattr(self, name) for name in computed},
            "slowdown": self.slowdown(last_twice=True),
            "slowdown_last_once": self.slowdown(last_twice=False),
        }


def rows_of(setting: Setting) -> Iterator[Row]:
    """The paper's sets, each named after the method of ours that finds it, and ours where they differ."""
    network = setting.network
    paper_sets = dict(zip(COLUMNS, PAPER_SETS[network], strict=True))
    for column, mib, seconds in zip(COLUMNS, setting.mib, setting.seconds, strict=True):
        ours, paper = found(network, METHOD_OF[column]), paper_sets[column]
        same = ours == paper
        yield Row(setting, column, METHOD_OF[column] if same else "the paper's", paper, mib, seconds)
        if not same:
            yield Row(setting, None, METHOD_OF[column], ours)
    yield Row(setting, None, "sequential, least", found(network, "sequential"))
    if network is VGG:
        yield Row(setting, None, "the paper's Fig. 5", FIGURE_5)


@cache
def found(network: Network, method: str) -> tuple[int, ...]:
    """A method's checkpoints. They are the same for every batch, by which all sizes are multiplied."""
    if method == "store-all":
        return ()
    if method == "acg":
        parts = solve(network.graph(128), solver=method).notes["lower_sets"]
        return tuple(end for end in map(max, parts) if end > 0)
    chain = network.chain(128)
    budget = METHODS[method].least_budget(chain, Options()) if METHODS[method].needs_budget else None
    schedule = solve(chain, budget, method).schedule
    kept = [step.at for step in schedule if isinstance(step, Forward) and step.save == "input"]
    last = next(step.at for step in schedule if isinstance(step, Forward) and step.save == "all")
    return (*(start - 1 for start in [*kept, last] if start > 1), len(chain))


def equation_trace(sizes: Sequence[int], checkpoints: Sequence[int]) -> list[int]:
    """Bytes of data in each of the paper's phases: before, n forwards, n backwards, after (Eq. 9 and 10)."""
    n = len(sizes) - 1
    ends = checkpoints or [n]
    kept = range(n + 1) if not checkpoints else {0, *checkpoints}
    trace = [sizes[0]]
    for i in range(1, n + 1):
        trace.append(sum(sizes[k] for k in kept if k < i) + sizes[i])
    backwards = {}
    for h, end in pairwise([0, *ends]):
        before = sum(sizes[k] for k in {0, *ends} if k <= h)
        for i in range(end, h, -1):
            backwards[i] = before + sum(sizes[h + 1 : i + 1]) + max(sizes[h:end])
    return [*trace, *(backwards[i] for i in range(n, 0, -1)), sizes[0]]


def layer_trace(sizes: Sequence[int], besides: Sequence[int], checkpoints: Sequence[int]) -> list[int]:
    """The same phases, by layer (see above)."""
    n = len(sizes) - 1
    trace = equation_trace(sizes, checkpoints)[: n + 1]
    if not checkpoints:
        trace = [held + sum(besides[: i + 1]) for i, held in enumerate(trace)]
    backwards = {}
    for h, end in pairwise([0, *(checkpoints or [n])]):
        before = sum(sizes[k] for k in {0, *checkpoints} if k <= h)
        for i in range(end, h, -1):
            gradients = sizes[i] + (sizes[i - 1] if i > 1 else 0)
            backwards[i] = before + sum(sizes[h + 1 : i]) + sum(besides[h + 1 : i]) + gradients
    return [*trace, *(backwards[i] for i in range(n, 0, -1)), sizes[0]]
