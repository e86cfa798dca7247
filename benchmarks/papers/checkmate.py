"""Checkmate's two-phase rounding on a chain, as 001 §2.4.4 has it: the linear program, rounded, made to run.

A node of the program is a stage with one size, that of its output: the program knows nothing of saved sets, so what
it plans takes more memory than it thinks. Values that the linear relaxation keeps more than by half are kept, the
others are computed again where something reads them. A schedule of the chain follows in the end: a forward saves all
if the program keeps both its value and its input until the backward, and what is saved for no backward by then is run
once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from elbowroom.problem import Chain, Graph, Node
from elbowroom.schedule import Backward, Forward, Operation, simulate
from elbowroom.solve.milp import MOST_NODES, Program

__all__ = ["MOST_NODES", "checkmate"]

THRESHOLD = 0.5
SECONDS = 60.0


def checkmate(chain: Chain, budget: int) -> tuple[float, int] | None:
    """Time and peak, as the referee has them, of the schedule for a budget that it may not keep; None without one."""
    nodes = tuple(Node(stage.name, stage.forward_time, stage.output_bytes) for stage in chain.stages)
    graph = Graph(nodes, tuple(pairwise(range(len(chain)))))
    x = relaxed(Program(graph), budget - chain.input_bytes)
    if x is None:
        return None
    rounded = Program(graph)._rounded(x, THRESHOLD)
    found = simulate(chain, as_chain_schedule(len(chain), rounded))
    return found.time, found.peak_bytes


def relaxed(program: Program, budget: int) -> np.ndarray | None:
    """The variables of the linear relaxation, or None if even that does not fit."""
    rows, columns, values, limits = [], [], [], []
    for number, (row, limit) in enumerate(program._constraints()):
        rows += [number] * len(row)
        columns += list(row)
        values += list(row.values())
        limits.append(limit)
    matrix = csr_array((values, (rows, columns)), shape=(len(limits), program.count))
    cost, high = np.zeros(program.count), np.ones(program.count)
    for (_, k), variable in program.runs.items():
        cost[variable] = program.times[k]
    high[program.peak] = max(0.0, budget / program.unit)
    bounds = np.stack([np.zeros(program.count), high], axis=1)
    found = linprog(cost, A_ub=matrix, b_ub=limits, bounds=bounds, method="highs-ds", options={"time_limit": SECONDS})
    return found.x


def as_chain_schedule(n: int, schedule: Sequence[Operation]) -> list[Operation]:
    """The chain's schedule for a graph's, where node v is stage v + 1: forwards find out what they have to save."""
    computing = [op for op in schedule if isinstance(op, Forward | Backward)]
    written: list[Operation] = []
    saved: set[int] = set()
    for index, op in enumerate(computing):
        v, later = int(op.at), computing[index + 1 :]
        if isinstance(op, Backward):
            if v not in saved:
                written.append(Forward(v + 1, "all"))
            written.append(Backward(v + 1))
            saved.discard(v)
        elif made_for_backward(v, later) or not {v - 1, v} & {o.at for o in later if isinstance(o, Forward)}:
            written.append(Forward(v + 1, "all"))
            saved.add(v)
        else:
            written.append(Forward(v + 1, "input" if is_read(v - 1, later) else "nothing"))
    return written


def made_for_backward(v: int, later: Sequence[Operation]) -> bool:
    """Whether its own backward is what comes next."""
    return bool(later) and later[0] == Backward(v)


def is_read(v: int, later: Sequence[Operation]) -> bool:
    """Whether a value is read before it is made again. Node -1 is the input, which stays as long as it is read."""
    for op in later:
        if op.at == v + 1:
            return True
        if op == Forward(v, "all") or (isinstance(op, Forward) and op.at == v):
            return False
    return False
