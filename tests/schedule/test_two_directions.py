"""A link with two directions, latency, memory on the host, copies that stay, and prefetches that start later."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from elbowroom.errors import InputError, InvalidSchedule
from elbowroom.problem import Chain, Platform, Stage
from elbowroom.schedule import Backward, Forward, Offload, Prefetch, schedule_from_json, schedule_to_json, simulate
from elbowroom.schedule.link import Link, Transfer

# Six equal stages: forward 2, backward 3, a = 2, ā = 4, δ = 2, input 1.
CHAIN = Chain(1, 1, tuple(Stage(f"s{i}", 2, 3, 2, 4, 2) for i in range(1, 7)))
FORWARDS = [Forward(i, "all") for i in range(1, 7)]


def backwards(*wanted, keep=False):
    """All backwards; saved sets of the stages named come back, each asked for two backwards before it is read."""
    operations = []
    for i in range(6, 0, -1):
        operations += [Prefetch(j, "all", keep) for j in wanted if j == i - 3]
        operations.append(Backward(i))
    return operations


def moving(*stages):
    """Saved sets go as soon as they are there; they come back in time."""
    operations = []
    for forward in FORWARDS:
        operations.append(forward)
        operations += [Offload(j, "all") for j in stages if j == forward.at]
    return [*operations, *backwards(*stages)]


def times(result, resource):
    return [(span.start, span.end) for span in result.transfers if span.resource == resource]


def test_each_direction_has_a_rate_of_its_own():
    result = simulate(CHAIN, moving(2), platform=Platform(to_host=2.0, from_host=8.0))
    assert times(result, "to host") == [(4, 6)]
    assert times(result, "from host") == [(15, 15.5)]
    assert result.link_time == 2.5


def test_one_rate_serves_both_directions():
    for platform in (
        Platform(2.0, duplex=1.0),
        Platform(to_host=2.0, duplex=1.0),
        Platform(from_host=2.0, duplex=1.0),
    ):
        assert (platform.rate_to_host, platform.rate_from_host) == (2.0, 2.0)
        assert not platform.takes_turns
    assert Platform(2.0).takes_turns
    assert Platform(to_host=2.0, from_host=3.0, duplex=0).takes_turns
    assert not Platform().has_link


def crossing(platform):
    """Stage 3's saved set leaves late, while stage 2's comes back."""
    schedule = [*FORWARDS[:2], Offload(2, "all"), *FORWARDS[2:], Offload(3, "all"), Prefetch(2, "all")]
    schedule += [Backward(6), Backward(5), Prefetch(3, "all"), Backward(4), Backward(3), Backward(2), Backward(1)]
    return simulate(CHAIN, schedule, platform=platform)


def test_directions_that_are_busy_together_slow_each_other_down():
    free = crossing(Platform(to_host=2.0, from_host=2.0))
    assert times(free, "to host")[1] == times(free, "from host")[0] == (12, 14)
    shared = crossing(Platform(to_host=2.0, from_host=2.0, duplex=1.0))
    assert times(shared, "to host")[1] == times(shared, "from host")[0] == (12, 16)


def test_directions_that_take_turns_are_one_link():
    turns = crossing(Platform(to_host=2.0, from_host=2.0, duplex=0))
    assert (times(turns, "to host")[1], times(turns, "from host")[0]) == ((12, 14), (14, 16))
    one = crossing(Platform(2.0))
    assert (one.time, one.peak_bytes, one.transfers) == (turns.time, turns.peak_bytes, turns.transfers)


def test_every_copy_first_takes_its_time():
    result = simulate(CHAIN, moving(2), platform=Platform(4.0, seconds_per_copy=0.5))
    assert times(result, "to host") == [(4, 5.5)]
    assert result.link_time == 3


def test_a_copy_that_sets_up_slows_nobody_down():
    result = crossing(Platform(to_host=2.0, from_host=2.0, duplex=1.0, seconds_per_copy=1.0))
    assert times(result, "to host")[1] == (12, 17)  # one second to set up, both flow from 13 to 17
    slower = Platform(to_host=2.0, from_host=4.0, duplex=1.0, seconds_per_copy=1.0)
    assert times(crossing(slower), "from host")[0] == (12, 17)


def test_time_lines_hold_transfers_beside_computing():
    result = simulate(CHAIN, moving(2, 3), platform=Platform(2.0))
    assert (
        [s for s in result.timeline.spans if s.resource == "compute"]
        == list(result.spans)
        == result.timeline.computing
    )
    moved = [s for s in result.timeline.spans if s.resource != "compute"]
    assert [s.moved_bytes for s in moved] == [4, 4, 4, 4]
    assert [result.schedule[s.operation] for s in moved[:2]] == [Offload(2, "all"), Offload(3, "all")]
    assert all(a.start <= b.start for a, b in pairwise(result.timeline.spans))


@pytest.mark.parametrize("rate", [0.3, 8.0])
@pytest.mark.parametrize("room", [0, 100])
def test_time_lines_tell_waiting_from_computing(rate, room):
    free = simulate(CHAIN, moving(2, 3), platform=Platform(1e9))
    result = simulate(CHAIN, moving(2, 3), platform=Platform(rate), budget=free.peak_bytes + room)
    waited = sum(span.end - span.start for span in result.timeline.computing if span.waits)
    assert waited == pytest.approx(result.stall_time)
    assert (waited > 0) == (rate < 8.0)


def test_what_is_on_the_host_is_counted_from_the_start_out_to_the_end_back():
    both = simulate(CHAIN, moving(2, 3), platform=Platform(1e9))
    assert both.host_peak_bytes == 8
    assert both.to_json()["host_peak_bytes"] == 8
    one = [*FORWARDS[:2], Offload(2, "all"), *FORWARDS[2:], Prefetch(2, "all"), Backward(6), Offload(3, "all")]
    one += [Prefetch(3, "all"), *backwards()[1:]]
    assert simulate(CHAIN, one, platform=Platform(1e9)).host_peak_bytes == 4
    assert (
        simulate(CHAIN, one, platform=Platform(1e-9)).host_peak_bytes == 4
    )  # the second waits for the first's way back


def test_an_offload_waits_for_room_on_the_host_and_is_refused_if_none_comes():
    schedule = [*FORWARDS[:2], Offload(2, "all"), *FORWARDS[2:], Offload(3, "all"), Prefetch(2, "all"), Backward(6)]
    schedule += [Prefetch(3, "all"), *backwards()[1:]]
    roomy, tight = (simulate(CHAIN, schedule, platform=Platform(8.0, duplex=8.0, host_bytes=b)) for b in (8, 7))
    assert times(roomy, "to host")[1] == times(roomy, "from host")[0] == (12, 12.5)
    assert times(tight, "to host")[1] == (12.5, 13)  # when the first is back
    assert (roomy.host_peak_bytes, tight.host_peak_bytes) == (8, 4)
    with pytest.raises(InvalidSchedule, match="waits for ever"):
        simulate(CHAIN, schedule, platform=Platform(8.0, host_bytes=7))  # of one queue, the second holds up the first
    with pytest.raises(InvalidSchedule, match="waits for ever"):
        simulate(CHAIN, moving(2), platform=Platform(8.0, host_bytes=3))


def test_a_copy_that_stays_makes_a_second_eviction_free():
    """Stage 1's output goes, comes back to be read by a forward that runs again, and goes once more."""
    start = [
        Forward(1, "input"),
        Offload(2, "input"),
        Forward(2, "nothing"),
        Forward(3, "nothing"),
        Forward(4, "all"),
    ]
    start += [Forward(5, "all"), Forward(6, "all"), Backward(6), Backward(5), Backward(4)]
    for keep in (False, True):
        again = [Prefetch(2, "input", keep), Forward(2, "input"), Offload(2, "input"), Forward(3, "all"), Backward(3)]
        again += [Prefetch(2, "input"), Forward(2, "all"), Backward(2), Forward(1, "all"), Backward(1)]
        result = simulate(CHAIN, [*start, *again], platform=Platform(1.0))
        assert len(times(result, "to host")) == (1 if keep else 2)
        assert len(times(result, "from host")) == 2
        assert result.host_peak_bytes == 2


