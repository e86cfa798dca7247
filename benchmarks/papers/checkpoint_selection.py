"""Tables 2 and 3 of paper 003 again: peaks and times of checkpoints on VGG-19 and AlexNet, its figures beside ours.

    python benchmarks/papers/checkpoint_selection.py [--table 2 3] [--plot-dir DIR] [--json FILE]
    python benchmarks/papers/checkpoint_selection.py --measure [--networks AlexNet] [--batches 128] [--plot-dir DIR]

Sizes come from the shapes of the layers, in float32. Two predictions of the bytes of data:

- Eq. 12: the paper's model, which `least-peak` minimizes. The checkpoints so far, the segment, one gradient buffer.
- by layer: what should be allocated when a layer's backward has ended, the only moments at which the paper looks.
  The checkpoints before the segment, what the segment's earlier layers saved (with the indices of max-pools, 8 bytes
  a value, and the masks of dropouts), and the gradients of the layer's input and output.

The paper's figures include weights; data and three times the weights (their gradients and a momentum) explain them.
`--measure` takes real steps on a CUDA device, looks at the same moments, and says how far off each prediction is.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elbowroom.problem.networks import Machine
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

    @property
    def reads_input(self) -> bool:
        """Whether the backward does."""
        return self.kind in ("convolution", "max-pool", "average-pool", "linear")

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

    def saved(self, batch: int) -> list[tuple[int, int]]:
        """For each value what its own layer keeps for the backward, and what is kept with the layer that reads it."""
        besides = {"max-pool": INDEX_BYTES, "dropout": MASK_BYTES}
        saved = []
        for size, layer, reader in zip(self.sizes(batch), (None, *self.layers), (*self.layers, None), strict=True):
            is_kept, is_read = layer is not None and layer.relu, reader is not None and reader.reads_input
            more = size // VALUE_BYTES * besides.get(layer.kind, 0) if layer else 0
            saved.append((is_kept * size + more, (is_kept or is_read) * size + more))
        return saved

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
        """Layer i is node i - 1. The images are left out: they are kept anyway, and are nobody's choice."""
        stages = self.chain(batch).stages
        nodes = tuple(Node(stage.name, stage.forward_time, stage.output_bytes) for stage in stages)
        return Graph(nodes, tuple(pairwise(range(len(nodes)))))


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
        return max(layer_trace(self.sizes, self.setting.network.saved(self.setting.batch), self.checkpoints))

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
        return tuple(max(part) + 1 for part in parts)
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


def layer_trace(sizes: Sequence[int], saved: Sequence[tuple[int, int]], checkpoints: Sequence[int]) -> list[int]:
    """The same phases, by layer (see above). When a layer has ended, its input is still there in the forward; in the
    backward only if the layer before saved it, too."""
    n = len(sizes) - 1
    kept = {0, *checkpoints}
    own, all_kept = zip(*saved, strict=True)
    trace = [sizes[0]]
    for i in range(1, n + 1):
        before = sum(sizes[k] for k in kept | {i - 1} if k < i) if checkpoints else sum(all_kept[:i])
        trace.append(before + (sizes[i] if checkpoints else max(sizes[i], all_kept[i])))
    backwards = {}
    for h, end in pairwise([0, *(checkpoints or [n])]):
        before = sum(sizes[k] for k in kept if k < h)
        for i in range(end, h, -1):
            inside = sum(all_kept[h + 1 : i - 1]) + own[i - 1] + sizes[h] if i > h + 1 else sizes[0] * (h == 0)
            gradients = sizes[i] + sizes[i - 1] if i > 1 else 0  # the images need none, and the last one goes
            backwards[i] = before + inside + gradients
    return [*trace, *(backwards[i] for i in range(n, 0, -1)), sizes[0]]


# --- measuring -----------------------------------------------------------------------------------------------


def measure(row: Row, reps: int) -> None:
    """What a row takes on the CUDA device: memory in each phase of a step, its true peak, seconds."""
    import torch

    print(f"measuring {row.setting.network.name}, batch {row.setting.batch}, {row.how}", file=sys.stderr, flush=True)
    try:
        row.measured = measured(row, reps)
    except torch.cuda.OutOfMemoryError:
        row.measured = {"error": "OOM"}
    gc.collect()
    torch.cuda.empty_cache()


