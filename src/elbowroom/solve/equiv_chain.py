"""`equiv-chain`: treat a join as one chain whose steps group equal distances from the loss (000 §4).

Every chain step is one step of each branch that reaches that far, and a checkpoint holds one value per branch. The
chain is reversed optimally with c slots of one value per branch each; the largest c that fits is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import final

from elbowroom.problem import Join, Problem
from elbowroom.schedule import Backward, Forward, Operation, simulate
from elbowroom.solve.join import JoinTable, least_slots
from elbowroom.solve.method import Found, Method, Options, Status


@final
class EquivChain(Method):
    name = "equiv-chain"
    kinds = ("join",)
    summary = "reverses all branches in step, as one chain; a baseline for join"
    exact = False

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Join)
        least = least_slots(_as_chain(problem))
        return simulate(problem, _schedule(problem, least)).peak_bytes

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Join)
        low, high = least_slots(_as_chain(problem)), max(problem.lengths) + 1
        best = _schedule(problem, low)
        while low < high:  # the largest number of chain slots that fits
            middle = (low + high + 1) // 2
            schedule = _schedule(problem, middle)
            if simulate(problem, schedule).peak_bytes <= budget:
                low, best = middle, schedule
            else:
                high = middle - 1
        return Found(best, Status.HEURISTIC, notes={"chain_slots": low})


def _as_chain(join: Join) -> Join:
    return Join((max(join.lengths),), join.forward_time, join.backward_time, join.loss_time, (1,))


@lru_cache(maxsize=64)
def _schedule(join: Join, slots: int) -> tuple[Operation, ...]:
    return tuple(_expand(join, JoinTable(_as_chain(join), slots, lambda part: None).operations()))


def _expand(join: Join, operations: Iterator[Operation]) -> Iterator[Operation]:
    """Each step of the chain, on every branch that is long enough."""
    longest = max(join.lengths)
    for op in operations:
        if not isinstance(op, Forward | Backward):
            yield op
            continue
        assert isinstance(op.at, tuple)
        for k, length in enumerate(join.lengths):
            step = op.at[1] - (longest - length)
            if step < 1:
                continue
            if isinstance(op, Backward):
                yield Backward((k + 1, step))
            else:  # a branch's own input stays, whatever the chain keeps
                yield Forward((k + 1, step), "input" if step == 1 else op.save)
