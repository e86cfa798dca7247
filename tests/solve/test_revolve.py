"""`revolve` against an independent implementation of Griewank and Walther's algorithm."""

from __future__ import annotations

from itertools import pairwise

import pytest
from checkpoint_schedules import Revolve
from checkpoint_schedules.schedule import EndReverse
from checkpoint_schedules.schedule import Forward as TheirForward

from elbowroom.problem import Chain, Stage
from elbowroom.schedule import Forward
from elbowroom.solve import solve


def their_forward_steps(steps: int, snapshots: int) -> int:
    total = 0
    for action in Revolve(steps, snapshots):
        if isinstance(action, EndReverse):
            break
        if isinstance(action, TheirForward):
            total += action.n1 - action.n0
    return total


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 13, 21, 34, 55])
def test_forward_steps_equal_checkpoint_schedules(steps):
    """With activations of one byte: snapshots (the input among them), one to read from and one to write to."""
    chain = Chain(1, 0, tuple(Stage(f"s{i}", 1, 0, 1, 1, 0) for i in range(steps)))
    for snapshots in range(1, 13):
        result = solve(chain, snapshots + 2, "revolve")
        ours = sum(isinstance(op, Forward) for op in result.schedule)
        assert ours == their_forward_steps(steps, snapshots)


def test_every_backward_follows_its_own_saving_forward():
    chain = Chain(1, 1, tuple(Stage(f"s{i}", i % 3 + 1, 1, 1, 2, 1) for i in range(12)))
    schedule = solve(chain, 9, "revolve").schedule
    for before, op in pairwise(schedule):
        if op.to_json()[0] == "backward":
            assert before == Forward(op.at, "all")
