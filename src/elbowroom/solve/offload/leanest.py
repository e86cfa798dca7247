"""The least memory with which recomputation and offloading together can do, and a schedule that does with it.

The schedules are those of 001 ch. 4: parts whose inputs may go to the host until after the loss, and persistent
recomputation inside a part. With all inputs on the host but the one that is read, a part needs, beside its input I:

    a stage that saves all    what its forward and its backward need
    a walk from s to t        what its forwards need (I only in the first of them), and what C(s, t) needs, beside I

The least memory is that of the best partition. If the host has no room for all that this one moves, nothing is moved:
then the least memory is that of `persistent`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from elbowroom.problem import Chain, Platform
from elbowroom.schedule import Backward, Forward, Operation
from elbowroom.solve.kernels.costs import Costs, costs_of, need_all, ways_of
from elbowroom.solve.kernels.persistent import fill_least, fill_reach
from elbowroom.solve.kernels.pofo import Entries
from elbowroom.solve.kernels.rows import Ints
from elbowroom.solve.offload.parts import Moving, Part, in_a_row, walk

Choice = tuple[int, int]  # a way to save and -1; or -1 and where to walk to


@dataclass(frozen=True)
class Leanest:
    """What a chain needs at least, for every entry: the input of a stage, on its own or inside a saved set."""

    chain: Chain

    @cached_property
    def costs(self) -> Costs:
        return costs_of(self.chain, unit=1)

    @cached_property
    def reach(self) -> Ints:
        """[s, t]: bytes, besides stage s's input and the gradient, to run forwards s..t without saving."""
        reach = np.zeros((len(self.chain) + 1,) * 2, dtype=np.int64)
        fill_reach(self.costs, reach)
        return reach

    @cached_property
    def least(self) -> Ints:
        """[s, t]: bytes, besides stage s's input, to run backwards t to s by recomputation alone."""
        least = np.zeros((len(self.chain) + 2,) * 2, dtype=np.int64)
        fill_least(self.costs, self.reach, True, least)
        return least

    @cached_property
    def entries(self) -> Entries:
        return self._filled[0]

    def least_bytes(self, platform: Platform) -> int:
        moving, alone = int(self.entries.least[0]), int(self.entries.alone[0])
        return moving if self._has_room(platform) else alone

    def schedule(self, platform: Platform) -> Moving:
        """A schedule for the least memory, and for any budget beyond it."""
        n, entry, parts = len(self.chain), 0, []
        if not self._has_room(platform):
            return Moving(tuple(self._recomputing(1, n)))
        while (stage := int(self.entries.stage[entry])) < n:
            way, stop = self._filled[1][entry]
            moved = bool(self.entries.input[entry] > 0)
            if way >= 0:
                parts.append(Part.saving(stage, way - int(self.costs.first_way[stage]), moved))
                entry = n + way
            else:
                parts.append(Part.walking(stage, stop, self._recomputing(stage, stop), moved))
                entry = stop
        return in_a_row([*parts, Part(n, tuple(self._recomputing(n, n)), ())])

    def _has_room(self, platform: Platform) -> bool:
        return platform.host_bytes is None or bool(self.entries.moved[0] <= platform.host_bytes)

    @cached_property
    def _filled(self) -> tuple[Entries, dict[int, Choice]]:
        """Entries from the last to the first, and the choice that is the leanest for each."""
        costs, n = self.costs, len(self.chain)
        count = n + len(costs.saved)
        stage, held = np.arange(1, count + 1), np.zeros(count, dtype=np.int64)
        held[:n] = costs.output[:n]
        for s in range(1, n + 1):
            for way in ways_of(costs, s):
                stage[n + way], held[n + way] = s + 1, costs.saved[way]
        alone = held + self.least[np.minimum(stage, n), n]
        entries = Entries(stage, held, np.zeros_like(held), np.zeros_like(held), alone)
        choices: dict[int, Choice] = {}
        for entry in sorted((e for e in range(count) if stage[e] <= n), key=lambda e: -int(stage[e])):
            need, moved, *choice = min(self._choices(entries, entry))
            entries.least[entry], entries.moved[entry] = need, moved
            choices[entry] = (choice[0], choice[1])
        return entries, choices

    def _choices(self, entries: Entries, entry: int) -> list[tuple[int, int, int, int]]:
        """For each choice: what it needs, what it moves, and the choice."""
        costs, n = self.costs, len(self.chain)
        s, held = int(entries.stage[entry]), int(entries.input[entry])
        found = []
        for way in ways_of(costs, s):
            need, moved = held + int(need_all(costs, way, s, n)), 0
            if s < n:
                need = max(need, int(entries.least[n + way]))
                moved = held + int(entries.moved[n + way])
            found.append((need, moved, way, -1))
        loss = costs.gradient[n]
        first = held + loss + costs.output[s] + costs.overhead[s]
        beyond = 0
        for t in range(s, n):
            if t > s:
                beyond = max(beyond, int(loss + costs.output[t - 1] + costs.output[t] + costs.overhead[t]))
            need = int(max(first, beyond, held + self.least[s, t], entries.least[t]))
            found.append((need, held + int(entries.moved[t]), -1, t))
        return found

    def _recomputing(self, s: int, t: int) -> list[Operation]:
        """Backwards t to s with the fewest bytes: at each state the first choice that is the leanest."""
        todo: list[tuple[int, int] | Operation] = [(s, t)]
        written: list[Operation] = []
        while todo:
            item = todo.pop()
            if not isinstance(item, tuple):
                written.append(item)
                continue
            s, t = item
            way, split = self._leanest_choice(s, t)
            if way >= 0:
                written.append(Forward(s, "all", way - int(self.costs.first_way[s])))
                todo += [Backward(s), (s + 1, t)] if t > s else [Backward(s)]
            else:
                written += walk(s, split)
                todo += [(s, split), (split + 1, t)]
        return written

    def _leanest_choice(self, s: int, t: int) -> Choice:
        costs, least = self.costs, self.least
        for way in ways_of(costs, s):
            after = costs.saved[way] + least[s + 1, t] if t > s else 0
            if max(need_all(costs, way, s, t), after) == least[s, t]:
                return way, -1
        for split in range(s, t):
            walking = costs.gradient[t] + self.reach[s, split]
            if max(walking, costs.output[split] + least[split + 1, t], least[s, split]) == least[s, t]:
                return -1, split
        raise AssertionError("no choice explains the least")
