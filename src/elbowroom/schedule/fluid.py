"""How long a chain takes if values move like a fluid: the two relaxations of offloading in 001 ch. 3.

The referee counts a moving value whole until its copy has ended (the thesis' model *int*). Both relaxations let
memory go and come continuously, with every byte that flows:

- *comm* (assumption O.7''): a value moves whole or not at all: `comm_time`;
- *frac* (assumption O.7'): any part of any value moves: `frac_time`, `fluid_time`.

A method that is exact in one of them can be held to it here, before its answer is rounded to what the referee runs.

Everything is saved and nothing is recomputed: forwards 1..n, then backwards n..1. Values are ā_0..ā_{n-1}, of which
ā_0 is the chain's input. They go in this order and come back in the opposite one, each copy as soon as possible (on
the way back: as late), which is best in both models (Lemmas 5 and 7, Proposition 1). The last value to go is the
first to come back, so the first copy back waits for the end of the last copy out. Whether the two directions of a
link take turns therefore makes no difference; each has the rate that it has alone.

A backward read from its end to its start is like a forward: what has to come back has to leave. Both are computed by
one function, each from its own end of the step, and then moved together until the link and the memory around the loss
allow no more: what an operation leaves free is room for what the other phase has on the move.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from elbowroom.errors import InputError
from elbowroom.problem import Chain, Platform, Saving


def comm_time(
    chain: Chain, offloaded: Collection[int], budget: int, platform: Platform, ways: Sequence[int] | None = None
) -> float:
    """The time of a step that moves the whole values ā_ℓ, ℓ in `offloaded`; infinite if it does not fit.

    `ways` says in which way each stage saves; the stages' own if it is left out.
    """
    sizes = _sizes(chain, _savings(chain, ways))
    for which in offloaded:
        if not 0 <= which < len(chain):
            raise InputError("offloaded", f"there is no value {which}; those of this chain are 0 to {len(chain) - 1}")
    moved = [size if which in offloaded else 0 for which, size in enumerate(sizes)]
    return fluid_time(chain, moved, budget, platform, ways)


def frac_time(
    chain: Chain, amount: float, budget: int, platform: Platform, ways: Sequence[int] | None = None
) -> float:
    """The time of a step that moves the first `amount` bytes of ā_0, ā_1, … (001 § 3.2); infinite if it does not fit.

    With `amount` the bytes by which the peak without moves exceeds the budget, no amount is faster (Theorem 8).
    """
    moved: list[float] = []
    for size in _sizes(chain, _savings(chain, ways)):
        moved.append(min(size, max(0, amount)))
        amount -= moved[-1]
    return fluid_time(chain, moved, budget, platform, ways) if amount <= 0 else math.inf


def fluid_time(
    chain: Chain, moved: Sequence[float], budget: int, platform: Platform, ways: Sequence[int] | None = None
) -> float:
    """The time of a step that moves so many bytes of each of ā_0..ā_{n-1}; infinite if it does not fit.

    Each value of which anything moves is one copy, before which `seconds_per_copy` pass.
    """
    to_host, from_host = platform.rate_to_host, platform.rate_from_host
    if to_host is None or from_host is None:
        raise InputError("bandwidth", "missing; a schedule that moves values needs the rate of the host link")
    savings = _savings(chain, ways)
    sizes = _sizes(chain, savings)
    if len(moved) != len(sizes) or any(not 0 <= part <= size for part, size in zip(moved, sizes, strict=True)):
        raise InputError("moved", "must name as many bytes of each value as there are, or fewer")
    if platform.host_bytes is not None and sum(moved) > platform.host_bytes:
        return math.inf  # before the first value comes back, all of them are on the host
    gradient = chain.gradient_bytes
    forward, backward = _Phase(budget, to_host), _Phase(budget, from_host)
    for i, way in enumerate(savings, start=1):
        value, part = sizes[i - 1], moved[i - 1]
        after = way.saved_bytes + gradient[-1] + way.forward_overhead_bytes
        ready = forward.now  # what the forward reads can go while it runs
        if not forward.run(way.forward_time, value, after):
            return math.inf
        forward.let_go(value, part, ready, waits_before=platform.seconds_per_copy)
        before = way.saved_bytes + gradient[i] + gradient[i - 1] + way.backward_overhead_bytes
        if not backward.run(way.backward_time, value, before):
            return math.inf
        # What the backward reads must be there when it starts.
        backward.let_go(value, part, backward.now, waits_after=platform.seconds_per_copy)
    return _together(forward, backward)


def _savings(chain: Chain, ways: Sequence[int] | None) -> list[Saving]:
    if ways is None:
        return [stage.ways[0] for stage in chain.stages]
    if len(ways) != len(chain):
        raise InputError("ways", f"has {len(ways)} entries for {len(chain)} stages")
    return [stage.ways[way] for stage, way in zip(chain.stages, ways, strict=True)]


def _sizes(chain: Chain, savings: Sequence[Saving]) -> list[int]:
    """The bytes of ā_0..ā_{n-1}; what the last stage saves is used at once and never moves."""
    return [chain.input_bytes, *(way.saved_bytes for way in savings[:-1])]


@dataclass(frozen=True, slots=True)
class _Copy:
    """Bytes that flow out of memory, the last of them at the time `end`."""

    bytes: float
    end: float


@dataclass(slots=True)
class _Phase:
    """Forwards 1..n from the start of the step on, or backwards 1..n from its end on, against the clock."""

    budget: int
    rate: float
    now: float = 0  # when the operation before has ended
    kept: float = 0  # bytes that stay
    link_free: float = 0
    copies: list[_Copy] = field(default_factory=list)
    # Of each operation: when it ends, and how many bytes on the move of the other phase it has room for.
    ends: list[tuple[float, float]] = field(default_factory=list)

    def run(self, duration: float, reads: float, makes: float) -> bool:
        """One operation as soon as there is room; False if there never is. It needs the whole value it reads."""
        room = self.budget - self.kept - reads - makes
        if room < 0:
            return False
        self.now = max(self.now, self.when_below(room)) + duration
        self.ends.append((self.now, self.budget - makes))
        return True

    def let_go(
        self, value: float, part: float, ready: float, waits_before: float = 0, waits_after: float = 0
    ) -> None:
        """Part of the value just read leaves, from `ready` on at the earliest; the rest stays."""
        self.kept += value - part
        end, room = self.ends[-1]
        self.ends[-1] = end, room - self.kept  # a part that is still here when it comes back is here once
        if part > 0:
            flowed = max(ready, self.link_free) + waits_before + part / self.rate
            self.copies.append(_Copy(part, flowed))
            self.link_free = flowed + waits_after

    def when_below(self, room: float) -> float:
        """From when on at most `room` bytes of the copies so far are still in memory."""
        after = 0.0
        for copy in reversed(self.copies):
            if after + copy.bytes > room:
                return copy.end - (room - after) / self.rate
            after += copy.bytes
        return 0


def _together(forward: _Phase, backward: _Phase) -> float:
    """The least time of both phases: nothing comes back before everything has gone, and each operation has room for
    what the other phase has on the move."""
    time = forward.now + backward.now
    if forward.copies:
        time = max(time, forward.link_free + backward.link_free)
    for one, other in ((forward, backward), (backward, forward)):
        for end, room in one.ends:
            time = max(time, end + other.when_below(room))
    return time