def test_a_prefetch_may_start_with_a_later_operation():
    early = moving(2)
    at = early.index(Prefetch(2, "all"))
    later = [*early[:at], Prefetch(2, "all", start=at + 2), *early[at + 1 :]]
    assert isinstance(later[at + 2], Backward)
    result = simulate(CHAIN, later, platform=Platform(2.0))
    assert times(result, "from host") == [(18, 20)]
    assert schedule_from_json(schedule_to_json(later)) == tuple(later)
    assert schedule_to_json(later)[at] == ["prefetch", 2, "all", {"start": at + 2}]


def test_a_prefetch_that_starts_later_leaves_room_to_a_computation_that_waits():
    """Backward 3 needs all the room there is. A prefetch that is asked for before it would take some of that."""
    chain = Chain(1, 1, tuple(Stage(f"s{i}", 1, 1, 2, 4, 2, 0, 9 if i == 3 else 0) for i in range(1, 5)))
    head = [
        Forward(1, "all"),
        Forward(2, "all"),
        Offload(1, "all"),
        Forward(3, "all"),
        Forward(4, "all"),
        Backward(4),
    ]
    tail = [Backward(3), Backward(2), Backward(1)]
    budget = simulate(chain, [*head, *tail[:1], Prefetch(1, "all"), *tail[1:]], platform=Platform(4.0)).peak_bytes
    with pytest.raises(InvalidSchedule, match="waits for ever"):
        simulate(chain, [*head, Prefetch(1, "all"), *tail], budget=budget, platform=Platform(4.0))
    at = len(head)
    fits = [*head, Prefetch(1, "all", start=at + 1), *tail]
    assert simulate(chain, fits, budget=budget, platform=Platform(4.0)).peak_bytes <= budget


