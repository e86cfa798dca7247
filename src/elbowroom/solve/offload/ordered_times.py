"""Times of many choices of values at once, from below: what copies in the order of the stages must take.

Forwards are played from the start of the step and backwards from its end, without delay (001 Prop. 1). In this
direction of time a value that comes back leaves memory, too: in both halves copies queue up, each begins as soon as
its value and the link allow, and an operation waits until enough of them have ended. Copies go out in the order of
the stages and come back in the opposite one, so nothing comes back before everything has gone, and the two halves are
as far apart as that demands.

No schedule with copies in this order is faster. One may have to be slower: what one half has on its way when the loss
is reached takes room in the other, and a program asks for a copy when an operation begins or has ended.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from elbowroom.problem import Chain, Platform

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class OrderedTimes:
    """One chain within one budget, as tables by stage and way."""

    def __init__(self, chain: Chain, budget: int, platform: Platform) -> None:
        self.chain, self.budget, self.platform = chain, budget, platform
        shape = (len(chain), max(len(stage.ways) for stage in chain.stages))
        self.saved, self.forward_bytes, self.backward_bytes = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        self.forward_time, self.backward_time = np.zeros(shape), np.zeros(shape)
        gradient = chain.gradient_bytes
        for i, stage in enumerate(chain.stages):
            for number, way in enumerate(stage.ways):
                here = i, number
                self.saved[here] = way.saved_bytes
                self.forward_bytes[here] = way.forward_overhead_bytes + way.saved_bytes + gradient[-1]
                both = gradient[i] + gradient[i + 1]
                self.backward_bytes[here] = way.backward_overhead_bytes + way.saved_bytes + both
                self.forward_time[here], self.backward_time[here] = way.forward_time, way.backward_time

    def times(self, ways: Ints, moved: Bools) -> Floats:
        """For each row of ways of the stages 1..n and of marks at the values ā_0..ā_{n-1} that move; infinite if
        they do not fit."""
        rows, n = moved.shape
        out, back = self.platform.rate_to_host, self.platform.rate_from_host
        assert out is not None
        assert back is not None
        wait = self.platform.seconds_per_copy
        forward, backward = _Half(rows, n, out, wait), _Half(rows, n, back, wait)
        kept, on_host = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
        size = np.full(rows, self.chain.input_bytes)
        for i in range(n):
            way, moves = ways[:, i], moved[:, i]
            room = self.budget - kept - size
            ready = forward.now  # what a forward reads may leave while it runs
            forward.run(self.forward_time[i, way], room - self.forward_bytes[i, way])
            forward.let_go(moves, size, ready)
            backward.run(self.backward_time[i, way], room - self.backward_bytes[i, way])
            backward.let_go(moves, size, backward.now)  # what a backward reads must be there when it begins
            kept = kept + np.where(moves, 0, size)
            on_host += np.where(moves, size, 0)
            size = self.saved[i, way]
        time = np.maximum(forward.now + backward.now, forward.link_free + backward.link_free)
        if self.platform.host_bytes is not None:
            time[on_host > self.platform.host_bytes] = np.inf
        return time


class _Half:
    """The forwards in their order, or the backwards in the opposite one, of many choices."""

    def __init__(self, rows: int, most: int, rate: float, seconds_per_copy: float) -> None:
        self.rate, self.seconds_per_copy = rate, seconds_per_copy
        self.now, self.link_free = np.zeros(rows), np.zeros(rows)
        self.sizes, self.ends = np.zeros((rows, most), dtype=np.int64), np.zeros((rows, most))
        self.queued, self.gone = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)  # numbers of copies
        self.pending = np.zeros(rows, dtype=np.int64)  # bytes of the copies that have not been waited for

    def run(self, duration: Floats, room: Ints) -> None:
        """One operation beside which so many bytes on their way have room: the first copies to end are waited for."""
        now = self.now.copy()
        now[room < 0] = np.inf
        waiting = np.flatnonzero((self.pending > room) & (room >= 0))
        while len(waiting):
            copy = self.gone[waiting]
            now[waiting] = np.maximum(now[waiting], self.ends[waiting, copy])
            self.pending[waiting] -= self.sizes[waiting, copy]
            self.gone[waiting] += 1
            waiting = waiting[self.pending[waiting] > room[waiting]]
        self.now = now + duration

    def let_go(self, moves: Bools, size: Ints, ready: Floats) -> None:
        """The value just read leaves, where it moves, from `ready` on at the earliest."""
        leaving = np.flatnonzero(moves & (size > 0))
        begins = np.maximum(ready[leaving], self.link_free[leaving])
        self.link_free[leaving] = begins + (self.seconds_per_copy + size[leaving] / self.rate)
        place = self.queued[leaving]
        self.sizes[leaving, place], self.ends[leaving, place] = size[leaving], self.link_free[leaving]
        self.queued[leaving] += 1
        self.pending[leaving] += size[leaving]