def measured(row: Row, reps: int) -> dict[str, Any]:
    import torch

    modules, step, train = training(row, "cuda")
    train()  # from here on there are gradients, a momentum and workspaces
    base = torch.cuda.memory_allocated() - row.sizes[0]
    torch.cuda.reset_peak_memory_stats()
    trace = sampled(modules, step, torch.cuda.memory_allocated)
    peak = torch.cuda.max_memory_allocated()
    train()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(reps):
        train()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / reps
    return {"base_bytes": base, "trace_bytes": trace, "peak_bytes": peak, "seconds": seconds}


def training(row: Row, device: str) -> tuple[list[nn.Module], Callable[..., None], Callable[[], None]]:
    """The layers, a function that goes forward and backward, and one that also updates the weights."""
    import torch
    from torch.nn.functional import cross_entropy

    network, batch = row.setting.network, row.setting.batch
    with torch.device(device):
        pairs = zip(network.layers, network.shapes(), strict=False)
        modules = [layer.module(*shape) for layer, shape in pairs]
        images, labels = torch.randn(batch, 3, SIDE, SIDE), torch.randint(1000, (batch,))
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-6, momentum=0.9)

    def step(between: Callable[[], None] = lambda: None) -> None:
        optimizer.zero_grad(set_to_none=False)
        loss = cross_entropy(forward(modules, images, row.checkpoints), labels)
        between()
        loss.backward()

    def train() -> None:
        step()
        optimizer.step()

    return modules, step, train


def forward(modules: Sequence[nn.Module], x: Tensor, checkpoints: Sequence[int]) -> Tensor:
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    if not checkpoints:
        return nn.Sequential(*modules)(x)
    for h, i in pairwise([0, *checkpoints]):
        x = checkpoint(nn.Sequential(*modules[h:i]), x, use_reentrant=False)
    return x


def sampled(modules: Sequence[nn.Module], step: Callable[..., None], allocated: Callable[[], int]) -> list[int]:
    """Bytes before a step, after each layer's forward, after each layer's backward, and after the step."""
    forwards, backwards = [allocated()], []
    samples = [forwards]

    def after_forward(*_: Any) -> None:
        if samples[0] is forwards:  # not when it runs again
            forwards.append(allocated())

    def after_backward(*_: Any) -> None:
        backwards.append(allocated())

    # The first layer has no gradient of its input after which a hook could come; its weights have one.
    weight = next(modules[0].parameters())
    hooks = [module.register_forward_hook(after_forward) for module in modules]
    hooks += [module.register_full_backward_hook(after_backward) for module in modules[1:]]
    hooks.append(weight.register_post_accumulate_grad_hook(after_backward))
    step(lambda: samples.__setitem__(0, backwards))
    for hook in hooks:
        hook.remove()
    return [*forwards, *backwards, allocated()]


# --- showing -------------------------------------------------------------------------------------------------


def show_peaks(rows: Sequence[Row]) -> None:
    print("Table 2: peaks in MiB. `more`: than in the first row of the batch.\n")
    heads = ("column", "set", "Eq. 12", "more", "by layer", "more", "+ weights", "paper", "more", "paper - Eq. 12")
    for setting, group in grouped(rows):
        weights = mib(setting.network.weight_bytes())
        print(f"{title(setting)}; {WEIGHT_COPIES} × {weights:,.1f} MiB of weights: {WEIGHT_COPIES * weights:,.1f}")
        show([heads, *(peak_cells(row, group[0]) for row in group)])
    show_sets(rows)
    for remark in peak_remarks(rows):
        print(textwrap.fill(remark, 118, subsequent_indent="  "))
    print()


def peak_cells(row: Row, first: Row) -> tuple[str, ...]:
    known = is_known(row.paper_mib)
    return (
        row.column or "",
        row.how,
        f"{mib(row.equation_bytes):,.1f}",
        f"{mib(row.equation_bytes - first.equation_bytes):+,.1f}",
        f"{mib(row.by_layer_bytes):,.1f}",
        f"{mib(row.by_layer_bytes - first.by_layer_bytes):+,.1f}",
        f"{mib(row.total_bytes):,.0f}",
        as_paper(row.paper_mib, ",.0f"),
        f"{row.paper_mib - first.paper_mib:+,.0f}" if known else "",
        f"{row.paper_mib - mib(row.equation_bytes):,.0f}" if known else "",
    )


