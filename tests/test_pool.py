"""The allocator as it is played: places never overlap, gaps are joined, a pool is no smaller than a peak."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elbowroom import pool
from elbowroom.step.operations import Run
from elbowroom.step.program import Program


@given(wishes=st.lists(st.tuples(st.booleans(), st.integers(1, 20))))
def test_places_are_apart_and_gaps_are_joined(wishes):
    piece, live, most = pool.Piece(4 * pool.BLOCK), {}, 0
    for gives, number in wishes:
        if gives and live:
            start = sorted(live)[number % len(live)]
            del live[start]
            piece.give(start)
        else:
            start = piece.take(number * pool.BLOCK - number)
            assert start not in live
            live[start] = number * pool.BLOCK
        most = max(most, sum(live.values()))
        spans = sorted((start, start + size) for start, size in live.items())
        gaps = sorted((start, start + size) for start, size in piece._starts.items())
        assert all(a_end <= b for (_, a_end), (b, _) in pairwise(sorted([*spans, *gaps])))
        assert all(a_end < b for (_, a_end), (b, _) in pairwise(gaps))
        assert sorted(piece._gaps) == piece._gaps == sorted((end - start, start) for start, end in gaps)
        assert sum(end - start for start, end in [*spans, *gaps]) == piece._tail <= piece.size
    assert most <= piece.size


def test_a_small_gap_is_taken_before_a_larger_one():
    piece = pool.Piece(pool.BLOCK)
    starts = [piece.take(blocks * pool.BLOCK) for blocks in (4, 1, 2, 1)]
    piece.give(starts[0])
    piece.give(starts[2])
    assert piece.take(2 * pool.BLOCK) == starts[2]
    assert piece.take(3 * pool.BLOCK) == starts[0]
    assert piece.size == 8 * pool.BLOCK


def test_a_pool_is_as_large_as_the_programs_peak_or_larger():
    torch = pytest.importorskip("torch")
    import elbowroom
    from elbowroom.demo.training import Transformer

    torch.manual_seed(0)
    tokens = torch.randint(32, (2, 16, 32))
    model = elbowroom.fit(
        Transformer(32, 32, 64, 2, layers=4, dropout=0.0), *tokens, budget="1GiB", kernels="torch", times="estimate"
    )
    (entry,) = model.elbowroom.entries.values()
    (region,), (planner,) = entry.regions, entry.planners
    planned = planner.everything
    taken = pool.pool_bytes(planner.graph, planned.program, planner.around, region.captured.fixed_inputs)
    fixed = sum(
        planner.graph.storage_bytes[s] for i in region.captured.fixed_inputs for s in planner.graph.storages(i)
    )
    peak = planned.prediction.peak_bytes - fixed + planner.around.late_bytes
    small = pool.GROWTH[True]
    assert peak <= taken - pool.WORKSPACES <= 1.2 * peak + small + pool.GROWTH[False]


def test_the_larger_of_two_plays_counts(monkeypatch):
    """As planned, and with nothing written over something else."""
    played = []

    def play_alone(graph, program, *args):
        played.append({i.reuses for i in (*program.forward, *program.backward)})
        return len(played)

    monkeypatch.setattr(pool, "_played", play)
    program = Program((Run(0), Run(1, reuses=0)), (Run(2, reuses=1),), (1,), ())
    assert pool.pool_bytes(None, program, None, ()) == 2
    assert played == [{None, 0, 1}, {None}]
