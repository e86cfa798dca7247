"""`offload-best`: all methods that only offload, and a search beyond what they find; the referee keeps the fastest.

None of these methods is always the best: they choose values in models that differ from the referee's, or by rules of
thumb. What they found is where the search for other values begins (`set_search.py`); then values are let go in
another order (`order_search.py`). The result's notes say who won.
"""

from __future__ import annotations

from typing import final

from elbowroom.problem import Chain, Problem
from elbowroom.schedule import simulate
from elbowroom.solve.method import Found, Method, Options
from elbowroom.solve.offload import order_search, set_search
from elbowroom.solve.offload.autoswap import AutoSwap
from elbowroom.solve.offload.limits import SavedChain
from elbowroom.solve.offload.offload_dynprog import OffloadDynprog
from elbowroom.solve.offload.offload_dynprog_simple import OffloadDynprogSimple
from elbowroom.solve.offload.offload_greedy import OffloadGreedy
from elbowroom.solve.offload.sets import Trials, choice_of, least_budget
from elbowroom.solve.offload.tflms import Tflms
from elbowroom.solve.offload.vdnn import Vdnn

PARTS: tuple[Method, ...] = (
    OffloadGreedy(),
    OffloadDynprog(),
    OffloadDynprogSimple(),
    Vdnn(),
    Tflms(),
    AutoSwap(),
)


@final
class OffloadBest(Method):
    name = "offload-best"
    kinds = ("chain",)
    summary = "the fastest of all methods that only offload, and of a search around their sets"
    exact = False
    needs_link = True

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Chain)
        return least_budget(problem, options.platform)

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Chain)
        trials = Trials(problem, budget, options.platform)
        quiet = Options(options.slots, platform=options.platform)
        for number, method in enumerate(PARTS, start=1):
            if method.least_budget(problem, quiet) <= budget:
                found = method.find(problem, budget, quiet)
                trials.take(
                    simulate(problem, found.schedule, budget=budget, platform=options.platform), won=method.name
                )
                choice = choice_of(found.schedule)
                trials.attempt(SavedChain(problem, choice.ways), choice.values, won=method.name)
            options.progress(number / (2 * len(PARTS)))
        set_search.search(trials, lambda part: options.progress((1 + part) / 2))
        order_search.search(trials)
        return trials.found()