@pytest.mark.parametrize("start", [0, 3, 99])
def test_only_a_later_operation_can_start_a_prefetch(start):
    schedule = [*FORWARDS, Offload(2, "all"), Prefetch(2, "all", start=start), *backwards()]
    with pytest.raises(InvalidSchedule, match="no later operation"):
        simulate(CHAIN, schedule, platform=Platform(2.0))


def test_what_starts_too_late_to_be_read_is_refused():
    schedule = [*FORWARDS, Offload(2, "all"), Prefetch(2, "all", start=13), *backwards()]
    assert schedule[13] == Backward(1)
    with pytest.raises(InvalidSchedule, match="never arrives"):
        simulate(CHAIN, schedule, platform=Platform(2.0))


@pytest.mark.parametrize(
    ("how", "field"),
    [({"keep": 1}, "keep"), ({"start": -1}, "start"), ({"start": 1.5}, "start"), ({"colour": 1}, "colour"), ([], "")],
)
def test_how_a_prefetch_is_written_is_checked(how, field):
    with pytest.raises(InputError, match=rf"^schedule\[0\]\[3\]\.?{field}"):
        schedule_from_json([["prefetch", 2, "all", how]])


@pytest.mark.parametrize("field", ["bandwidth", "to_host", "from_host", "duplex"])
@pytest.mark.parametrize("value", [-1, 1e-30, float("nan"), "fast"])
def test_rates_are_checked(field, value):
    with pytest.raises(InputError, match=f"^{field}: "):
        Platform(**{field: value})


# --- against a machine that moves in tiny steps ------------------------------------------------------------------


def stepped(transfers, platform, step):
    """When each transfer starts and ends, found by letting bytes flow for a tiny step at a time."""
    lanes = {"to host": [], "from host": []}
    for number, (issued, direction, size) in enumerate(transfers):
        lane = "to host" if platform.takes_turns else direction
        lanes[lane].append([number, issued, direction, platform.seconds_per_copy, float(size)])
    found, now = {}, 0.0
    rates = {"to host": platform.rate_to_host, "from host": platform.rate_from_host}
    while any(lanes.values()):
        active = [lane[0] for lane in lanes.values() if lane and lane[0][1] <= now + 1e-12]
        for each in active:
            found.setdefault(each[0], [now, None])
        flowing = [each for each in active if each[3] <= 1e-12]
        for each in active:
            if each not in flowing:
                each[3] -= step
        for each in flowing:
            rate = rates[each[2]]
            if len(flowing) == 2 and platform.duplex is not None:
                rate = min(rate, platform.duplex)
            each[4] -= rate * step
        now += step
        for lane in lanes.values():
            if lane and lane[0][4] <= 1e-9:
                found[lane.pop(0)[0]][1] = now
    return [tuple(found[number]) for number in range(len(transfers))]


def test_the_link_agrees_with_tiny_steps():
    rng, step = Random(5), 1 / 64
    for _ in range(150):
        duplex = rng.choice([None, 0, 1, 2])
        platform = Platform(None, rng.choice([1, 2, 4]), rng.choice([1, 2, 4]), duplex, rng.choice([0, 0, 0.5]))
        issued = sorted(rng.randint(0, 8) for _ in range(rng.randint(1, 6)))
        asked = [(at, rng.choice(["to host", "from host"]), rng.randint(1, 9)) for at in issued]
        link = Link(platform)
        transfers = [Transfer(n, direction, size, n) for n, (_, direction, size) in enumerate(asked)]
        for (at, _, _), transfer in zip(asked, transfers, strict=True):
            link.advance(at)
            link.submit(transfer, at)
        while (event := link.next_event()) is not None:
            link.advance(event)
        for transfer, (start, end) in zip(transfers, stepped(asked, platform, step), strict=True):
            assert transfer.start == pytest.approx(start, abs=3 * step)
            assert transfer.end == pytest.approx(end, abs=3 * step)
