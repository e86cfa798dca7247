"""The dynamic program of 001 Algorithm 5: which values to move, stage after stage, forward and backward together.

The model is *comm* (`schedule/fluid.py`): values move whole, in order, and their memory goes and comes with every
byte. The forwards 1..i and the backwards i..1 are the two ends of a step. What has been decided for them, a prefix,
comes down to five numbers:

    kept    bytes of ā_0..ā_{i-1} that stay                                  A in 001
    value   bytes of ā_i, which stage i has just made
    out     seconds of copying that are left when forward i ends             Δ_F / β
    back    seconds of copying that must be over when backward i starts      Δ_B / β
    time    that both ends take

The forward of the next stage needs 𝓜 (with its own ā) beside `kept`, `value` and what has not left. It waits
ε = ((𝓜 − M + kept + value)/β + out⁺)⁺, and so does its backward. If `value` moves, `out` becomes
out⁺ + value/β − ε − u, and `back` becomes (back − ε − u)⁺ + value/β. If it stays, both fall by ε + u, and `kept`
grows.

**The loss.** A number below zero stands for seconds in which the link has nothing to do. There the other end may
still be copying (001 eq. 3.16, 3.17): no longer than that, and no more bytes than the operations have room for. Both
limits go into the number at once: it falls no deeper than the seconds for whose bytes there is room beside the
operation just added. Then the idle time around the loss is (out + back)⁺ whatever the signs. It follows from the five
numbers alone, and so stages may save in several ways. The simple form, in which no copy passes the loss, is
out⁺ + back⁺.

**Few prefixes.** A prefix goes if another one is as good (`kernels/dominance.py`), or if what it must still compute
and copy takes too long for it to beat what a coarse first pass has found. As long as no more are left than cost next
to nothing, that is all, and the answer is exact. Beyond that, prefixes are merged: of those that differ by less than
a slot in `kept`, `out` and `back`, the one with the least time stays. A slot is the budget divided by the number of
slots; where nobody asked for a number, slots are as wide as it takes to leave few prefixes. 001 § 3.3.3.2 rounds
sizes instead; then sums drift, and what was rounded down may not fit. Here nothing is rounded: each prefix has the
numbers of its own decisions to the byte, its time is true, and it fits.

**Other platforms.** Each direction has the rate that it has alone: in this order of copies, the first one back waits
for the last one out, so the two directions never run at once. Seconds that pass before each copy count as seconds
of copying; the model forgets that no bytes flow in them, so its waits are too long rather than too short. All values
that move are on the host before the first one is back, and together they fit there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elbowroom.problem import Chain, Platform
from elbowroom.progress import Progress
from elbowroom.solve.kernels.dominance import Flags, undominated
from elbowroom.solve.kernels.rows import Floats, Ints
from elbowroom.solve.offload.ways import fastest, operation_bytes
from elbowroom.solve.slots import CUSTOMARY, useful_bytes

Made = NDArray[np.int32]

FREE = 20_000  # prefixes after a stage: to sort and compare so many takes a few hundredths of a second
MOST = 1_000_000  # beyond these, slots are widened even if somebody asked for that many slots


@dataclass(frozen=True)
class Decisions:
    """In which way each stage saves, and which values ā_k move; the time that this takes in the model."""

    ways: tuple[int, ...]
    values: tuple[int, ...]
    time: float


def decide(
    chain: Chain, budget: int, platform: Platform, slots: int | None, across_loss: bool, progress: Progress
) -> tuple[Decisions | None, bool]:
    """The fastest decisions found that fit a budget (None: none was found), and whether it is proved that none are
    faster. Copies may pass the loss if `across_loss`; otherwise it counts as if none did. Where nothing has to move,
    nothing does.
    """
    still = fastest(chain)
    if still.peak_bytes <= budget:
        return Decisions(still.ways, (), still.time), True
    search = _Search(chain, budget, platform, across_loss)
    number, most = (CUSTOMARY, FREE) if slots is None else (slots, MOST)
    known, exact = search.run(max(1, number // 8), FREE // 8, FREE, None, lambda part: progress(part / 2))
    if exact:
        return known, True
    return search.run(number, FREE, most, known, lambda part: progress((1 + part) / 2))


class _Way(NamedTuple):
    """One way of one stage."""

    saved: int
    forward_bytes: int
    backward_bytes: int
    forward_time: float
    backward_time: float


class _Prefixes(NamedTuple):
    """The numbers of many prefixes, in arrays; and how each was made, of which one before and by which decision."""

    kept: Ints
    value: Ints
    gone: Ints  # bytes on the host, where there are not enough for all
    out: Floats
    back: Floats
    time: Floats
    parent: Ints
    decision: Ints  # twice the stage's way, and 1 if the value before it moves

    def at(self, where: Ints | Flags) -> _Prefixes:
        return _Prefixes._make(column[where] for column in self)

    @classmethod
    def start(cls, chain: Chain) -> _Prefixes:
        none, zero = np.zeros(1, dtype=np.int64), np.zeros(1)
        return cls(none, none + chain.input_bytes, none, zero, zero, zero, none, none)

    @classmethod
    def joined(cls, parts: Iterable[_Prefixes]) -> _Prefixes:
        return cls._make(np.concatenate(column) for column in zip(*parts, strict=True))


class _Search:
    def __init__(self, chain: Chain, budget: int, platform: Platform, across_loss: bool) -> None:
        assert platform.rate_to_host is not None
        assert platform.rate_from_host is not None
        self.chain, self.across_loss = chain, across_loss
        self.budget = min(budget, useful_bytes(chain))
        self.rate_out, self.rate_back = platform.rate_to_host, platform.rate_from_host
        self.wait = platform.seconds_per_copy
        self.stages = [
            [
                _Way(way.saved_bytes, *operation_bytes(chain, at, number), way.forward_time, way.backward_time)
                for number, way in enumerate(stage.ways)
            ]
            for at, stage in enumerate(chain.stages, start=1)
        ]
        least = [min(way.saved for way in ways) for ways in self.stages]
        most = chain.input_bytes + sum(max(way.saved for way in ways) for ways in self.stages)
        self.host = platform.host_bytes if platform.host_bytes is not None and platform.host_bytes < most else None
        # What the stages after each one take at least: seconds, and bytes beside `kept` and `value` if nothing moves.
        self.time_left, self.bytes_left = [0.0], [-self.budget]
        for ways, saved in zip(reversed(self.stages[1:]), reversed(least[1:]), strict=True):
            self.time_left.append(self.time_left[-1] + min(way.forward_time + way.backward_time for way in ways))
            own = min(max(way.forward_bytes, way.backward_bytes) for way in ways)
            self.bytes_left.append(max(own, self.bytes_left[-1] + saved))
        self.time_left.reverse()
        self.bytes_left.reverse()

    def run(
        self, slots: int, free: int, most: int, known: Decisions | None, progress: Progress
    ) -> tuple[Decisions | None, bool]:
        """The fastest decisions found, or the `known` ones if none are faster; and whether that is certain.

        No more than `free` prefixes are left as they are. Of more, those are merged that differ by less than a slot,
        and by wider slots until no more than `most` are left.
        """
        exact = True
        prefixes = _Prefixes.start(self.chain)
        made: list[tuple[Made, Made]] = []
        for at, ways in enumerate(self.stages):
            prefixes = self._longer(prefixes, at, ways)
            if known is not None:
                prefixes = prefixes.at(self._bound(prefixes, at) < known.time)
            slot = max(1.0, self.budget / slots)
            limit = free
            while len(prefixes.time) > limit and slot < 2.0**62:
                prefixes, lost_nothing = self._merged(prefixes, slot)
                exact &= lost_nothing
                limit, slot = most, slot * 2
            prefixes = prefixes.at(_worth_keeping(prefixes, slot))
            made.append((prefixes.parent.astype(np.int32), prefixes.decision.astype(np.int32)))
            progress((at + 1) / len(self.stages))
        if not len(prefixes.time):
            return known, exact
        times = prefixes.time + self._around_the_loss(prefixes)
        best = int(np.argmin(times))
        return Decisions(*_read_back(made, best), float(times[best])), exact

    def _longer(self, prefixes: _Prefixes, at: int, ways: list[_Way]) -> _Prefixes:
        """All prefixes that are longer by one stage: in each of its ways, with the value before it kept or moved."""
        parts = []
        for number, way in enumerate(ways):
            parts.append(self._with(prefixes, way, 2 * number, moves=False))
            if at + 1 < len(self.stages):  # the value that both operations at the loss read stays
                parts.append(self._with(prefixes, way, 2 * number + 1, moves=True))
        return _Prefixes.joined(parts)

    def _with(self, before: _Prefixes, way: _Way, decision: int, moves: bool) -> _Prefixes:
        """The prefixes one longer in which the stage saves in a way and the value before it moves or not."""
        fits = before.kept + before.value + max(way.forward_bytes, way.backward_bytes) <= self.budget
        if moves and self.host is not None:
            fits &= before.gone + before.value <= self.host
        parent = np.flatnonzero(fits)
        kept, value, gone, out, back, time, _, _ = before.at(parent)
        over = kept + value - self.budget
        wait_out = np.maximum((over + way.forward_bytes) / self.rate_out + np.maximum(out, 0), 0)
        wait_back = np.maximum((over + way.backward_bytes) / self.rate_back + np.maximum(back, 0), 0)
        if moves:  # to the host beside this forward, and from it before this backward begins
            out = np.maximum(out, 0) + (self.wait + value / self.rate_out)
        out, back = out - wait_out - way.forward_time, back - wait_back - way.backward_time
        if moves:
            back = np.maximum(back, 0) + (self.wait + value / self.rate_back)
            gone = gone if self.host is None else gone + value
        else:
            kept = kept + value
        if self.across_loss:
            # What is on the move at the other end of the step must have room beside this stage's operations.
            out = np.maximum(out, (kept + way.forward_bytes - self.budget) / self.rate_back)
            back = np.maximum(back, (kept + way.backward_bytes - self.budget) / self.rate_out)
        else:
            out, back = np.maximum(out, 0), np.maximum(back, 0)
        time = time + (wait_out + wait_back) + (way.forward_time + way.backward_time)
        made = np.full_like(kept, way.saved)
        return _Prefixes(kept, made, gone, out, back, time, parent, np.full_like(kept, decision))

    def _around_the_loss(self, prefixes: _Prefixes) -> Floats:
        """The idle time ε_G between the last forward and the last stage's backward."""
        return np.maximum(prefixes.out + prefixes.back, 0)

    def _bound(self, prefixes: _Prefixes, at: int) -> Floats:
        """No decisions that begin so take less: the rest must be computed; and what is on the way, and what there
        will be no room for, must be copied."""
        missing = np.maximum(prefixes.kept + prefixes.value + (self.bytes_left[at] - self.budget), 0)
        copying = prefixes.out + prefixes.back + missing * (1 / self.rate_out + 1 / self.rate_back)
        left: Floats = np.maximum(copying, self.time_left[at])
        return prefixes.time + left

    def _merged(self, prefixes: _Prefixes, slot: float) -> tuple[_Prefixes, bool]:
        """Of prefixes that differ by less than a slot, the one with the least time; and whether it is as good as all
        the others. What keeps nothing, or has nothing left to copy, differs from all that keep or have something.
        """
        cells = _packed(
            [
                prefixes.decision // 2,  # the way, and with it `value`
                np.ceil(prefixes.kept / slot),
                np.ceil(prefixes.gone / slot),
                np.ceil(prefixes.out * (self.rate_out / slot)),
                np.ceil(prefixes.back * (self.rate_back / slot)),
            ]
        )
        order = np.lexsort((prefixes.time, *cells))
        first = np.zeros(len(order), dtype=np.bool_)
        first[:1] = True
        for cell in cells:
            first[1:] |= np.diff(cell[order]) != 0
        stay = order[first]
        one, each = prefixes.at(stay[np.cumsum(first) - 1]), prefixes.at(order)
        waits = np.maximum(one.out - each.out, 0) + np.maximum(one.back - each.back, 0)
        as_good = (one.kept <= each.kept) & (one.gone <= each.gone) & (one.time + waits <= each.time)
        return prefixes.at(stay), bool(as_good.all())


