"""`vdnn`: offload what operations with much computation per byte read (after vDNN++, as 001 § 3.4.1 has it).

vDNN++ offloads the inputs of convolutions, of all or of every other, because these compute long enough to hide a
copy. A chain does not tell which stages those are. So the values are ranked by the time of the forward that reads
them per byte, every threshold is tried, and of the values above it all, or every other one. The referee says which is
fastest.
"""

from __future__ import annotations

from typing import final

from elbowroom.problem import Chain, Problem
from elbowroom.solve.method import Found, Method, Options
from elbowroom.solve.offload.limits import SavedChain
from elbowroom.solve.offload.sets import Trials, least_budget, saved_chains


@final
class Vdnn(Method):
    name = "vdnn"
    kinds = ("chain",)
    summary = "offloads what is read by operations with much computation per byte, all or every other; best threshold"
    exact = False
    needs_link = True

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Chain)
        return least_budget(problem, options.platform)

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Chain)
        trials = Trials(problem, budget, options.platform)
        chains = saved_chains(problem, options.platform)
        for number, saved in enumerate(chains):
            ranked = by_time_per_byte(saved)
            for count in range(len(ranked) + 1):
                above = sorted(ranked[:count])
                trials.attempt(saved, above)
                trials.attempt(saved, above[::2])
                options.progress((number + (count + 1) / (len(ranked) + 1)) / len(chains))
        trials.attempt_eager()  # the lowest threshold, but for what the host has no room for
        return trials.found()


def by_time_per_byte(saved: SavedChain) -> list[int]:
    """The values that have bytes, by falling time per byte of the forward that reads them: k + 1 reads ā_k."""
    sizes = saved.value_bytes
    values = [k for k in range(len(saved.chain)) if sizes[k]]
    return sorted(values, key=lambda k: (-saved.savings[k].forward_time / sizes[k], k))
