"""The loop of planning, compiling and measuring, with a compiler that does what each test says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from elbowroom.execute import trials
from elbowroom.execute.trials import Trial, Trials, Tried

LEAST, MOST = 20, 100


class Program(int):
    """A number of bytes, predicted; below the most, something is recomputed."""

    @property
    def replays(self) -> dict[int, int]:
        return {} if self == MOST else {0: 1}


def planned(size: int):
    prediction = SimpleNamespace(peak_bytes=size, saved_bytes=0)
    return SimpleNamespace(program=Program(size), prediction=prediction)


@pytest.fixture
def loop(monkeypatch):
    """Plans as large as they may be; `measured` and `time` say what comes of them."""

    def plan_together(planners, room):
        return [planned(min(MOST, room))] if room >= LEAST else None

    def make(measured=lambda size: size, time=lambda size: MOST - size, device="cpu"):
        captured = SimpleNamespace(device=SimpleNamespace(type=device))
        planner = SimpleNamespace(least=planned(LEAST))
        found = Trials([SimpleNamespace(release=lambda: None, captured=captured)], [planner])
        found.compiled = []

        def attempt(plans):
            size = int(plans[0].program)
            found.compiled.append(size)
            return [Tried(tuple(plans), (Trial(measured(size), time(size)),))]

        found._try = attempt
        return found

    monkeypatch.setattr(trials, "plan_together", plan_together)
    return make


def best(loop, room, most=3):
    return loop.best(room, most, lambda part: None)


def test_a_plan_that_holds_is_compiled_once(loop):
    found = loop()
    assert best(found, 60).peak_bytes == 60
    assert best(found, 60).peak_bytes == 60
    assert found.compiled == [60]


@pytest.mark.parametrize(("device", "first"), [("cuda", 57), ("cpu", 60)])
def test_on_a_gpu_the_first_plan_leaves_the_allocator_its_share(loop, monkeypatch, device, first):
    monkeypatch.setattr(trials, "CUDA_MARGIN_SHARE", 0.05)
    found = loop(device=device)
    best(found, 60)
    assert found.compiled == [first]


def test_with_room_for_everything_nothing_else_is_tried(loop):
    found = loop()
    assert best(found, 10 * MOST).is_everything
    assert found.compiled == [MOST]


def test_a_plan_over_the_budget_is_made_again_with_the_difference(loop):
    found = loop(measured=lambda size: size + 10)
    assert best(found, 60).peak_bytes == 60
    assert found.compiled == [60, 50]


def test_narrow_misses_end_well_below_the_budget_and_not_at_the_lowest(loop):
    misses = iter([1, 2])
    found = loop(measured=lambda size: max(60, size) + next(misses) if size > 57 else size)
    assert best(found, 60).peak_bytes == 56
    assert found.compiled == [60, 59, 56]


def test_a_plan_far_below_the_budget_is_made_again_with_the_difference(loop):
    found = loop(measured=lambda size: size - 10)
    assert best(found, 60).peak_bytes == 60
    assert found.compiled == [60, 70]


def test_what_was_learned_helps_the_next_budget(loop):
    found = loop(measured=lambda size: size + 10)
    best(found, 60)
    assert best(found, 50).peak_bytes == 50
    assert found.compiled == [60, 50, 40]


@pytest.mark.parametrize("room", range(31, 60))
def test_where_corrections_fail_the_lowest_plan_is_tried(loop, room):
    found = loop(measured=lambda size: 30 if size == LEAST else 80)
    assert best(found, room).peak_bytes == 30


def test_if_not_even_the_lowest_fits_there_is_none(loop):
    found = loop(measured=lambda size: size + 50)
    assert best(found, 40) is None
    assert found.least_bytes == LEAST + 50
    assert len(found.compiled) == len(set(found.compiled)) <= 3


@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_more_programs_are_compiled_than_allowed(loop, most):
    found = loop(measured=lambda size: size + 50 - size // 10)
    best(found, 70, most)
    assert len(found.compiled) <= most


def test_the_fastest_that_fits_serves_even_if_it_needs_less(loop):
    """Compiled code has its moods: the program for less memory may be the faster one."""
    found = loop(time=lambda size: {60: 1.0}.get(size, 5.0))
    for room in (60, 80, 200):
        assert best(found, room).time_s == 1.0
    assert best(found, 40).time_s == 5.0