def _packed(columns: Iterable[Ints | Floats]) -> list[Floats | Ints]:
    """As few columns as possible that differ where the given ones of whole numbers do; each takes time to sort by."""
    packed: list[Floats | Ints] = []
    room = 0.0  # the numbers that the last packed column may still be multiplied by
    for column in columns:
        low = column.min()
        numbers = float(column.max() - low) + 1
        if numbers > room:
            packed.append(np.zeros(len(column), dtype=np.int64))
            room = 2.0**62
        if numbers > room:
            packed[-1] = column
            room = 1.0
        else:
            packed[-1] = packed[-1] * int(numbers) + (column - low).astype(np.int64)
            room /= numbers
    return packed


def _worth_keeping(prefixes: _Prefixes, slot: float) -> Flags:
    """Those of which no other one is found that is as good."""
    kept, value, gone, out, back, time, _, _ = prefixes
    stays = np.zeros(len(time), dtype=np.bool_)
    undominated(np.lexsort((time, kept)), int(slot), kept, value, gone, out, back, time, stays)
    return stays


def _read_back(made: list[tuple[Made, Made]], last: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ways, and the values that move, of a prefix of the whole chain."""
    ways, values = [], []
    for at in range(len(made) - 1, -1, -1):
        parent, decision = made[at]
        ways.append(int(decision[last]) // 2)
        if decision[last] % 2:
            values.append(at)
        last = int(parent[last])
    return tuple(reversed(ways)), tuple(reversed(values))