def show_sets(rows: Sequence[Row]) -> None:
    for network in networks_of(rows):
        print(f"Checkpoints of {network.name}, for every batch:")
        for column, paper in zip(COLUMNS[:-1], PAPER_SETS[network][:-1], strict=True):
            ours = found(network, METHOD_OF[column])
            same = "as in the paper" if ours == paper else f"in the paper {as_set(paper)}"
            print(f"  {METHOD_OF[column]:21} {as_set(ours)}, {same}")
        for method in ("least-peak-quadratic", "sequential"):
            print(f"  {method:21} {as_set(found(network, method))}")
    print()


def peak_remarks(rows: Sequence[Row]) -> Iterator[str]:
    for network in networks_of(rows):
        groups = [group for setting, group in grouped(rows) if setting.network is network]
        pairs = [(row, group[0]) for group in groups for row in group[1:] if is_known(row.paper_mib)]
        for how, attribute in (("Eq. 12", "equation_bytes"), ("by layer", "by_layer_bytes")):
            off = [
                (mib(getattr(row, attribute) - getattr(first, attribute)) - row.paper_mib + first.paper_mib, row)
                for row, first in pairs
            ]
            for plain in (False, True):
                miss, row = max(((m, r) for m, r in off if (r.column == PLAIN) == plain), key=lambda x: abs(x[0]))
                what = "without checkpoints" if plain else "between sets"
                yield (
                    f"{network.name}, {how}: the difference {what} is at most {abs(miss):,.1f} MiB off the paper's, "
                    f"{abs(miss) / row.paper_mib:.2%} of its peak (batch {row.setting.batch})."
                )
        kept = sum(is_ordered(group) for group in groups)
        yield f"{network.name}: the columns are in the paper's order by layer in {kept} of {len(groups)} batches."
        rest = [group[0].paper_mib - mib(group[0].total_bytes) for group in groups]
        yield (
            f"{network.name}: the paper's {LINEAR} needs {min(rest):,.1f} to {max(rest):,.1f} MiB besides data "
            f"(Eq. 12) and {WEIGHT_COPIES} × the weights."
        )
        yield from network_remarks(network)
    unexplained = [row for row in rows if row.paper_mib == OOM and mib(row.total_bytes) < CARD_MIB]
    if unexplained:
        names = ", ".join(f"{title(row.setting)}, {row.column} ({mib(row.total_bytes):,.0f})" for row in unexplained)
        yield (
            f"Out of memory in the paper, though predicted to fit its 24 GiB: {names}. Between the moments at which "
            "it looks more is allocated: a layer's other gradients, workspaces, unusable gaps."
        )
    yield (
        "The paper does not name its optimizer or the pieces of the constant part; three times the weights is read "
        "off its figures."
    )


def is_ordered(group: Sequence[Row]) -> bool:
    """Whether no two columns are the other way round; the paper's differences of 1 MiB are taken for noise."""
    known = [row for row in group if is_known(row.paper_mib)]
    return all(a.by_layer_bytes < b.by_layer_bytes for a in known for b in known if a.paper_mib + 1 < b.paper_mib)


def network_remarks(network: Network) -> Iterator[str]:
    sizes, name = network.sizes(128), network.name
    for column, paper in zip(COLUMNS[:-1], PAPER_SETS[network][:-1], strict=True):
        ours, method = found(network, METHOD_OF[column]), METHOD_OF[column]
        if ours != paper and column != ROOT:
            a, b = (max(equation_trace(sizes, checkpoints)) for checkpoints in (ours, paper))
            how = "the same" if a == b else "another"
            yield f"{name}: {method} chooses other checkpoints than {column}, with {how} peak by Eq. 12."
    yield (
        f"{name}: for {ROOT} the paper makes segments of round(√n) layers; our `sqrt` makes round(√n) segments and "
        "gives the last one what is left."
    )
    if network is VGG:
        peak = mib(max(equation_trace(sizes, FIGURE_5)))
        yield (
            f"VGG-19: section 5.2 calls {as_set(FIGURE_5)} its algorithm's answer; by Eq. 12 that needs {peak:,.1f} "
            f"MiB, as much as {as_set(PAPER_SETS[VGG][1])} and more than Table 2's."
        )
        return
    growth = (9866 - 1002) / (4096 / 128 - 1)
    ours = mib(max(equation_trace(sizes, PAPER_SETS[ALEXNET][0])))
    yield (
        f"AlexNet: section 5.6 has 103 and 26 MiB for the first convolution and its max-pool; torchvision's layers "
        f"have {mib(sizes[1]):.1f} and {mib(sizes[2]):.1f}, and Table 2 fits these: from batch 128 to 4096 its "
        f"{LINEAR} grows by {growth:.1f} MiB for each 128 images, ours by {ours:.1f}."
    )
    yield (
        f"AlexNet: Eq. 12 has {ROOT} too low, because it does not know the first max-pool's indices, and {PLAIN} too "
        "high, because it counts values that no backward reads. By layer both are counted as they are."
    )


