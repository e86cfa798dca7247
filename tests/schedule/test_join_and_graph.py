"""The referees for joins and graphs."""

from __future__ import annotations

import pytest

from elbowroom.errors import InvalidSchedule
from elbowroom.problem import Graph, Join, Node
from elbowroom.schedule import Backward, Discard, Forward, Loss, Offload, simulate

JOIN = Join((2, 1), 1, 10, 100, (0, 1))
STORED = [Forward((1, 1), "input"), Forward((1, 2), "input"), Forward((2, 1), "input"), Loss()]
BACK = [Backward((1, 2)), Backward((1, 1)), Backward((2, 1))]


def test_slots_of_a_join_by_hand():
    result = simulate(JOIN, [*STORED, *BACK])
    assert [span.bytes for span in result.spans] == [3, 4, 5, 5, 5, 4, 2]
    assert result.time == 3 + 100 + 30
    assert result.peak_bytes == 5


def test_a_forward_that_saves_nothing_takes_no_slot():
    walked = [Forward((1, 1), "input"), Forward((1, 2), "nothing"), Forward((2, 1), "input"), Loss()]
    again = [Forward((1, 1), "input"), Backward((1, 2)), Backward((1, 1)), Backward((2, 1))]
    result = simulate(JOIN, [*walked, *again])
    assert [span.bytes for span in result.spans] == [3, 3, 4, 4, 5, 5, 4, 2]


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        ([Loss()], "the output of chain 1 is not stored"),
        ([*STORED, Loss()], "has run before"),
        ([Backward((1, 2))], "the loss has not run"),
        ([*STORED, Backward((1, 1))], "the gradient of chain 1 is at step 2"),
        ([Forward((1, 1), "all")], "saves 'nothing' or 'input'"),
        ([Forward((1, 2), "input")], "the input of step 2 is not stored"),
        ([Forward((1, 1), "input"), Forward((1, 1), "input")], "stored already"),
        ([Forward((3, 1), "input")], "there is no such step"),
        ([Forward(1, "input")], r"names its steps \[chain, step\]"),
        ([Discard((1, 2), "input")], "is not stored"),
        ([Offload((1, 1), "input")], "is not an operation of a join"),
        (STORED[:3], "ends before the loss"),
        ([*STORED, *BACK[:2]], r"ends before backward \[2, 1\]"),
    ],
)
def test_join_refusals(schedule, reason):
    with pytest.raises(InvalidSchedule, match=reason):
        simulate(JOIN, schedule)


def test_join_budget():
    with pytest.raises(InvalidSchedule, match="needs 5 slots, and the budget is 4"):
        simulate(JOIN, [*STORED, *BACK], budget=4)


DIAMOND = Graph(
    tuple(Node(n, 1, b) for n, b in (("a", 1), ("b", 2), ("c", 4), ("d", 8))), ((0, 1), (0, 2), (1, 3), (2, 3))
)


def test_graph_memory_by_hand():
    schedule = [*(Forward(v, "all") for v in range(4)), Backward(3), Backward(2), Backward(1), Backward(0)]
    result = simulate(DIAMOND, schedule)
    forward = [1, 3, 7, 15]
    # backward 3: all values, its own gradient and those of 1 and 2; then 0's gradient joins, and so on
    backward = [15 + 8 + 2 + 4, 7 + 6 + 1, 3 + 2 + 1, 1 + 1]
    assert [span.bytes for span in result.spans] == [*forward, *backward]
    assert result.time == 4


def test_graph_recomputation_and_refusals():
    schedule = [Forward(0, "all"), Forward(1, "all"), Forward(2, "all"), Forward(3, "all"), Backward(3)]
    schedule += [Discard(1), Backward(2), Forward(1, "all"), Backward(1), Backward(0)]
    assert simulate(DIAMOND, schedule).time == 5
    for bad, reason in [
        ([Forward(3, "all")], "the value of node 1 is not in memory"),
        ([*schedule[:4], Backward(1)], "misses its part from node 3"),
        ([*schedule[:5], Backward(3)], "has run before"),
        ([Forward(9, "all")], "there is no node 9"),
        (schedule[:5], "ends before backward"),
    ]:
        with pytest.raises(InvalidSchedule, match=reason):
            simulate(DIAMOND, bad)
