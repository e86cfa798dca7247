"""What moving values asks of the link: rows and variables beside those of `choices.py`, in one phase.

The link is a resource over time. Some moments of a program are looked at, in order; T is the time of the operators
that run before a moment, and each of these is a variable for every such moment:

    copied   bytes that have gone to the host by then
    gone     bytes of these that the device has got back: nobody in the forward reads them any more
    came     bytes for which there is memory on the device again
    stall    time that computing has waited for the link since the moment before

    least          operators' time + Σ stall
    such that      copied ≤ Σ bytes of move[n], n made by then
                   gone ≤ copied, and ≤ Σ bytes of move[n], n read for the last time in the forward by then
                   came ≤ copied
                   came ≥ Σ bytes of move[n], n read in the backward by then
                   more copied, more came since the moment before ≤ what the link carries in T + stall since then
                   bytes in use, with what moves and has not gone yet or has come early ≤ room
                   Σ bytes of move[n] ≤ host memory

What the link carries in some time: each direction no more than its rate; and where both run, no more than a mix of
the time in which one runs alone and the time in which both do. In the forward nothing comes back, so there it is the
rate to the host. A copy's latency counts as bytes that the link could have carried, at the moment at which a value is
made or first read. In the backward, T contains the operators that run again, which are themselves chosen.

When values live is read off a tight program (`moves.py`), in which what moves is gone at once and comes at the last
moment. All this is an approximation, as the other rows are: bytes flow here, and a real value comes as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array, vstack

from elbowroom.plan.values.choices import Choices, Floats, Lives, Row
from elbowroom.problem.platform import Platform

# Moments besides those where memory is tight, evenly spread over each half: between two of them a copy may seem to
# begin before its value is made, so there should be many, and each costs some rows.
_EVENLY = 12
# Of the time that a copy takes. Of equal choices the one that moves less is better.
_TIE = 1e-4

Mask = NDArray[np.bool_]


class _Variables(NamedTuple):
    """Of one moment."""

    copied: int
    gone: int
    came: int
    stall: int


class Traffic:
    """The linear program with a link, for storages that may move: `may` tells by their number which do."""

    def __init__(self, choices: Choices, platform: Platform, may: Iterable[int]) -> None:
        assert platform.rate_to_host is not None
        assert platform.rate_from_host is not None
        self.choices, self.platform = choices, platform
        self.out, self.back = platform.rate_to_host, platform.rate_from_host
        self.may = np.zeros(len(choices.storage_bytes), dtype=bool)
        self.may[list(may)] = True
        self.may &= choices.move > 0
        self.bytes = np.where(self.may, choices.storage_bytes, 0.0)

    def chosen(self, lives: Lives, moments: Iterable[int], room: float) -> Floats | None:
        """The best choices with these lives, where memory at these moments is within the room; None if none are."""
        rows = _Rows(self, lives, sorted(m for m in set(moments) if np.isfinite(lives.bytes[m])), room)
        return rows.solve()

    def shares(self) -> list[tuple[float, float]]:
        """What the link carries in a second: a·(bytes to the host) + b·(bytes back) ≤ 1 for each of these pairs."""
        out, back, duplex = self.out, self.back, self.platform.duplex
        turns = (1 / out, 1 / back)
        if self.platform.takes_turns:
            return [turns]
        found = [(1 / out, 0.0), (0.0, 1 / back)]
        if duplex is None or duplex >= max(out, back):
            return found
        both_out, both_back = min(out, duplex), min(back, duplex)
        if both_out / out + both_back / back <= 1:
            return [turns]
        # From one direction alone to both together, and on to the other alone.
        if both_out < out:
            found.append((1 / out, (1 - both_out / out) / both_back))
        if both_back < back:
            found.append(((1 - both_back / back) / both_out, 1 / back))
        return found


class _Rows:
    """One linear program."""

    def __init__(self, traffic: Traffic, lives: Lives, tight: list[int], room: float) -> None:
        self.traffic, self.choices, self.lives, self.room = traffic, traffic.choices, lives, room
        choices = self.choices
        self._turn = choices.turn
        self._tight = set(tight)
        self._first, self._last = lives.first[0], lives.last[0]
        ends = 0, self._turn, len(lives.bytes) - 1
        even = [np.linspace(a, b, _EVENLY + 1).astype(int) for a, b in pairwise(ends)]
        self._moments = sorted({*tight, *np.concatenate(even).tolist()})
        numbers = choices.count + 4 * np.arange(len(self._moments))
        self._variables = [_Variables(n, n + 1, n + 2, n + 3) for n in numbers.tolist()]
        self._count = choices.count + 4 * len(self._moments)
        self._scale = max(room, 1.0)  # bytes are counted in rooms, or their numbers would be too large beside shares
        self._bytes = traffic.bytes / self._scale
        self._chosen = np.zeros(self._count)
        self._chosen[: choices.count] = lives.chosen
        self._rows: list[Row] = []
        graph = choices.graph
        idle = {op for op, number in choices.ahead.items() if not self._chosen[number]} | graph.part_copies
        self._times = np.array(
            [0.0 if op in idle else graph.ops[op].time for op in (*graph.forward, *graph.backward)]
        )
        # What may run again, and the moment at which it would: when somebody first reads what it makes.
        when = [min(self._first[list(choices.storages_of((op,)))], default=0) for op in choices.again[0]]
        self._again = np.array(list(choices.again[0].values()), dtype=np.int64), np.array(when, dtype=np.int64)

    def solve(self) -> Floats | None:
        choices = self.choices
        self._add_traffic()
        for at, moment in enumerate(self._moments):
            if moment in self._tight:
                self._rows.append(self._memory(at, moment))
        rules, most = choices.rules
        wide = csr_array((rules.data, rules.indices, rules.indptr), shape=(rules.shape[0], self._count))
        limits = vstack([wide, csr_array(np.array([row for row, _ in self._rows]))], format="csr")
        cost = np.zeros(self._count)
        cost[: choices.count] = choices.times
        cost[choices.move] = _TIE * (self._bytes * self._scale) / self.traffic.back
        cost[0] = 0.0
        cost[[each.stall for each in self._variables]] = 1.0
        upper = np.full(self._count, np.inf)
        upper[: choices.count] = choices.most
        upper[choices.move] = np.where(self.traffic.may, 1.0, 0.0)
        bounds = np.column_stack([np.zeros(self._count), upper])
        every = [*most, *(limit for _, limit in self._rows)]
        found = linprog(cost, limits, every, bounds=bounds, method="highs-ds")
        return None if found.x is None else np.asarray(found.x)[: choices.count]

    # --- rows ---

    def _row(self, *terms: tuple[int, float]) -> Floats:
        row = np.zeros(self._count)
        for variable, value in terms:
            row[variable] += value
        return row

    def _moves(self, which: Mask | None = None) -> Floats:
        """Bytes of what moves, of all storages or of some."""
        row = np.zeros(self._count)
        row[self.choices.move] = self._bytes if which is None else np.where(which, self._bytes, 0.0)
        row[0] = 0.0
        return row

    def _add_traffic(self) -> None:
        choices, turn, add = self.choices, self._turn, self._rows.append
        before = None
        for here, moment in zip(self._variables, self._moments, strict=True):
            add((self._row((here.copied, 1.0)) - self._moves(choices.made_at < moment), 0.0))
            if moment <= turn:
                add((self._row((here.gone, 1.0), (here.copied, -1.0)), 0.0))
                add((self._row((here.gone, 1.0)) - self._moves(self._waits(moment)), 0.0))
            if moment >= turn:
                add((self._row((here.came, 1.0), (here.copied, -1.0)), 0.0))
                add((self._moves(self._first <= moment) - self._row((here.came, 1.0)), 0.0))
            self._add_link(before, here, moment)
            before = (here, moment)
        host = self.traffic.platform.host_bytes
        if host is not None:
            add((self._moves(), host / self._scale))

    def _add_link(self, before: tuple[_Variables, int] | None, here: _Variables, moment: int) -> None:
        """No more is carried since the moment before than the time allows."""
        since = before[1] if before else -1
        passed, computing = self._time(since, moment)
        latency = self.traffic.platform.seconds_per_copy
        out, back = self._row((here.copied, 1.0)), self._row((here.came, 1.0))
        if before:
            out[before[0].copied], back[before[0].came] = -1.0, -1.0
            out[here.copied], back[here.came] = 1.0, 1.0
        copies = self.choices.move
        made = (self.choices.made_at >= since) & (self.choices.made_at < moment)
        read = (self._first > since) & (self._first <= moment)
        for a, b in [(1 / self.traffic.out, 0.0)] if moment <= self._turn else self.traffic.shares():
            row = a * self._scale * out + b * self._scale * back - computing
            row[here.stall] -= 1.0
            for share, rate, which in ((a, self.traffic.out, made), (b, self.traffic.back, read)):
                row[copies] += np.where(which & self.traffic.may, share * rate * latency, 0.0)
            row[0] = 0.0
            self._rows.append((row, passed))

    def _time(self, since: int, moment: int) -> tuple[float, Floats]:
        """Seconds from one moment to the next: of operators that run once, and for each choice to run one again."""
        choices = self.choices
        passed = float(self._times[max(since, 0) : moment].sum())
        computing = np.zeros(self._count)
        if moment > self._turn:
            numbers, when = self._again
            numbers = numbers[(since <= when) & (when < moment)]
            computing[numbers] = choices.times[numbers]
        return passed, computing

    def _waits(self, moment: int) -> Mask:
        """What the forward does not read any more."""
        choices = self.choices
        waits: Mask = (choices.made_at <= moment) & (choices.read_until < moment)
        return waits

    def _memory(self, at: int, moment: int) -> Row:
        """The bytes in use at a moment, with what moves and is still or already there."""
        here, lives, scale = self._variables[at], self.lives, self._scale
        kept = self._row()
        kept[: self.choices.count] = self.choices.row(lives, moment) / scale
        if moment < self._turn:
            there = self._moves(self._waits(moment)) - self._row((here.gone, 1.0))
            must = self._row()
        else:
            left = here.gone if moment == self._turn else here.copied
            # What has been read for the last time has come and gone; what nobody reads goes, and does not come.
            not_over = (self._last >= moment) | (self._last < 0)
            there = self._moves(not_over) + self._row((here.came, 1.0), (left, -1.0))
            must = self._moves((self._first <= moment) & (self._last >= moment))
        besides = float(lives.bytes[moment]) / scale - float((kept + must) @ self._chosen)
        return kept + there, self.room / scale - besides
