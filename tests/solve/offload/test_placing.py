"""Schedules with copies: whatever is moved, they fit as reckoned, wait for nothing for ever, and lose little time."""

from __future__ import annotations

from itertools import combinations, product
from random import Random

import pytest

from elbowroom.errors import InvalidSchedule
from elbowroom.problem import Platform
from elbowroom.schedule import Backward, Forward, Offload, Prefetch, simulate
from elbowroom.solve import METHODS, Options, solve
from elbowroom.solve.offload.limits import SavedChain, bound_time
from elbowroom.solve.offload.placing import Move, ordered_moves, place, save_all
from problems import random_chain


def random_platform(rng: Random) -> Platform:
    kind = rng.randrange(4)
    if kind == 0:
        return Platform(bandwidth=rng.choice([0.5, 1, 2, 4]))
    duplex = None if kind == 1 else 0 if kind == 2 else 1
    return Platform(
        to_host=rng.choice([1, 2, 3]),
        from_host=rng.choice([1, 2]),
        duplex=duplex,
        seconds_per_copy=rng.choice([0, 0.5]),
    )


def random_saved(rng: Random, stages: int) -> SavedChain:
    chain = random_chain(rng, stages, alternatives=True, any_gradients=True)
    return SavedChain(chain, tuple(rng.randrange(len(stage.ways)) for stage in chain.stages))


def test_what_is_reckoned_is_what_the_referee_measures():
    """The peak with a set of values gone is the least budget at which the schedule that moves them runs."""
    rng = Random(1)
    for _ in range(150):
        saved = random_saved(rng, rng.randint(1, 7))
        values = [value for value in range(len(saved.chain) - 1) if rng.random() < 0.5]
        platform = random_platform(rng)
        peak = saved.bytes_without(values)
        found = saved.offloading(values, peak, platform)
        assert found is not None
        assert found.peak_bytes <= peak
        assert peak == 0 or saved.offloading(values, peak - 1, platform) is None
        assert found.time >= bound_time(saved.chain, peak, platform) * (1 - 1e-12)
    assert saved.bytes_without([]) == saved.peak_bytes


def test_the_least_budget_runs_and_keeps_the_host_s():
    rng = Random(2)
    for _ in range(150):
        saved = random_saved(rng, rng.randint(1, 7))
        platform = random_platform(rng)
        small = Platform(
            to_host=platform.rate_to_host,
            from_host=platform.rate_from_host,
            duplex=platform.duplex,
            host_bytes=rng.randint(0, 12),
        )
        for each in (platform, small):
            found = saved.eager(saved.least_bytes(each), each)
            assert found.peak_bytes <= saved.least_bytes(each)
            assert each.host_bytes is None or found.host_peak_bytes <= each.host_bytes


@pytest.mark.parametrize("name", ["persistent", "floating"])
def test_moves_in_schedules_that_recompute_fit_as_reckoned(name):
    """Values of any schedule may go between two operations that read them; then some budget below its peak does."""
    rng = Random(3)
    lower = 0
    for _ in range(200):
        chain = random_chain(rng, rng.randint(2, 7), alternatives=True)
        least = METHODS[name].least_budget(chain, Options())
        plain = solve(chain, least + rng.randint(0, 6), name)
        moves = [move for move in gaps(plain.schedule) if rng.random() < 0.6]
        platform = random_platform(rng)
        assert place(chain, plain.schedule, [], plain.peak_bytes, platform).time == plain.time
        runs = [place(chain, plain.schedule, moves, budget, platform) for budget in range(plain.peak_bytes + 1)]
        feasible = [run is not None for run in runs]
        assert feasible == sorted(feasible)  # what fits a budget fits every larger one
        assert feasible[-1]
        lower += sum(feasible) > 1
        for budget, run in enumerate(runs):
            if run is not None:
                again = simulate(chain, run.schedule, budget=budget, platform=platform)
                assert (again.time, again.peak_bytes) == (run.time, run.peak_bytes)
                assert run.peak_bytes <= budget
                assert run.time >= plain.time - 1e-9
    assert lower > 30


def gaps(schedule):
    """Every stretch between two operations that read the same saved set or the same input, as moves."""
    moves, readers = [], {}
    for index, operation in enumerate(schedule):
        at = operation.at
        if isinstance(operation, Forward) and operation.save == "all":
            readers["all", at] = index
        if isinstance(operation, Backward) and ("all", at) in readers:
            # The saved set of the stage before holds this one's input, and is read first.
            before = index - 1 if schedule[index - 1] == Backward(at + 1) else index
            if before - readers["all", at] > 2:
                moves.append(Move(at, "all", readers["all", at], before))
        if ("input", at) in readers:
            moves.append(Move(at, "input", readers.pop(("input", at)), index))
        inside = ("all", at - 1) in readers  # then this input is not stored on its own
        if isinstance(operation, Forward) and operation.save == "input" and not inside:
            readers["input", at] = index
    return moves


def exhaustive_time(saved, values, budget, platform):
    """The fastest of all schedules that move those values in order: each place for each prefetch, and each start."""
    computing = save_all(saved.chain, saved.ways)
    moves = sorted(ordered_moves(saved.chain, values), key=lambda move: move.before)
    best = None
    choices = [
        [
            (place, start)
            for place in range(move.after + 1, move.before + 1)
            for start in range(place, move.before + 1)
        ]
        for move in moves
    ]
    for chosen in product(*choices):
        if list(chosen) != sorted(chosen):
            continue
        items = [(index, 1, None) for index in range(len(computing))]
        items += [(move.after, 2, (move, None)) for move in moves]
        items += [(place, 0, (move, start)) for move, (place, start) in zip(moves, chosen, strict=True)]
        items.sort(key=lambda item: item[:2])
        where = {item[0]: index for index, item in enumerate(items) if item[1] == 1}
        schedule = []
        for index, kind, data in items:
            if kind == 1:
                schedule.append(computing[index])
            elif kind == 2:
                schedule.append(Offload(data[0].at, data[0].what))
            else:
                start = where[data[1]] if where[data[1]] > len(schedule) and data[1] < data[0].before else None
                schedule.append(Prefetch(data[0].at, data[0].what, start=start))
        try:
            time = simulate(saved.chain, schedule, budget=budget, platform=platform).time
        except InvalidSchedule:
            continue
        best = time if best is None else min(best, time)
    return best


def test_prefetches_come_when_they_best_do():
    """Against every place of every prefetch: the same time nearly always, and never much longer."""
    rng = Random(4)
    equal = count = 0
    for _ in range(60):
        saved = random_saved(rng, rng.randint(2, 4))
        platform = random_platform(rng)
        everything = range(len(saved.chain) - 1)
        for values in (v for k in (1, 2) for v in combinations(everything, k)):
            budget = saved.bytes_without(values) + rng.randint(0, 3)
            best = exhaustive_time(saved, values, budget, platform)
            found = saved.offloading(values, budget, platform)
            assert best is not None
            assert found is not None
            assert found.time >= best - 1e-9
            count += 1
            equal += found.time <= best + 1e-9
    assert equal >= 0.95 * count
