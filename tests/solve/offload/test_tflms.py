"""TFLMS's schedules: two numbers and no knowledge of memory, so that nothing in them waits for room."""

from __future__ import annotations

from random import Random

from elbowroom.errors import InvalidSchedule
from elbowroom.problem import Chain, Platform, Stage
from elbowroom.schedule import Backward, Forward, Offload, Prefetch, simulate
from elbowroom.solve import METHODS, Options, solve
from elbowroom.solve.offload.limits import SavedChain
from elbowroom.solve.offload.tflms import candidates, written
from problems import byte_chain, random_chain

LINKS = (
    Platform(bandwidth=1.0),
    Platform(to_host=2.0, from_host=1.0, duplex=1.0),
    Platform(bandwidth=2.0, host_bytes=9, seconds_per_copy=0.5),
)


def by_hand(chain: Chain, tensors: int, ahead: int):
    """The same schedule, written down stage by stage: ā_k leaves when it is made, and is asked back before backward
    k + 1 + ahead, or before the first backward."""
    n = len(chain)
    sizes = [chain.input_bytes, *(stage.saved_bytes for stage in chain.stages)]
    moved = [k for k in range(n - 1) if sizes[k]][:tensors]

    def named(k: int) -> tuple[int, str]:
        return (k, "all") if k else (1, "input")

    schedule = [Offload(1, "input")] if 0 in moved else []
    for at in range(1, n + 1):
        schedule.append(Forward(at, "all"))
        schedule += [Offload(k, "all") for k in moved if k == at]
    for at in range(n, 0, -1):
        schedule += [Prefetch(*named(k)) for k in reversed(moved) if min(n, k + 1 + ahead) == at]
        schedule.append(Backward(at))
    return schedule


def test_both_numbers_mean_what_they_say():
    rng = Random(1)
    for _ in range(40):
        chain = random_chain(rng, rng.randint(1, 6))
        for tensors in range(len(chain)):
            for ahead in range(len(chain)):
                assert list(written(SavedChain.own(chain), tensors, ahead)) == by_hand(chain, tensors, ahead)


def test_it_is_the_fastest_of_all_pairs_that_fit_and_the_least_budget_is_the_least_peak():
    rng = Random(2)
    for number in range(40):
        chain = random_chain(rng, rng.randint(1, 6))
        platform = LINKS[number % 3]
        tried = []
        for tensors in range(len(chain)):
            for ahead in range(len(chain)):
                try:
                    each = simulate(chain, by_hand(chain, tensors, ahead), platform=platform)
                except InvalidSchedule:
                    continue
                tried.append((each.peak_bytes, each.time))
        least = min(peak for peak, _ in tried)
        assert METHODS["tflms"].least_budget(chain, Options(platform=platform)) == least
        for budget in {peak for peak, _ in tried}:
            fastest = min(time for peak, time in tried if peak <= budget)
            assert solve(chain, budget, "tflms", platform=platform).time == fastest


def test_nothing_waits_for_room():
    """Within its budget a schedule takes the time that it takes without any."""
    rng = Random(3)
    for number in range(30):
        chain = random_chain(rng, rng.randint(2, 7), alternatives=True)
        platform = LINKS[number % 3]
        least = METHODS["tflms"].least_budget(chain, Options(platform=platform))
        for budget in (least, least + 1, least + 3):
            result = solve(chain, budget, "tflms", platform=platform)
            assert simulate(chain, result.schedule, platform=platform).time == result.time


def test_a_slow_link_saves_nothing_where_forwards_would_have_to_wait():
    chain = Chain(4, 4, tuple(Stage(f"s{i}", 1, 1, 4, 4, 4) for i in range(6)))
    everything = METHODS["store-all"].least_budget(chain, Options())
    slow, fast = Platform(bandwidth=0.01), Platform(bandwidth=100)
    # Even the input, which could leave at once, is still there when the last forward has ended.
    assert METHODS["tflms"].least_budget(chain, Options(platform=slow)) == everything
    assert METHODS["tflms"].least_budget(chain, Options(platform=fast)) < everything
    assert METHODS["vdnn"].least_budget(chain, Options(platform=slow)) < everything


def test_of_long_chains_a_sample_with_both_ends_is_tried():
    platform = Platform(bandwidth=1e10)
    chain = byte_chain(Random(4), 40)
    tried = candidates(chain, platform)
    numbers = {each.tensors for each in tried}
    assert {0, 39} <= numbers
    assert len(numbers) == 24
    assert {0, 39} <= {each.layers_ahead for each in tried}
    least = min(each.peak_bytes for each in tried)
    assert solve(chain, least, "tflms", platform=platform).peak_bytes == least
