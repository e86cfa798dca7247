"""The allocator as it is played: places never overlap, gaps are joined, a pool is no smaller than a peak."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elbowroom.step import pool
from elbowroom.step.allocator import BLOCK, LARGE_GROWTH, SMALL_GROWTH
from elbowroom.step.operations import Run
from elbowroom.step.program import Program


@given(wishes=st.lists(st.tuples(st.booleans(), st.integers(1, 20))))
def test_places_are_apart_and_gaps_are_joined(wishes):
    segment, live, most = pool.Segment(4 * BLOCK), {}, 0
    for gives, number in wishes:
        if gives and live:
            start = sorted(live)[number % len(live)]
            del live[start]
            segment.give(start)
        else:
            start = segment.take(number * BLOCK - number)
            assert start not in live
            live[start] = number * BLOCK
        most = max(most, sum(live.values()))
        spans = sorted((start, start + size) for start, size in live.items())
        gaps = sorted((start, start + size) for start, size in segment._starts.items())
        assert all(a_end <= b for (_, a_end), (b, _) in pairwise(sorted([*spans, *gaps])))
        assert all(a_end < b for (_, a_end), (b, _) in pairwise(gaps))
        assert sorted(segment._gaps) == segment._gaps == sorted((end - start, start) for start, end in gaps)
        assert sum(end - start for start, end in [*spans, *gaps]) == segment._tail <= segment.size
    assert most <= segment.size


def test_a_small_gap_is_taken_before_a_larger_one():
    segment = pool.Segment(BLOCK)
    starts = [segment.take(blocks * BLOCK) for blocks in (4, 1, 2, 1)]
    segment.give(starts[0])
    segment.give(starts[2])
    assert segment.take(2 * BLOCK) == starts[2]
    assert segment.take(3 * BLOCK) == starts[0]
    assert segment.size == 8 * BLOCK


def test_a_pool_is_as_large_as_the_programs_peak_or_larger():
    torch = pytest.importorskip("torch")
    import elbowroom
    from elbowroom.demo.models import Transformer

    torch.manual_seed(0)
    tokens = torch.randint(32, (2, 16, 32))
    model = elbowroom.fit(
        Transformer(32, 32, 64, 2, layers=4, dropout=0.0), *tokens, budget="1GiB", kernels="torch", times="estimate"
    )
    (entry,) = model.elbowroom.entries.values()
    (graph,) = entry.graphs
    planner, captured = graph.planner, graph.measured.captured
    planned = planner.everything
    taken = pool.pool_bytes(planner.graph, planned.program, planner.around, captured.fixed_inputs)
    fixed = sum(planner.graph.storage_bytes[s] for i in captured.fixed_inputs for s in planner.graph.storages(i))
    peak = planned.prediction.peak_bytes - fixed + planner.around.late_bytes
    assert peak <= taken - pool.WORKSPACES <= 1.2 * peak + SMALL_GROWTH + LARGE_GROWTH


def test_the_larger_of_two_plays_counts(monkeypatch):
    """As planned, and with nothing written over something else."""
    played = []

    def play(graph, program, *args):
        played.append({run.reuses for run in (*program.forward, *program.backward)})
        return len(played)

    monkeypatch.setattr(pool, "_played", play)
    program = Program((Run(0), Run(1, reuses=0)), (Run(2, reuses=1),), (1,), ())
    assert pool.pool_bytes(None, program, None, ()) == 2
    assert played == [{None, 0, 1}, {None}]
