"""The referee for chains: memory by hand-made sums, refusals with reasons."""

from __future__ import annotations

import pytest

from elbowroom.errors import InvalidSchedule
from elbowroom.problem import Chain, Saving, Stage
from elbowroom.schedule import Backward, Discard, Forward, Loss, schedule_from_json, simulate

#             name   uF uB  a   ā  δ oF oB
A, B, C = (
    Stage("A", 1, 2, 10, 30, 9, 3, 4),
    Stage("B", 2, 3, 20, 50, 19, 5, 6, (Saving(3, 8, 25, 7, 11),)),
    Stage("C", 4, 5, 1, 7, 2, 0, 1),
)
CHAIN = Chain(100, 90, (A, B, C))
STORE_ALL = [Forward(1, "all"), Forward(2, "all"), Forward(3, "all"), Backward(3), Backward(2), Backward(1)]


def levels(schedule):
    return [span.bytes for span in simulate(CHAIN, schedule).spans]


def test_memory_while_everything_is_saved():
    assert levels(STORE_ALL) == [
        100 + 2 + 30 + 3,  # input, δ3, ā1, overhead
        100 + 2 + 30 + 50 + 5,
        100 + 2 + 30 + 50 + 7 + 0,
        100 + 2 + 30 + 50 + 7 + 19 + 1,  # backward 3: its gradient in and out
        100 + 19 + 30 + 50 + 9 + 6,
        100 + 9 + 30 + 90 + 4,
    ]


def test_time_peak_and_where():
    result = simulate(CHAIN, STORE_ALL)
    assert result.time == 17
    assert result.peak_bytes == 233
    assert result.peak_operation == Backward(1)
    assert result.forwards == {1: 1, 2: 1, 3: 1}
    assert [(s.start, s.end) for s in result.spans][:3] == [(0, 1), (1, 3), (3, 7)]


def test_memory_while_recomputing():
    schedule = [
        Forward(1, "input"),
        Forward(2, "nothing"),
        Forward(3, "all"),
        Backward(3),
        Forward(1, "input"),
        Forward(2, "all", 1),
        Backward(2),
        Forward(1, "all"),
        Backward(1),
    ]
    assert levels(schedule) == [
        100 + 2 + 10 + 3,
        100 + 2 + 10 + 20 + 5,
        100 + 2 + 20 + 7 + 0,  # a1 was let go
        100 + 2 + 20 + 7 + 19 + 1,
        100 + 19 + 10 + 3,
        100 + 19 + 10 + 25 + 7,  # the alternative way to save, with its own overheads
        100 + 19 + 10 + 25 + 9 + 11,
        100 + 9 + 30 + 3,
        100 + 9 + 30 + 90 + 4,
    ]
    assert simulate(CHAIN, schedule).time == 1 + 2 + 4 + 5 + 1 + 3 + 8 + 1 + 2


def test_discards():
    schedule = [Forward(1, "input"), Forward(2, "input"), Discard(2, "input"), *STORE_ALL[2:4]]
    rest = [Forward(1, "input"), Forward(2, "all"), Discard(2, "all"), Forward(2, "all"), Backward(2)]
    result = simulate(CHAIN, [*schedule, *rest, Forward(1, "all"), Backward(1)])
    assert result.spans[2].bytes == 100 + 2 + 20 + 7  # after a1 was discarded
    assert result.forwards[2] == 3


@pytest.mark.parametrize(
    ("schedule", "index", "reason"),
    [
        ([Forward(2, "all")], 0, "the input of stage 2 is not in memory"),
        ([Forward(1, "nothing"), Forward(1, "all")], 1, "the input of stage 1 is not in memory"),
        ([Forward(1, "input"), Forward(1, "input")], 1, "the output of stage 1 is in memory already"),
        ([Backward(3)], 0, "nothing is saved for the backward of stage 3"),
        ([Forward(1, "all"), Backward(1)], 1, "the gradient in memory is that of stage 3's output"),
        ([Forward(1, "all"), Forward(1, "nothing")], 1, "the output of stage 1 is in memory already"),
        ([Forward(1, "all"), Discard(1, "input")], 1, "the saved set of stage 1 still needs its input"),
        ([Forward(1, "all"), Forward(2, "all"), Discard(1, "all")], 2, "needs the output of stage 1"),
        ([Discard(3, "input")], 0, "is not stored on its own"),
        ([Discard(3, "all")], 0, "nothing is saved for stage 3"),
        ([Forward(4, "all")], 0, "there is no stage 4 in a chain of 3"),
        ([Forward(0, "all")], 0, "there is no stage 0"),
        ([Forward((1, 1), "all")], 0, "there is no stage"),
        ([Forward(1, "all", 1)], 0, "has 1 ways to save"),
        ([Loss()], 0, "there is no stage"),
        (STORE_ALL[:5], None, "the schedule ends before backward 1"),
        ([], None, "the schedule ends before backward 3"),
    ],
)
def test_refusals_name_the_operation_and_the_reason(schedule, index, reason):
    with pytest.raises(InvalidSchedule, match=reason) as refused:
        simulate(CHAIN, schedule)
    assert refused.value.index == index


def test_a_saved_set_serves_as_input_and_survives():
    """After `forward 1 all`, stage 2 reads a1 out of the saved set, which stays."""
    schedule = [Forward(1, "all"), Forward(2, "nothing"), Forward(3, "all"), Backward(3)]
    schedule += [Forward(2, "all"), Backward(2), Backward(1)]
    assert simulate(CHAIN, schedule).forwards == {1: 1, 2: 2, 3: 1}


def test_saving_all_replaces_the_plain_output():
    """While it runs both are there; afterwards the saved set holds the output."""
    spans = simulate(
        CHAIN,
        [Forward(1, "input"), Forward(1, "all"), Forward(2, "all"), Forward(3, "all")]
        + [Backward(i) for i in (3, 2, 1)],
    ).spans
    assert spans[1].bytes == 100 + 2 + 10 + 30 + 3
    assert spans[2].bytes == 100 + 2 + 30 + 50 + 5


def test_a_budget_is_a_bound():
    assert simulate(CHAIN, STORE_ALL, budget=233).peak_bytes == 233
    with pytest.raises(InvalidSchedule, match=r"backward 1\): needs 1 bytes more than the budget of 232"):
        simulate(CHAIN, STORE_ALL, budget=232)


def test_operations_read_and_write_themselves():
    data = [["forward", 1, "input"], ["forward", 2, "all", 1], ["backward", 2], ["discard", 2, "input"]]
    data += [["offload", 1, "all"], ["prefetch", 1, "all"], ["loss"], ["forward", [2, 3], "nothing"]]
    assert [op.to_json() for op in schedule_from_json(data)] == data