def show_times(rows: Sequence[Row]) -> None:
    has_measured = any(row.measured for row in rows)
    print(
        "Table 3: seconds a batch. `ratio`: to the time without checkpoints. Ours are estimated for an RTX 3090 from"
    )
    print("operations and bytes moved, without the optimizer: first with every segment run twice, as PyTorch's")
    print("`checkpoint` does, then with the last one run once, as our schedules do.\n")
    heads = ("column", "set", "paper", "ratio", "ours", "ratio", "last once", "ratio")
    for setting, group in grouped(rows):
        print(title(setting))
        plain = next(row for row in group if row.column == PLAIN)
        lines = [(*heads, *(("measured", "ratio") if has_measured else ()))]
        lines += [time_cells(row, plain, has_measured) for row in group]
        show(lines)
    print(
        "Seconds are those of the paper's card and a whole training step, so only ratios can be compared. AlexNet's"
    )
    print(
        "are lower in the paper than estimated; what else its steps contain is not said. The 2.849 s at batch 400 the"
    )
    print("paper leaves unexplained, and so does our estimate.\n")


def time_cells(row: Row, plain: Row, has_measured: bool) -> tuple[str, ...]:
    stages = row.setting.network.chain(row.setting.batch).stages
    once = sum(stage.forward_time + stage.backward_time for stage in stages)
    twice, last_once = row.slowdown(last_twice=True), row.slowdown(last_twice=False)
    ratio = row.paper_s / plain.paper_s if is_known(row.paper_s) and is_known(plain.paper_s) else None
    cells = [row.column or "", row.how, as_paper(row.paper_s, ".3f"), "" if ratio is None else f"{ratio:.2f}"]
    cells += [f"{once * twice:.3f}", f"{twice:.2f}", f"{once * last_once:.3f}", f"{last_once:.2f}"]
    if has_measured:
        seconds, basis = row.measured.get("seconds"), plain.measured.get("seconds")
        cells += [f"{seconds:.3f}" if seconds else "OOM", f"{seconds / basis:.2f}" if seconds and basis else ""]
    return tuple(cells)


def show_search_times() -> None:
    print("Milliseconds to find the checkpoints of VGG-19 (the paper's on its CPU, in Python; ours here, compiled):")
    for column, paper in SEARCH_MS.items():
        print(f"  {column}: paper {paper:g}, {METHOD_OF[column]} {search_ms(METHOD_OF[column]):.2g}")
    print()


def search_ms(method: str) -> float:
    """Each chain is new to the method, which remembers what it has found. The first also compiles it."""
    spent = []
    for batch in range(1, 12):
        chain = VGG.chain(batch)
        started = time.perf_counter()
        METHODS[method].find(chain, 0, Options())
        spent.append(1000 * (time.perf_counter() - started))
    return statistics.median(spent[1:])


def show_traces(rows: Sequence[Row]) -> None:
    """Predicted against measured; both with what is there before the step."""
    if not any(row.measured for row in rows):
        print("Predictions are not compared with measurements here; --measure does, on a CUDA device.")
        return
    print(
        "Predicted and measured, in MiB with all that is there between steps. `seen`: the most at the end of a layer,"
    )
    print("as the paper measures. `true`: the most at any time. `phases`: mean error over the phases of a step; the")
    print(f"paper has {FIGURE_5_ERROR:.1%} in its Fig. 5.\n")
    heads = ("column", "set", "seen", "Eq. 12", "off", "phases", "by layer", "off", "phases", "true")
    for setting, group in grouped(rows):
        print(title(setting))
        show([heads, *(trace_cells(row) for row in group)])


