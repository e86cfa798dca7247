"""What every method that moves values must satisfy, on random chains and links: the contract of `solve`."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from elbowroom.errors import InputError
from elbowroom.problem import Platform
from elbowroom.schedule import Offload, simulate
from elbowroom.solve import METHODS, Options, Status, solve
from elbowroom.solve.offload.limits import bound_time
from problems import byte_chain, random_chain

NAMES = [name for name, method in METHODS.items() if method.needs_link]
LINKS = (
    Platform(bandwidth=1.0),
    Platform(bandwidth=3.0, host_bytes=9),
    Platform(to_host=2.0, from_host=1.0, duplex=1.0),
    Platform(to_host=1.0, from_host=4.0, duplex=0.0, seconds_per_copy=0.5, host_bytes=12),
)


def least(chain, name, platform):
    return METHODS[name].least_budget(chain, Options(platform=platform))


def check(chain, result, budget, platform):
    assert result.feasible
    again = simulate(chain, result.schedule, budget=budget, platform=platform)
    assert (again.time, again.peak_bytes) == (result.time, result.peak_bytes)
    assert result.peak_bytes <= budget
    assert platform.host_bytes is None or again.host_peak_bytes <= platform.host_bytes
    assert result.time >= result.notes["bound_time"] * (1 - 1e-9)
    if again.recomputed_forwards == 0:
        assert result.time >= bound_time(chain, budget, platform) * (1 - 1e-9)


def small_chains(seed, count):
    rng = Random(seed)
    return [random_chain(rng, rng.randint(1, 6), alternatives=i % 2 == 1) for i in range(count)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("platform", LINKS)
def test_schedules_are_what_they_claim(name, platform):
    for chain in small_chains(1, 12):
        floor = least(chain, name, platform)
        for budget in (floor, floor + 1, floor + 5, floor + 60):
            check(chain, solve(chain, budget, name, platform=platform), budget, platform)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("platform", LINKS[:2])
def test_the_least_budget_is_the_least(name, platform):
    for chain in small_chains(2, 12):
        floor = least(chain, name, platform)
        if floor > 0:
            refused = solve(chain, floor - 1, name, platform=platform)
            assert refused.status is Status.INFEASIBLE
            assert refused.least_budget == floor


@pytest.mark.parametrize("name", NAMES)
def test_a_link_is_needed_and_named(name):
    with pytest.raises(InputError, match=r"^bandwidth: missing; .*link"):
        solve(small_chains(3, 1)[0], 100, name)


@pytest.mark.parametrize("name", NAMES)
def test_with_room_for_all_nothing_moves(name):
    for chain in small_chains(4, 8):
        everything = METHODS["store-all"].least_budget(chain, Options())
        result = solve(chain, everything, name, platform=LINKS[0])
        assert result.time <= solve(chain, everything, "store-all").time
        if not any(stage.alternatives for stage in chain.stages):
            assert not any(isinstance(operation, Offload) for operation in result.schedule)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_that_share_no_divisor(name):
    """Sizes and times of real networks, down to the least budget, within host memory that is short."""
    rng = Random(5)
    for stages in (2, 6, 11):
        chain = byte_chain(rng, stages)
        fast = sum(stage.saved_bytes for stage in chain.stages) / sum(stage.forward_time for stage in chain.stages)
        for platform in (Platform(bandwidth=fast / 2), Platform(to_host=fast, from_host=fast, host_bytes=10**8)):
            floor = least(chain, name, platform)
            everything = METHODS["store-all"].least_budget(chain, Options())
            for budget in (floor, floor + 1, (floor + everything) // 2, everything, 10 * everything):
                if budget >= floor:
                    check(chain, solve(chain, budget, name, platform=platform), budget, platform)


@pytest.mark.parametrize("name", NAMES)
def test_no_room_on_the_host_leaves_what_needs_none(name):
    """With a host that takes nothing, a method that recomputes does no worse than without a link; others save all."""
    for chain in small_chains(6, 6):
        nothing = replace(LINKS[0], host_bytes=0)
        floor = least(chain, name, nothing)
        result = solve(chain, floor, name, platform=nothing)
        check(chain, result, floor, nothing)
        sizes = [chain.input_bytes, *(stage.saved_bytes for stage in chain.stages)]
        moved = [op for op in result.schedule if isinstance(op, Offload)]
        assert not moved or min(sizes) == 0
