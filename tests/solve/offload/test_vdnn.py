"""vDNN's rule on chains: every threshold on computation per byte, all above it or every other one."""

from __future__ import annotations

from random import Random

from elbowroom.problem import Chain, Platform, Stage
from elbowroom.schedule import simulate
from elbowroom.solve import solve
from elbowroom.solve.offload.limits import SavedChain
from elbowroom.solve.offload.vdnn import by_time_per_byte
from problems import byte_chain, random_chain


def sets_by_the_rule(chain: Chain) -> list[list[int]]:
    """For each ratio that occurs, the values whose ratio is at least that; and every other one of them."""
    sizes = [chain.input_bytes, *(stage.saved_bytes for stage in chain.stages)]
    ratio = {k: stage.forward_time / sizes[k] for k, stage in enumerate(chain.stages) if sizes[k]}
    sets: list[list[int]] = [[]]
    for threshold in set(ratio.values()):
        above = [k for k in ratio if ratio[k] >= threshold]
        sets += [above, above[0::2]]
    return sets


def test_it_is_the_best_of_all_thresholds():
    rng = Random(1)
    for stages in (1, 2, 4, 7, 9):
        chain = byte_chain(rng, stages)  # no two ratios are equal
        saved = SavedChain.own(chain)
        fast = sum(saved.value_bytes) / saved.time
        for platform in (Platform(bandwidth=fast), Platform(to_host=3 * fast, from_host=fast)):
            low, high = saved.least_bytes(platform), saved.peak_bytes
            for budget in (low, (2 * low + high) // 3, (low + 2 * high) // 3, high):
                graded = [saved.offloading(values, budget, platform) for values in sets_by_the_rule(chain)]
                times = [each.time for each in graded if each is not None]
                assert solve(chain, budget, "vdnn", platform=platform).time == min(times)


def test_values_that_hide_a_copy_come_first():
    slow, fast = Stage("slow", 9, 9, 4, 4, 4), Stage("fast", 1, 1, 4, 4, 4)
    chain = Chain(4, 4, (fast, slow, fast, slow, fast, fast))
    assert by_time_per_byte(SavedChain.own(chain)) == [1, 3, 0, 2, 4, 5]


def test_a_short_host_is_kept_to():
    rng = Random(2)
    for _ in range(40):
        chain = random_chain(rng, rng.randint(2, 7), alternatives=True)
        platform = Platform(bandwidth=rng.choice([1, 3]), host_bytes=rng.randint(0, 12))
        least = solve(chain, 0, "vdnn", platform=platform).least_budget or 0
        for budget in (least, least + 2):
            result = solve(chain, budget, "vdnn", platform=platform)
            again = simulate(chain, result.schedule, budget=budget, platform=platform)
            assert again.host_peak_bytes <= platform.host_bytes
