"""`store-all`: what training does when nobody plans: save everything, recompute nothing."""

from __future__ import annotations

from typing import final

from elbowroom.problem import Chain, Join, Problem, Towers
from elbowroom.schedule import Backward, Forward, Loss, Operation, simulate
from elbowroom.solve.method import Found, Method, Options, Status
from elbowroom.solve.segments import Segments, segmented


@final
class StoreAll(Method):
    name = "store-all"
    kinds = ("chain", "join", "towers", "graph")
    summary = "save everything, recompute nothing"
    exact = False
    needs_budget = False

    def least_budget(self, problem: Problem, options: Options) -> int:
        if isinstance(problem, Chain):
            return Segments(problem).peak([len(problem)])
        return simulate(problem, store_all(problem)).peak_bytes

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        return Found(store_all(problem), Status.NO_RECOMPUTATION)


def store_all(problem: Problem) -> tuple[Operation, ...]:
    if isinstance(problem, Chain):
        return segmented([len(problem)])
    if isinstance(problem, Join):
        branches = [(k, length) for k, length in enumerate(problem.lengths, start=1)]
        forwards = [Forward((k, i), "input") for k, length in branches for i in range(1, length + 1)]
        backwards = [Backward((k, i)) for k, length in branches for i in range(length, 0, -1)]
        return (*forwards, Loss(), *backwards)
    if isinstance(problem, Towers):
        return _every_step(problem)
    return (*(Forward(v, "all") for v in problem.order), *(Backward(v) for v in reversed(problem.order)))


def _every_step(problem: Towers) -> tuple[Operation, ...]:
    steps = [((k, i), step) for k, t in enumerate(problem.towers, start=1) for i, step in enumerate(t.steps, start=1)]
    forwards = [Forward(at, "input" if step.saved_bytes is None else "all") for at, step in steps]
    return (*forwards, Loss(), *(Backward(at) for at, _ in reversed(steps)))
