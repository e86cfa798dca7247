"""The combined method: never slower than what it combines, and faster where both together are."""

from __future__ import annotations

from random import Random

from elbowroom.problem import Chain, Platform, Stage
from elbowroom.schedule import Forward, Offload, simulate
from elbowroom.solve import METHODS, Options, solve
from problems import byte_chain, random_chain

PARTS = ("floating", "offload-best", "pofo", "autocapper")


def link_of(chain, rate):
    """At 1, what is saved can go and come back while the chain computes."""
    saved = sum(stage.saved_bytes for stage in chain.stages)
    return Platform(
        bandwidth=rate * 2 * saved / sum(stage.forward_time + stage.backward_time for stage in chain.stages)
    )


def times(chain, budget, platform):
    for name in PARTS:
        method = METHODS[name]
        if method.least_budget(chain, Options(platform=platform)) <= budget:
            yield solve(chain, budget, name, platform=platform if method.needs_link else None).time


def test_it_is_never_slower_than_its_parts():
    rng = Random(1)
    for _ in range(12):
        chain = random_chain(rng, rng.randint(2, 6), alternatives=True)
        platform = Platform(bandwidth=rng.choice([0.5, 1.0, 3.0]))
        least = METHODS["combined"].least_budget(chain, Options(platform=platform))
        for budget in (least, least + 2, least + 6):
            result = solve(chain, budget, "combined", platform=platform)
            assert result.time <= min(times(chain, budget, platform), default=result.time) * (1 + 1e-9)


def test_it_is_faster_where_both_together_are():
    """The link carries half of what must go; the rest is computed again."""
    rng = Random(2)
    chain = byte_chain(rng, 10)
    platform = link_of(chain, 0.4)
    options = Options(platform=platform)
    everything = METHODS["store-all"].least_budget(chain, options)
    least = METHODS["floating"].least_budget(chain, options)
    budget = (2 * least + everything) // 3
    result = solve(chain, budget, "combined", platform=platform)
    alone = min(solve(chain, budget, name, platform=platform).time for name in ("floating", "offload-best"))
    assert result.time < 0.98 * alone
    assert any(isinstance(operation, Offload) for operation in result.schedule)
    assert simulate(chain, result.schedule, budget=budget, platform=platform).recomputed_forwards > 0


def test_auto_takes_it_where_there_is_a_link():
    chain = byte_chain(Random(3), 6)
    everything = METHODS["store-all"].least_budget(chain, Options())
    platform = link_of(chain, 1.0)
    assert solve(chain, everything - 1, platform=platform).solver == "combined"
    assert solve(chain, everything, platform=platform).solver == "store-all"
    assert solve(chain, everything - 1).solver == "floating"


def test_a_step_that_needs_nothing_but_one_move():
    """One large value, read at the beginning and at the end, and time enough for it to go and come back."""
    # It must be there with the next stage's saved set, and come back while there are two of those.
    stages = [Stage("large", 1, 1, 0, 100, 0), *(Stage(f"s{i}", 10, 10, 0, 20, 0) for i in range(4))]
    chain = Chain(0, 0, tuple(stages))
    result = solve(chain, 140, "combined", platform=Platform(bandwidth=10.0))
    assert result.time == 82
    assert [op for op in result.schedule if isinstance(op, Offload)] == [Offload(1, "all")]
    assert sum(isinstance(op, Forward) for op in result.schedule) == 5