def trace_cells(row: Row) -> tuple[str, ...]:
    if "error" in row.measured:
        return (row.column or "", row.how, row.measured["error"], *[""] * 7)
    trace, base = row.measured["trace_bytes"], row.measured["base_bytes"]
    cells = [row.column or "", row.how, f"{mib(max(trace)):,.0f}"]
    for predicted in traces_of(row):
        total = [base + held for held in predicted]
        errors = [abs(held / real - 1) for held, real in zip(total, trace, strict=True)]
        off = max(total) / max(trace) - 1
        cells += [f"{mib(max(total)):,.0f}", f"{off:+.2%}", f"{statistics.mean(errors):.2%}"]
    return (*cells, f"{mib(row.measured['peak_bytes']):,.0f}")


def traces_of(row: Row) -> tuple[list[int], list[int]]:
    saved = row.setting.network.saved(row.setting.batch)
    return equation_trace(row.sizes, row.checkpoints), layer_trace(row.sizes, saved, row.checkpoints)


def grouped(rows: Sequence[Row]) -> Iterator[tuple[Setting, list[Row]]]:
    for setting in dict.fromkeys(row.setting for row in rows):
        yield setting, [row for row in rows if row.setting is setting]


def networks_of(rows: Sequence[Row]) -> list[Network]:
    return list(dict.fromkeys(row.setting.network for row in rows))


def title(setting: Setting) -> str:
    return f"{setting.network.name}, batch {setting.batch}"


def is_known(value: float | None) -> bool:
    return value is not None and value != OOM


def as_paper(value: float | None, form: str) -> str:
    return "" if value is None else "OOM" if value == OOM else format(value, form)


def as_set(checkpoints: Sequence[int]) -> str:
    return "{" + ",".join(map(str, checkpoints)) + "}"


def mib(size: float) -> float:
    return size / MIB


def show(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for cells in lines:
        texts = (
            f"{cell:<{w}}" if i < 2 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        print("  " + "  ".join(texts).rstrip())
    print()


def save_plots(rows: Sequence[Row], folder: Path) -> None:
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    groups = list(grouped(rows))
    figure, axes = pyplot.subplots(2, len(groups), figsize=(3.2 * len(groups), 7), squeeze=False)
    for (setting, group), peaks, times in zip(groups, *axes, strict=True):
        these = [row for row in group if row.column]
        names, places = [row.column for row in these], range(len(these))
        peaks.bar([x - 0.2 for x in places], [mib(row.total_bytes) for row in these], 0.4, label="Eq. 12 + weights")
        paper = [row.paper_mib if is_known(row.paper_mib) else 0 for row in these]
        peaks.bar([x + 0.2 for x in places], paper, 0.4, label="paper")
        plain = these[-1].paper_s
        ratios = [row.paper_s / plain if is_known(row.paper_s) and is_known(plain) else 0 for row in these]
        times.bar([x - 0.2 for x in places], [row.slowdown(last_twice=True) for row in these], 0.4, label="estimated")
        times.bar([x + 0.2 for x in places], ratios, 0.4, label="paper")
        peaks.set(title=title(setting), ylabel="peak (MiB)")
        times.set(ylabel="time, without checkpoints = 1")
        for axis in (peaks, times):
            axis.set_xticks(places, names, rotation=60, fontsize=8)
            axis.legend(fontsize=7, loc="lower left")
    save(figure, folder / "checkpoint_selection.png")
    firsts = [group for _, group in groups if group[0].setting.batch == 128] or [group for _, group in groups]
    figure, axes = pyplot.subplots(
        len(firsts), len(COLUMNS), figsize=(4 * len(COLUMNS), 3.2 * len(firsts)), squeeze=False
    )
    for group, line in zip(firsts, axes, strict=True):
        for row, axis in zip((row for row in group if row.column), line, strict=True):
            plot_trace(row, axis)
    save(figure, folder / "checkpoint_selection_traces.png")


def plot_trace(row: Row, axis: Any) -> None:
    base = row.measured.get("base_bytes", WEIGHT_COPIES * row.setting.network.weight_bytes())
    for label, trace in zip(("Eq. 12", "by layer"), traces_of(row), strict=True):
        axis.plot([mib(base + held) for held in trace], label=label)
    if "trace_bytes" in row.measured:
        axis.plot([mib(held) for held in row.measured["trace_bytes"]], "--", label="measured")
    axis.set_title(
        f"{title(row.setting)}\n{as_set(row.checkpoints) if row.checkpoints else 'no checkpoints'}", fontsize=8
    )
    axis.set(xlabel="phase", ylabel="MiB, with weights", ylim=(0, None))
    axis.legend(fontsize=7)


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"saved {path}")


if __name__ == "__main__":
    sys.exit(main())
