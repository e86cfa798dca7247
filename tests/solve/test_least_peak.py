"""Checkpoint selection (003) against brute force over every set of checkpoints."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elbowroom.problem import Chain, Stage
from elbowroom.solve import solve
from exhaustive import best_checkpoints, dynamic_peak, sum_peak

SIZES = st.lists(st.integers(0, 12), min_size=2, max_size=11)


def chain_of(sizes):
    stages = tuple(Stage(f"s{i}", 1, 1, d, d, d) for i, d in enumerate(sizes[1:], start=1))
    return Chain(sizes[0], sizes[0], stages)


@given(SIZES)
@example([0, 0, 1])
@example([0, 0, 0, 3, 0, 0, 2, 0])
@settings(max_examples=600)
@pytest.mark.parametrize("name", ["least-peak", "least-peak-quadratic"])
def test_least_peak_equals_brute_force(name, sizes):
    notes = solve(chain_of(sizes), solver=name).notes
    assert notes["model_peak_bytes"] == best_checkpoints(sizes, dynamic_peak)
    assert notes["model_peak_bytes"] == dynamic_peak(sizes, [0, *notes["checkpoints"]])


@given(SIZES)
def test_checkpoint_sum_equals_brute_force(sizes):
    notes = solve(chain_of(sizes), solver="checkpoint-sum").notes
    assert notes["model_peak_bytes"] == best_checkpoints(sizes, sum_peak)
    assert notes["model_peak_bytes"] == sum_peak(sizes, [0, *notes["checkpoints"]])


def test_every_short_list_of_small_sizes():
    """All 5,456 lists of two to six sizes from 0 to 3: zeros and ties are where a linear method slips."""
    for length in range(2, 7):
        for sizes in product(range(4), repeat=length):
            notes = solve(chain_of(sizes), solver="least-peak").notes
            assert notes["model_peak_bytes"] == best_checkpoints(list(sizes), dynamic_peak), sizes


@pytest.mark.parametrize("seed", range(60))
def test_linear_equals_quadratic_on_longer_chains(seed):
    rng = Random(seed)
    largest = rng.choice([1, 2, 5, 1000, 10**9])
    zeros = rng.choice([0, 0.3, 0.9])
    count = rng.choice([30, 200, 700])
    sizes = [0 if rng.random() < zeros else rng.randint(0, largest) for _ in range(count)]
    linear = solve(chain_of(sizes), solver="least-peak").notes
    quadratic = solve(chain_of(sizes), solver="least-peak-quadratic").notes
    assert linear["model_peak_bytes"] == quadratic["model_peak_bytes"]
    assert linear["model_peak_bytes"] == dynamic_peak(sizes, [0, *linear["checkpoints"]])


def test_a_hundred_thousand_stages():
    """How long it takes is in benchmarks/solvers.py; a quadratic step would be felt here too."""
    rng = Random(1)
    sizes = [rng.randint(1, 10**7) for _ in range(100_001)]
    result = solve(chain_of(sizes), solver="least-peak")
    assert result.notes["model_peak_bytes"] == dynamic_peak(sizes, [0, *result.notes["checkpoints"]])
    assert len(result.schedule) > 200_000
