"""Chains as data: what `measured_chains.py` and `estimated_chains.py` write, and all figures of 001 ch. 2–4 read.

Measured chains are taken where there are any, estimated ones else; every table and plot says which.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from elbowroom.problem import Chain, Stage

RESULTS = Path(__file__).parents[1] / "results"
ESTIMATED = RESULTS / "chains-v100-estimated.json"
MEASURED = RESULTS / "chains-h200.json"
V100_LINK = 12.2e9  # bytes a second, both directions together: 001 §3.4.1


@dataclass(frozen=True)
class StageRow:
    """A number of equal stages, one after the other; a chain's first row is its input and has no stage.

    `plain_overhead_bytes` is what a forward needs besides its input and output if it saves nothing,
    `saving_overhead_bytes` what it needs besides its input and the saved set if it saves all.
    """

    stages: int
    name: str
    forward_s: float
    backward_s: float
    output_bytes: int
    saved_bytes: int
    gradient_bytes: int
    plain_overhead_bytes: int
    saving_overhead_bytes: int
    backward_overhead_bytes: int

    @classmethod
    def of_input(cls, size: int) -> StageRow:
        return cls(0, "input", 0.0, 0.0, size, 0, 0, 0, 0, 0)

    @property
    def stage(self) -> Stage:
        """A stage has one overhead for both kinds of forward, so it is the larger one that counts.

        The thesis measures the forward that saves all, and takes its overhead for both.
        """
        saved = max(self.saved_bytes, self.output_bytes)
        return Stage(
            name=self.name,
            forward_time=self.forward_s,
            backward_time=self.backward_s,
            output_bytes=self.output_bytes,
            saved_bytes=saved,
            gradient_bytes=self.gradient_bytes,
            forward_overhead_bytes=max(self.plain_overhead_bytes, self.saving_overhead_bytes),
            backward_overhead_bytes=self.backward_overhead_bytes,
        )


@dataclass
class ChainFile:
    """Chains by the names of their settings. `kind` is "measured" or "estimated"; `link` has the rates of the host
    link in bytes a second, if it was measured."""

    kind: str
    device: str
    link: dict[str, float]
    chains: dict[str, list[StageRow]]

    def chain(self, name: str) -> Chain:
        first, *rest = self.chains[name]
        stages = [row.stage for row in rest for _ in range(row.stages)]
        return Chain(first.output_bytes, 0, tuple(stages))

    def save(self, path: Path) -> None:
        """One line a chain. Equal neighbours become one row; times keep four digits, which is more than is known."""
        chains = [f"{json.dumps(name)}: {json.dumps(list(packed(rows)))}" for name, rows in self.chains.items()]
        head = json.dumps({"kind": self.kind, "device": self.device, "link": self.link})
        path.write_text(f'{head[:-1]}, "chains": {{\n' + ",\n".join(chains) + "\n}}\n")

    @classmethod
    def load(cls, path: Path) -> ChainFile:
        data = json.loads(path.read_text())
        chains = {name: [StageRow(*row) for row in rows] for name, rows in data["chains"].items()}
        return cls(data["kind"], data["device"], data["link"], chains)


def packed(rows: Sequence[StageRow]) -> Iterator[list[Any]]:
    for row, same in groupby(rows, key=lambda row: replace(row, stages=min(row.stages, 1))):
        count = sum(each.stages for each in same)
        yield [count, *(round_off(value) for value in astuple(row)[1:])]


def round_off(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def seconds_of(chain: Chain) -> float:
    """The time without recomputation and without waiting."""
    return sum(stage.forward_time + stage.backward_time for stage in chain.stages)


def thesis_link(found: ChainFile) -> float:
    """Bytes a second of the link that is to these chains' computation what 12.2 GB/s is to a V100's.

    The factor is one for all chains: the median of what a V100 is estimated to take and what was measured.
    """
    if found.kind == "estimated":
        return V100_LINK
    ratios = speed_ratios(found)
    return V100_LINK * ratios[len(ratios) // 2]


def speed_ratios(found: ChainFile) -> list[float]:
    """How much longer a V100 is estimated to take than was measured, for each chain, in order."""
    estimated = ChainFile.load(ESTIMATED)
    both = [name for name in found.chains if name in estimated.chains]
    return sorted(seconds_of(estimated.chain(name)) / seconds_of(found.chain(name)) for name in both)
