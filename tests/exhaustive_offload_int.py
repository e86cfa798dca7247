"""Exhaustive searches for offloading alone, in the model in which memory moves as whole values.

Written from the rules of docs/design/memory-model.md, without looking at any method or at the referee: time passes in
steps, and in each of them everything is tried that could begin. Sizes and times are whole numbers, and so are those
of copies; then some fastest schedule has everything begin at whole numbers, because each beginning that is moved as
early as it can go without changing any order is a sum of such times.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from elbowroom.problem import Chain, Platform

STAYS, LEAVING, GONE, COMING, CAME = range(5)


@dataclass(frozen=True)
class _Costs:
    """Of one choice of ways: for each operation its time, and its bytes beside the values ā_k; which values it needs
    and which of them it has made or used up when it ends; the bytes and copy times of values."""

    n: int
    time: tuple[int, ...]
    besides: tuple[int, ...]  # gradients, overhead and output, while it runs
    between: tuple[int, ...]  # gradients, before it runs
    size: tuple[int, ...]
    out: tuple[int, ...]
    back: tuple[int, ...]


def least_time(chain: Chain, budget: int, platform: Platform, *, waits: bool = True) -> float:
    """The least time of any schedule in which every stage saves all, in any of its ways, and each ā_k goes to the
    host at most once, between forward k + 1 and backward k + 1; inf if none fits the budget.

    With `waits`, an operation may begin later than it could. Without, it begins as soon as it can.
    """
    ways = product(*(stage.ways for stage in chain.stages))
    return min(_Search(_costs(chain, chosen, platform), budget, platform, waits).run() for chosen in ways)


def _costs(chain, ways, platform):
    n = len(chain)
    delta = chain.gradient_bytes
    size = (chain.input_bytes, *(way.saved_bytes for way in ways))
    forwards = [(way.forward_time, delta[n] + way.forward_overhead_bytes + way.saved_bytes, delta[n]) for way in ways]
    backwards = [
        (ways[i - 1].backward_time, delta[i] + delta[i - 1] + ways[i - 1].backward_overhead_bytes, delta[i])
        for i in range(n, 0, -1)
    ]
    time, besides, between = zip(*forwards, *backwards, strict=True)

    def copying(rate):
        times = [platform.seconds_per_copy + bytes_ / rate for bytes_ in size]
        assert all(t == int(t) for t in times)
        return tuple(map(int, times))

    return _Costs(n, time, besides, between, size, copying(platform.rate_to_host), copying(platform.rate_from_host))


class _Search:
    """Breadth first over states: (operations that have ended, how long the next has run or None, how each value is,
    the copies that run with the time that each has left)."""

    def __init__(self, costs: _Costs, budget: int, platform: Platform, waits: bool) -> None:
        self.costs, self.budget, self.waits = costs, budget, waits
        self.turns, self.host = platform.takes_turns, platform.host_bytes
        self.values = range(costs.n)

    def run(self) -> float:
        costs = self.costs
        states = {(0, None, (STAYS,) * costs.n, ())}
        seen = set(states)
        now = 0
        while states:
            settled = self._settled(states)
            if any(state[0] == 2 * costs.n for state in settled):
                return now
            states = {self._step(state) for state in settled} - seen
            states = {state for state in states if state is not None}
            seen |= states
            now += 1
        return float("inf")

    # --- what may happen at one moment, without time passing ---

    def _settled(self, states):
        """All states that follow at once: things end and begin."""
        found, todo = set(states), list(states)
        while todo:
            for after in self._beginnings(todo.pop()):
                if after not in found:
                    found.add(after)
                    todo.append(after)
        return found

    def _beginnings(self, state):
        done, ran, values, copies = state
        costs = self.costs
        if done == 2 * costs.n:
            return
        if ran is not None and ran == costs.time[done]:
            yield done + 1, None, values, copies
            return
        if any(left == 0 for _, _, left in copies):
            yield done, ran, *self._ended(values, copies)
            return
        if ran is None and self._ready(done, values) and self._bytes(done, True, values) <= self.budget:
            yield done, 0, values, copies
        for k in self.values:
            if costs.size[k] == 0:
                continue
            if values[k] == STAYS and self._free(copies, "out") and k <= done < 2 * costs.n - 1 - k:
                held = sum(costs.size[j] for j in self.values if values[j] in (LEAVING, GONE, COMING))
                if self.host is None or held + costs.size[k] <= self.host:
                    new = _with(values, k, LEAVING)
                    yield done, ran, new, (*copies, ("out", k, costs.out[k]))
            if values[k] == GONE and self._free(copies, "back") and done > k:
                new = _with(values, k, COMING)
                if self._bytes(done, ran is not None, new) <= self.budget:
                    yield done, ran, new, (*copies, ("back", k, costs.back[k]))

    def _ended(self, values, copies):
        for _, k, left in copies:
            if left == 0:
                values = _with(values, k, GONE if values[k] == LEAVING else CAME)
        return values, tuple(copy for copy in copies if copy[2])

    def _free(self, copies, direction):
        return not any(self.turns or each == direction for each, _, _ in copies)

    def _ready(self, done, values):
        """Whether what the operation reads is in memory: ā_k for operation k, and for the two that use it later."""
        n = self.costs.n
        reads = [done] if done < n else [2 * n - 1 - done, 2 * n - done]
        for k in reads:
            if k < n and values[k] in (GONE, COMING) and not (done < n and values[k] == GONE):
                return False
            if done >= n and k < n and values[k] == LEAVING:
                return False
        return True

    def _bytes(self, done, running, values):
        """In use before an operation, or while it runs."""
        costs, n = self.costs, self.costs.n
        newest = min(done, n) if done < n else 2 * n - done
        there = costs.size[n] if newest == n else 0
        for k in range(min(newest + 1, n)):
            read_later = done < n and k == done  # the copy on the device lives until its reader has ended
            there += costs.size[k] if values[k] != GONE or read_later else 0
        return there + (costs.besides[done] if running else costs.between[done])

    # --- time passes ---

    def _step(self, state):
        done, ran, values, copies = state
        if done == 2 * self.costs.n or (ran is None and not copies):
            return None  # nothing happens, and what may begin now has begun in another state
        if not self.waits and ran is None and self._could_begin(done, values):
            return None
        if any(left == 0 for _, _, left in copies) or (ran is not None and ran == self.costs.time[done]):
            return None
        return done, None if ran is None else ran + 1, values, tuple((d, k, left - 1) for d, k, left in copies)

    def _could_begin(self, done, values):
        return self._ready(done, values) and self._bytes(done, True, values) <= self.budget


def _with(values, k, how):
    return (*values[:k], how, *values[k + 1 :])
