"""Parts of gradients that outlive the rest are copied, so that the rest can go; a program may do without."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from elbowroom.capture.rewrites import rewrite as rewriting  # noqa: E402
from elbowroom.capture.rewrites.rewrite import PART_COPY  # noqa: E402
from elbowroom.step.graph import Cost  # noqa: E402
from elbowroom.step.program import make_program  # noqa: E402
from elbowroom.step.referee import predict  # noqa: E402
from rewritten import Model, assert_trains_like_eager, image  # noqa: E402


def joins(early, layers=6):
    """Concatenates values made early, eight channels each, with what a deep path makes of the first."""

    def forward(model, x):
        start = model.conv(x)
        values = [start, torch.tanh(start), torch.sin(start), torch.cos(start)][:early]
        for _ in range(layers):
            start = torch.tanh(torch.sin(start) * 2 + 1)
        return torch.sin(torch.cat([*values, start], 1))

    return forward


@pytest.fixture
def parts(capture, monkeypatch):
    """Sizes of the slices that are copied, of gradients of any size."""
    monkeypatch.setattr(rewriting, "_LARGE", 1)
    monkeypatch.setattr(rewriting, "_LONG", {False: 20, True: 20})

    def find(forward):
        captured = assert_trains_like_eager(capture, forward)
        return [node.meta["val"].shape[1] for node in captured.nodes if PART_COPY in node.meta]

    return find


@pytest.mark.parametrize("early", [1, 2])
def test_parts_of_a_gradient_that_are_read_long_after_the_rest_are_copied(parts, early):
    assert parts(joins(early)) == [8] * early


@pytest.mark.usefixtures("parts")
def test_a_copy_that_is_not_made_is_a_view(capture):
    """Planned with the copies and doing without them, or planned without: the same memory at the same moments."""
    graph = capture(Model(joins(1)), image()).graph
    graph = graph.with_costs({op.index: Cost(1.0, 0) for op in graph.ops})
    viewed = graph.with_parts_viewed()
    order = [*graph.forward, *graph.backward]
    without = predict(graph, make_program(graph, order, copies_parts=False))
    assert without == predict(viewed, make_program(viewed, order))
    copied = predict(graph, make_program(graph, order))
    assert copied.time_s == without.time_s + 1
    assert any(a < b for a, b in zip(copied.backward_bytes, without.backward_bytes, strict=True))


def test_without_parts_to_copy_there_is_one_program(capture):
    """Or it would be compiled twice."""
    graph = capture(Model(joins(1)), image()).graph
    assert not graph.part_copies
    assert make_program(graph, graph.backward, copies_parts=False) == make_program(graph, graph.backward)


def test_parts_that_are_most_of_a_gradient_stay_in_it(parts):
    assert parts(joins(4)) == []


def test_parts_that_are_read_soon_stay_in_it(parts):
    assert parts(joins(1, layers=1)) == []


def test_small_gradients_stay_whole(parts, monkeypatch):
    monkeypatch.setattr(rewriting, "_LARGE", 2**20)
    assert parts(joins(1)) == []
