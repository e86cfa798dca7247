"""The host link: transfers beside computation, memory released when they end, stalls counted."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elbowroom.errors import InputError, InvalidSchedule
from elbowroom.problem import Chain, Join, Platform, Stage
from elbowroom.schedule import Backward, Discard, Forward, Offload, Prefetch, simulate

# Four equal stages: forward 1, backward 1, a = 2, ā = 4, δ = 2, input 1.
CHAIN = Chain(1, 1, tuple(Stage(f"s{i}", 1, 1, 2, 4, 2) for i in range(1, 5)))
PLAIN = [Forward(i, "all") for i in range(1, 5)] + [Backward(i) for i in range(4, 0, -1)]
MOVING = [
    Forward(1, "all"),
    Forward(2, "all"),
    Offload(1, "all"),
    Forward(3, "all"),
    Offload(2, "all"),
    Forward(4, "all"),
    Backward(4),
    Prefetch(2, "all"),
    Backward(3),
    Prefetch(1, "all"),
    Backward(2),
    Backward(1),
]


def run(schedule, bandwidth, budget=None, chain=CHAIN):
    return simulate(chain, schedule, budget=budget, platform=Platform(bandwidth))


def test_offloading_lowers_the_peak_and_waits_are_counted():
    assert simulate(CHAIN, PLAIN).peak_bytes == 21
    result = run(MOVING, 4.0)  # a saved set takes one unit of time
    assert result.peak_bytes == 15
    assert result.link_time == 4
    assert result.stall_time == 2  # backward 3 and backward 2 each wait for their prefetch
    assert result.time == 10


def test_the_time_line_covers_the_step_without_gaps():
    spans = run(MOVING, 4.0).spans
    assert spans[0].start == 0
    assert spans[-1].end == 10
    assert all(before.end == after.start for before, after in pairwise(spans))


def test_a_fast_link_hides_everything():
    early = [op for op in MOVING if not isinstance(op, Prefetch)]
    early[early.index(Backward(4)) : early.index(Backward(4))] = [Prefetch(2, "all"), Prefetch(1, "all")]
    result = run(early, 1e9)
    assert result.stall_time == pytest.approx(0, abs=1e-6)
    assert result.time == pytest.approx(8)


def test_a_slow_link_releases_late():
    """With a slow link the first transfer runs on under the next operations: no room is gained before its end."""
    slow = run(MOVING, 0.5)
    assert slow.peak_bytes == 21
    assert slow.time > 30


def test_with_a_budget_computation_waits_for_room():
    free = run(MOVING, 2.0)
    assert free.peak_bytes == 19
    tight = run(MOVING, 2.0, budget=15)
    assert tight.peak_bytes <= 15
    assert tight.time > free.time


def test_what_no_waiting_mends_is_refused():
    with pytest.raises(InvalidSchedule, match="no pending offload makes room"):
        run(MOVING, 2.0, budget=10)


def test_a_prefetch_waits_for_a_computation_to_make_room():
    """Prefetching before backward 4 does not fit; it starts when backward 4 has ended, without being lost."""
    early = [op for op in MOVING if op != Prefetch(2, "all")]
    early.insert(early.index(Backward(4)), Prefetch(2, "all"))
    assert run(early, 1e9).peak_bytes == 17
    result = run(early, 1e9, budget=13)
    assert result.peak_bytes == 13
    assert result.time == pytest.approx(8)


def test_a_prefetch_that_takes_the_room_of_a_computation_is_refused():
    early = [op for op in MOVING if op != Prefetch(2, "all")]
    early.insert(early.index(Backward(4)), Prefetch(2, "all"))
    with pytest.raises(InvalidSchedule, match=r"backward 4\): waits for ever"):
        run(early, 4.0, budget=15)


def test_letting_go_of_an_input_that_is_being_offloaded_waits_for_the_transfer():
    """forward 2 saves nothing, but its input is on its way to the host: it leaves when it has arrived there."""
    schedule = [Forward(1, "input"), Offload(2, "input"), Forward(2, "nothing"), Forward(3, "all"), Forward(4, "all")]
    schedule += [Backward(4), Backward(3), Prefetch(2, "input"), Forward(2, "all"), Backward(2)]
    schedule += [Forward(1, "all"), Backward(1)]
    slow, fast = run(schedule, 0.5), run(schedule, 1e9)
    assert next(s.bytes for s in slow.spans if s.operation == 3) == 1 + 2 + 2 + 2 + 4
    assert next(s.bytes for s in fast.spans if s.operation == 3) == 1 + 2 + 2 + 4


def test_data_in_flight_can_be_read_and_stays_until_read():
    """Offload 1 is issued before forward 2, which reads it: the device copy lasts until both have ended."""
    schedule = [Forward(1, "all"), Offload(1, "all"), Forward(2, "all"), Forward(3, "all"), Forward(4, "all")]
    schedule += [Backward(4), Backward(3), Prefetch(1, "all"), Backward(2), Backward(1)]
    fast = run(schedule, 1e9)
    levels = {s.operation: s.bytes for s in fast.spans}
    assert levels[2] == 1 + 2 + 4 + 4  # forward 2: ā1 still there although its transfer has long ended
    assert levels[3] == 1 + 2 + 4 + 4  # forward 3: ā1 gone


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        ([Offload(1, "all")], "is not in memory"),
        ([Forward(1, "all"), Offload(1, "all"), Offload(1, "all")], "is not in memory"),
        ([Forward(1, "all"), Prefetch(1, "all")], "was not offloaded"),
        ([Forward(1, "all"), Forward(2, "all"), Offload(2, "input")], "is part of stage 1's saved set"),
        (
            [*PLAIN[:4], Offload(1, "all"), Backward(4), Backward(3), Prefetch(1, "all"), Prefetch(1, "all")],
            "is on its way already",
        ),
        ([Forward(1, "all"), Offload(1, "all"), Discard(1, "all")], "is on its way to the host"),
        ([Forward(1, "all"), Offload(1, "all"), Forward(1, "all")], "is on its way to the host"),
        ([*PLAIN[:4], Offload(4, "all"), Backward(4)], "was offloaded and no prefetch brings it back"),
        (
            [*PLAIN[:4], Offload(1, "all"), Backward(4), Backward(3), Prefetch(1, "all"), Forward(1, "all")],
            "is on its way back from the host",
        ),
    ],
)
def test_refusals(schedule, reason):
    with pytest.raises(InvalidSchedule, match=reason):
        run(schedule, 4.0)


def test_without_a_link_nothing_moves():
    with pytest.raises(InvalidSchedule, match="no host link"):
        simulate(CHAIN, MOVING)
    with pytest.raises(InputError, match="chains only"):
        simulate(Join((1,), 1, 1, 1, (0,)), [], platform=Platform(1.0))


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=7),
    st.floats(0.1, 100),
    st.data(),
)
def test_any_offloading_of_a_stored_chain(numbers, bandwidth, data):
    """Offload any saved sets after their last forward use and prefetch each before its backward: always valid,
    never faster than computing alone, never beyond both resources in a row, and within any budget it accepts."""
    chain = Chain(3, 3, tuple(Stage(f"s{i}", 1, 2, a, a + b, a) for i, (a, b) in enumerate(numbers)))
    n = len(chain)
    moved = data.draw(st.sets(st.integers(1, n - 1)))
    schedule = []
    for i in range(1, n + 1):
        schedule.append(Forward(i, "all"))
        if i - 1 in moved:
            schedule.append(Offload(i - 1, "all"))
    for i in range(n, 0, -1):
        # stage i's own set, and the one before, which holds its input
        schedule += [Prefetch(j, "all") for j in (i, i - 1) if j in moved and (j == i - 1 or i == n)]
        schedule.append(Backward(i))
    result = simulate(chain, schedule, platform=Platform(bandwidth))
    transfers = 2 * sum(chain.stages[j - 1].saved_bytes for j in moved) / bandwidth
    assert result.link_time == pytest.approx(transfers, abs=1e-6)
    assert 3 * n <= result.time + 1e-6
    assert result.time <= 3 * n + transfers + 1e-6
    assert (
        result.peak_bytes
        <= simulate(chain, [op for op in schedule if not isinstance(op, Offload | Prefetch)]).peak_bytes
    )
    again = simulate(chain, schedule, platform=Platform(bandwidth), budget=result.peak_bytes)
    assert again.time == result.time
    assert again.peak_bytes == result.peak_bytes
