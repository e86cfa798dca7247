"""`pofo`: persistent checkpoints, of which any may be on the host until after the loss (001 ch. 4).

The dynamic program (`kernels/pofo.py`) reckons with a link that gives room back byte by byte and is idle at the loss.
Its tables hold a schedule for every amount of memory up to the budget. The referee releases whole values, takes room
for whole values, and does not wait at the loss: what it finds fastest is taken.
"""

from __future__ import annotations

from typing import final

from elbowroom.problem import Chain, Problem
from elbowroom.solve.method import Found, Method, Options
from elbowroom.solve.offload.graded import fallback, without_need
from elbowroom.solve.offload.leanest import Leanest
from elbowroom.solve.offload.pofo_reading import CREDITS, readings
from elbowroom.solve.offload.pofo_table import Table, check_size


@final
class Pofo(Method):
    name = "pofo"
    kinds = ("chain",)
    summary = "recomputes and offloads as 001 ch. 4 does; O(stages² · levels³ + stages³ · levels²)"
    exact = False
    needs_link = True

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Chain)
        check_size(problem)
        return Leanest(problem).least_bytes(options.platform)

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Chain)
        fastest = without_need(problem, budget)
        if fastest is not None:
            return fastest
        lean = Leanest(problem)
        best = fallback(lean, budget, options)
        table = Table(lean, budget, options)
        seen = set()
        for credit in CREDITS:
            for found in readings(table, credit):
                if found[0].promise >= best.simulation.time:
                    break  # for less memory the promises are no better
                for reading in found:
                    if reading.promise < best.simulation.time and reading.moving not in seen:
                        seen.add(reading.moving)
                        best = min([best, *reading.graded(problem, budget, options)], key=lambda each: each.rank)
        return best.found(problem, levels=table.space.levels)
