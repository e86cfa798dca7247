"""`sqrt`: about √L equal segments, the classical answer for equal layers (Chen et al., cited in all four papers)."""

from __future__ import annotations

import math
from typing import final

from elbowroom.problem import Chain, Problem
from elbowroom.solve.method import Found, Method, Options, Status
from elbowroom.solve.segments import Segments, segmented
from elbowroom.solve.sequential import equal_segments


@final
class Sqrt(Method):
    name = "sqrt"
    kinds = ("chain",)
    summary = "√L equal segments, each recomputed once"
    exact = False
    needs_budget = False

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Chain)
        return Segments(problem).peak(_ends(problem))

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Chain)
        ends = _ends(problem)
        time = Segments(problem).time(ends)
        return Found(segmented(ends), Status.HEURISTIC, time, {"segments": len(ends)})


def _ends(chain: Chain) -> list[int]:
    return equal_segments(len(chain), max(1, round(math.sqrt(len(chain) - 1))))
