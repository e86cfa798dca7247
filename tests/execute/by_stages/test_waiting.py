"""Schedules with waits, played by a machine that has no clock and shares no code with what wrote them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from elbowroom import solve
from elbowroom.execute.by_stages.waiting import Await, Release, with_waits
from elbowroom.problem import Chain, Platform, Stage
from elbowroom.schedule import Backward, Discard, Forward, Offload, Prefetch, simulate
from offloaded import random_case, scrambled
from problems import byte_chain

METHODS = ("combined", "pofo", "offload-best", "autocapper", "opportunist", "tflms")


class Clockless:
    """Memory on both sides, where nothing happens but by an operation. `tags` tell what a value was made of."""

    def __init__(self, chain, operations):
        self.chain, self.operations = chain, operations
        self.device = {("plain", 0): chain.input_bytes}
        self.host, self.leaving, self.coming, self.kept = {}, set(), set(), set()
        self.ways = {}
        self.position = len(chain)
        self.peak = self.host_peak = 0

    def play(self):
        for operation in self.operations:
            if isinstance(operation, Forward):
                self.forward(operation)
            elif isinstance(operation, Backward):
                self.backward(operation.at)
            elif isinstance(operation, Discard):
                self.drop(self.key(operation))
            else:
                self.move(operation)
        assert self.position == 0
        return self

    def key(self, operation):
        return ("saved", operation.at) if operation.what == "all" else ("plain", operation.at - 1)

    def readable(self, key):
        return key in self.device and key not in self.coming

    def compute(self, at, room):
        assert any(self.readable((kind, at - 1)) for kind in ("plain", "saved")), "its input is there"
        gradient = self.chain.gradient_bytes[self.position]
        self.peak = max(self.peak, sum(self.device.values()) + gradient + room)

    def forward(self, operation):
        at, stage = operation.at, self.chain.stages[operation.at - 1]
        if operation.save == "all":
            way = self.ways[at] = stage.ways[operation.way]
            self.compute(at, way.saved_bytes + way.forward_overhead_bytes)
            self.drop(("plain", at))
            self.drop(("saved", at))
            self.device["saved", at] = way.saved_bytes
        else:
            self.compute(at, stage.output_bytes + stage.forward_overhead_bytes)
            self.drop(("plain", at))
            self.device["plain", at] = stage.output_bytes
        if operation.save == "nothing" and ("plain", at - 1) not in self.leaving:
            self.device.pop(("plain", at - 1), None)

    def backward(self, at):
        assert at == self.position
        assert self.readable(("saved", at))
        self.compute(at, self.chain.gradient_bytes[at - 1] + self.ways.pop(at).backward_overhead_bytes)
        self.drop(("saved", at))
        self.drop(("plain", at - 1))
        self.position -= 1

    def drop(self, key):
        assert key not in self.leaving | self.coming, "nothing goes while it is copied"
        self.device.pop(key, None)
        self.host.pop(key, None)

    def move(self, operation):
        key = self.key(operation)
        if isinstance(operation, Offload):
            assert self.readable(key)
            assert key not in self.leaving
            self.leaving.add(key)
            self.host.setdefault(key, self.device[key])
        elif isinstance(operation, Release):
            self.leaving.remove(key)
            del self.device[key]
        elif isinstance(operation, Prefetch):
            assert key not in self.device
            self.device[key] = self.host[key]
            self.coming.add(key)
            (self.kept.add if operation.keep else self.kept.discard)(key)
        else:
            assert isinstance(operation, Await)
            self.coming.remove(key)
            if key not in self.kept:
                del self.host[key]
        self.host_peak = max(self.host_peak, sum(self.host.values()))


def held_to_the_referee(chain, simulation, host_bytes=None):
    """The schedule with waits, after the machine has played it."""
    waiting = with_waits(chain, simulation, host_bytes)
    machine = Clockless(chain, waiting.operations).play()
    assert machine.peak == waiting.peak_bytes <= simulation.peak_bytes
    assert machine.host_peak <= waiting.host_bytes
    assert host_bytes is None or waiting.host_bytes <= host_bytes

    def computing(operations):
        return [operation for operation in operations if isinstance(operation, Forward | Backward | Discard)]

    assert computing(waiting.operations) == computing(simulation.schedule)
    return waiting


@pytest.mark.parametrize("seed", range(25))
def test_schedules_of_all_methods(seed):
    chain, platform, _ = random_case(Random(seed), 7, alternatives=True)
    most = solve(chain, solver="store-all").peak_bytes
    for method in METHODS:
        least = solve(chain, 0, method, platform=platform).least_budget
        for budget in sorted({least, (2 * least + most) // 3, max(least, most - 1)}):
            result = solve(chain, budget, method, platform=platform)
            if result.feasible:
                held_to_the_referee(chain, result.simulation, platform.host_bytes)


@pytest.mark.parametrize("seed", range(3))
def test_schedules_of_large_chains(seed):
    """With sizes and times that no number divides, where moments that coincide differ by rounding."""
    chain = byte_chain(Random(seed), 14)
    host_bytes = (None, 10**8, 3 * 10**8)[seed]
    platform = Platform(to_host=9e9, from_host=1e10, duplex=8e9, seconds_per_copy=1e-5, host_bytes=host_bytes)
    most = solve(chain, solver="store-all").peak_bytes
    for method in ("combined", "offload-best", "pofo"):
        least = solve(chain, 0, method, platform=platform).least_budget
        for part in (0.0, 0.3, 0.7):
            budget = int(least + part * (most - least))
            result = solve(chain, budget, method, platform=platform)
            waiting = held_to_the_referee(chain, result.simulation, host_bytes)
            if host_bytes is None:
                assert any(isinstance(operation, Release) for operation in waiting.operations)


@pytest.mark.parametrize("seed", range(300))
def test_schedules_at_random(seed):
    rng = Random(seed)
    chain, platform, _ = random_case(rng, 6, alternatives=True)
    least = solve(chain, 0, "persistent").least_budget
    schedule = solve(chain, least + rng.choice([0, 0, 2, 5]), "persistent").schedule
    simulation = scrambled(rng, chain, schedule, platform)
    held_to_the_referee(chain, simulation, platform.host_bytes)


def test_a_schedule_without_moves_stays_as_it_is():
    chain = byte_chain(Random(0), 6)
    result = solve(chain, solve(chain, 0, "persistent").least_budget, "persistent")
    assert with_waits(chain, result.simulation).operations == tuple(result.schedule)


# --- by hand: saved sets of 10 bytes, a link of one byte in a second -----------------------------------------

STAGES = (Stage("", 1, 1, 2, 10, 0),) * 3


def waits_of(schedule, budget=None, link=1, host_bytes=None):
    chain = Chain(0, 0, STAGES)
    simulation = simulate(
        chain, schedule, budget=budget, platform=Platform(to_host=link, from_host=link, host_bytes=host_bytes)
    )
    return held_to_the_referee(chain, simulation, host_bytes)


def saved(*moved):
    """Everything is saved; some saved sets are offloaded when made, and brought back when they are read next."""
    schedule = []
    for at in (1, 2, 3):
        schedule += [Forward(at, "all"), *([Offload(at, "all")] if at in moved else [])]
    for at in (3, 2, 1):
        schedule += [*(Prefetch(k, "all") for k in moved if k == at - 1), Backward(at)]
    return schedule


def test_a_release_waits_until_its_memory_is_needed():
    waiting = waits_of(saved(1), budget=20, link=10)
    assert waiting.operations[1:5] == (Offload(1, "all"), Forward(2, "all"), Release(1, "all"), Forward(3, "all"))
    assert waiting.peak_bytes == 20
    assert waiting.host_bytes == 10


def test_what_nobody_needs_the_memory_of_does_not_move():
    waiting = waits_of(saved(1))
    assert not [operation for operation in waiting.operations if not isinstance(operation, Forward | Backward)]
    assert waiting.host_bytes == 0


def test_an_offload_that_finds_no_room_on_the_host_before_its_value_is_read_is_left_out():
    schedule = [
        *[Forward(1, "all"), Offload(1, "all"), Forward(2, "all"), Offload(2, "all"), Forward(3, "all")],
        *[Backward(3), Prefetch(1, "all"), Prefetch(2, "all"), Backward(2), Backward(1)],
    ]
    waiting = waits_of(schedule, budget=20, link=10, host_bytes=10)
    assert [operation for operation in waiting.operations if isinstance(operation, Offload)] == [Offload(1, "all")]


def test_a_copy_that_stays_on_the_host_is_not_copied_again():
    schedule = [
        *[Forward(1, "all"), Offload(1, "all"), Forward(2, "all"), Prefetch(1, "all", keep=True)],
        *[Discard(2, "all"), Forward(2, "all"), Offload(1, "all"), Forward(3, "all"), Backward(3)],
        *[Prefetch(1, "all"), Backward(2), Backward(1)],
    ]
    chain = Chain(0, 0, (STAGES[0], replace(STAGES[1], saved_bytes=15), STAGES[2]))
    simulation = simulate(chain, schedule, budget=25, platform=Platform(bandwidth=10))
    waiting = held_to_the_referee(chain, simulation)
    assert sum(isinstance(operation, Release) for operation in waiting.operations) >= 1
    assert waiting.host_bytes == 10
