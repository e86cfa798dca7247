"""What offloading alone must live with: the bytes of each operation, the peak, the least budget, a bound on time.

The chain computes every forward once, saving all, and values ā_k go to the host, where ā_0 is the chain's input. With
𝓜 for what an operation needs beside the values before its stage, the last of which it reads (001 eq. 3.1 to 3.3):

    𝓜_Fℓ = o_Fℓ + āℓ + δ_n            the loss has a gradient of its own here, which is there from the start
    𝓜_Bℓ = o_Bℓ + āℓ + δℓ + δℓ₋₁
    peak  = max over ℓ of max(𝓜_Fℓ, 𝓜_Bℓ) + Σ of ā_k for k < ℓ
    least = max over ℓ of max(𝓜_Fℓ, 𝓜_Bℓ) + ā_ℓ₋₁
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from elbowroom.problem import Chain, Platform, Saving
from elbowroom.schedule import Simulation
from elbowroom.solve.offload.placing import ordered_moves, place, save_all


@dataclass(frozen=True)
class SavedChain:
    """A chain of which each stage saves all, in one of its ways."""

    chain: Chain
    ways: tuple[int, ...]

    @classmethod
    def own(cls, chain: Chain) -> SavedChain:
        """Each stage in its own way."""
        return cls(chain, (0,) * len(chain))

    @cached_property
    def savings(self) -> tuple[Saving, ...]:
        return tuple(stage.ways[way] for stage, way in zip(self.chain.stages, self.ways, strict=True))

    @cached_property
    def value_bytes(self) -> tuple[int, ...]:
        """ā_k for k = 0..n."""
        return (self.chain.input_bytes, *(saving.saved_bytes for saving in self.savings))

    @cached_property
    def forward_bytes(self) -> tuple[int, ...]:
        """𝓜_F of the stages 1..n; the first of these numbers is that of stage 1."""
        loss = self.chain.gradient_bytes[-1]
        return tuple(way.forward_overhead_bytes + way.saved_bytes + loss for way in self.savings)

    @cached_property
    def backward_bytes(self) -> tuple[int, ...]:
        """𝓜_B of the stages 1..n."""
        after, before = self.chain.gradient_bytes[1:], self.chain.gradient_bytes[:-1]
        return tuple(
            way.backward_overhead_bytes + way.saved_bytes + mine + next_one
            for way, mine, next_one in zip(self.savings, after, before, strict=True)
        )

    @cached_property
    def time(self) -> float:
        """All of computing, each operation once."""
        return sum(way.forward_time + way.backward_time for way in self.savings)

    @cached_property
    def peak_bytes(self) -> int:
        """What is needed if nothing moves."""
        return self.bytes_without(())

    def bytes_without(self, values: Sequence[int]) -> int:
        """The peak if those values are on the host except for the operations that read them."""
        gone, stored, peak = set(values), 0, 0
        needs = zip(self.forward_bytes, self.backward_bytes, strict=True)
        for before, need in enumerate(map(max, needs)):
            read = self.value_bytes[before]
            peak = max(peak, need + stored + read)
            stored += 0 if before in gone else read
        return peak

    def eager_values(self, platform: Platform) -> list[int]:
        """The values that go where as little as possible shall stay: from the first on, what the host has room for.

        The last one that could go is read by the operations on both sides of the loss, and stays.
        """
        room = platform.host_bytes
        values = []
        for value in range(len(self.chain) - 1):
            size = self.value_bytes[value]
            if size and (room is None or size <= room):
                values.append(value)
                room = None if room is None else room - size
        return values

    def least_bytes(self, platform: Platform) -> int:
        """The peak with as much on the host as there is room for."""
        return self.bytes_without(self.eager_values(platform))

    def offloading(self, values: Sequence[int], budget: int, platform: Platform) -> Simulation | None:
        """The fastest schedule found that moves those values; None if it takes more than the budget."""
        computing = save_all(self.chain, self.ways)
        return place(self.chain, computing, ordered_moves(self.chain, values), budget, platform)

    def eager(self, budget: int, platform: Platform) -> Simulation:
        """A schedule for any budget that is no smaller than the least: everything goes that can."""
        found = self.offloading(self.eager_values(platform), budget, platform)
        assert found is not None, "moving all that can move fits the least budget"
        return found


def bound_time(chain: Chain, budget: int, platform: Platform) -> float:
    """No schedule that only offloads is faster (001 Prop. 3): it computes everything once; and what the budget cannot
    hold at the peak has left before the operation there begins and begins to come back after that."""
    ways = [stage.ways for stage in chain.stages]
    computing = sum(min(way.forward_time + way.backward_time for way in each) for each in ways)
    missing = _least_peak(chain) - budget
    if missing <= 0:
        return computing
    out, back = platform.rate_to_host, platform.rate_from_host
    assert out is not None
    assert back is not None
    return max(computing, missing / out + missing / back + 2 * platform.seconds_per_copy)


def _least_peak(chain: Chain) -> int:
    """The peak without any move, if each stage could be saved in the best of its ways for each operation."""
    stored, peak = chain.input_bytes, 0
    loss = chain.gradient_bytes[-1]
    for at, stage in enumerate(chain.stages, start=1):
        both = chain.gradient_bytes[at] + chain.gradient_bytes[at - 1]
        forward = min(way.forward_overhead_bytes + way.saved_bytes for way in stage.ways) + loss
        backward = min(way.backward_overhead_bytes + way.saved_bytes for way in stage.ways) + both
        peak = max(peak, stored + max(forward, backward))
        stored += min(way.saved_bytes for way in stage.ways)
    return peak
