"""Paper 003's figures, and rows that predict the same peaks and times: one row for each set of checkpoints.

The bytes of data are predicted in two ways; checkpoint_selection.py says which.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

from selection_networks import ALEXNET, VGG, Network

from elbowroom.schedule import Forward
from elbowroom.solve import METHODS, Options, solve

OOM = math.inf  # the paper's figure where its card ran out of memory
WEIGHT_COPIES = 3  # weights, gradients, a momentum: not said in the paper, but its figures fit
LINEAR, CUBIC, ACG, ROOT, PLAIN = "Algorithm 6", "Algorithm 3", "ACG solver", "O(√n)", "PyTorch"
COLUMNS = (LINEAR, CUBIC, ACG, ROOT, PLAIN)  # of the paper's tables
METHOD_OF = {LINEAR: "least-peak", CUBIC: "checkpoint-sum", ACG: "acg", ROOT: "sqrt", PLAIN: "store-all"}


# --- what the paper has --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One line of the paper's Table 2 (MiB) and Table 3 (seconds), in the order of `COLUMNS`."""

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
FIGURE_5 = (3, 11, 24)  # the checkpoints that section 5.2 has for VGG-19
FIGURE_5_ERROR = 0.028  # how far off the paper's prediction is there
SEARCH_MS = {CUBIC: 20.0, LINEAR: 1.1}  # milliseconds to find the checkpoints of VGG-19, section 5.7


# --- the rows ------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One set of checkpoints for one network and batch.

    `column` is the paper's, if the set is from there; `how` is what the tables call the set. `checkpoints` are
    numbers of layers and end with the last one; empty means that nothing is checkpointed. `measured` is empty without
    `--measure`.
    """

    setting: Setting
    column: str | None
    how: str
    checkpoints: tuple[int, ...]
    paper_mib: float | None = None
    paper_s: float | None = None
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        return self.setting.network.sizes(self.setting.batch)

    @property
    def traces(self) -> tuple[list[int], list[int]]:
        """Bytes of data in each phase of a step, by Eq. 12 and by layer."""
        saved = self.setting.network.saved(self.setting.batch)
        return equation_trace(self.sizes, self.checkpoints), layer_trace(self.sizes, saved, self.checkpoints)

    @property
    def equation_bytes(self) -> int:
        return max(self.traces[0])

    @property
    def by_layer_bytes(self) -> int:
        return max(self.traces[1])

    @property
    def total_bytes(self) -> int:
        """With the weights and their copies."""
        return self.equation_bytes + WEIGHT_COPIES * self.setting.network.weight_bytes()

    def slowdown(self, *, last_twice: bool) -> float:
        """Estimated time divided by that of running everything once.

        PyTorch's `checkpoint` runs the last segment a second time like all others; our schedules do not.
        """
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
    """The paper's sets, each named after our method if that finds the same set, and ours where they differ."""
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
    """The checkpoints that a method of ours finds. Every batch has the same: it multiplies all sizes alike."""
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
    """Bytes of data in each of the paper's phases: before, n forwards, n backwards, after (Eq. 9 and 10).

    `sizes` are those of the values, beginning with the images.
    """
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
    """Bytes of data in the same phases, counted by layer; `saved` is as `Network.saved` has it.

    When a layer's forward has ended, its input is still there. When its backward has ended, its input is there only
    if the layer before it saved it, too.
    """
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
            # The images need no gradient, and after the first layer's backward the last gradient is freed.
            gradients = sizes[i] + sizes[i - 1] if i > 1 else 0
            backwards[i] = before + inside + gradients
    return [*trace, *(backwards[i] for i in range(n, 0, -1)), sizes[0]]


# --- rows together -------------------------------------------------------------------------------------------


def grouped(rows: Sequence[Row]) -> Iterator[tuple[Setting, list[Row]]]:
    """The rows of each network and batch."""
    for setting in dict.fromkeys(row.setting for row in rows):
        yield setting, [row for row in rows if row.setting is setting]


def networks_of(rows: Sequence[Row]) -> list[Network]:
    return list(dict.fromkeys(row.setting.network for row in rows))
