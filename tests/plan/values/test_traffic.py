"""What a link carries in some time, and what the linear program makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from elbowroom.plan.values.choices import Choices
from elbowroom.plan.values.moves import carriers
from elbowroom.plan.values.traffic import Traffic
from elbowroom.problem import Platform
from elbowroom.step.program import make_program
from elbowroom.step.referee import Surroundings, predict
from stepgraphs import Step, graph_of

TURNS = [(1 / 4, 1 / 2)]


@pytest.mark.parametrize(
    ("platform", "shares"),
    [
        (Platform(to_host=4.0, from_host=2.0), [(1 / 4, 0), (0, 1 / 2)]),
        (Platform(to_host=4.0, from_host=2.0, duplex=4.0), [(1 / 4, 0), (0, 1 / 2)]),
        (Platform(to_host=4.0, from_host=2.0, duplex=0.0), TURNS),
        (Platform(bandwidth=2.0), [(1 / 2, 1 / 2)]),
        (Platform(to_host=4.0, from_host=2.0, duplex=1.0), TURNS),  # both together are no faster than one by one
        (Platform(to_host=4.0, from_host=2.0, duplex=3.0), [(1 / 4, 0), (0, 1 / 2), (1 / 4, 1 / 8)]),
    ],
)
def test_what_the_link_carries_in_a_second(platform, shares):
    graph = graph_of([Step("plain", (1,), (1, 1), 1, 1, 0, *[False] * 4, True, False)])
    found = Traffic(Choices(graph, Surroundings(), moves=True), platform, []).shares()
    assert np.array(sorted(found)) == pytest.approx(np.array(sorted(shares)))


@pytest.mark.parametrize("duplex", [0.5, 1.5, 2.5, 3.9])
def test_no_mix_of_times_alone_and_together_carries_more(duplex):
    """And each share is reached by some mix, or it would be asked too much of the link."""
    out, back = 4.0, 3.0
    graph = graph_of([Step("plain", (1,), (1, 1), 1, 1, 0, *[False] * 4, True, False)])
    platform = Platform(to_host=out, from_host=back, duplex=duplex)
    shares = Traffic(Choices(graph, Surroundings(), moves=True), platform, []).shares()
    mixes = [(a, b, 1 - a - b) for a in np.linspace(0, 1, 21) for b in np.linspace(0, 1 - a, 11)]
    carried = [(a * out + c * min(out, duplex), b * back + c * min(back, duplex)) for a, b, c in mixes]
    used = np.array([[a * x + b * y for a, b in shares] for x, y in carried])
    assert used.max() <= 1 + 1e-9
    assert used.max(axis=0) == pytest.approx(np.ones(len(shares)))


def layers(count: int):
    return graph_of([Step("plain", (1,), (8, 1), 4, 8, 0, True, False, False, False, True, False)] * count)


@pytest.mark.parametrize(
    ("platform", "moves", "again"),
    [
        (Platform(bandwidth=8.0), True, False),  # keeps up with all of it
        (Platform(bandwidth=0.5), True, True),  # with a part
        (Platform(bandwidth=8.0, host_bytes=16), True, True),
        (Platform(bandwidth=1e-3), False, True),
        (Platform(bandwidth=8.0, seconds_per_copy=1e3), False, True),
    ],
)
def test_what_the_link_keeps_up_with_moves_and_the_rest_is_computed_again(platform, moves, again):
    graph, around = layers(10), Surroundings()
    choices = Choices(graph, around, moves=True)
    program = make_program(graph, graph.backward)
    prediction = predict(graph, program)
    storages = [n for n, storage in enumerate(choices.storages) if storage in carriers(graph)]
    lives = choices.lives(program, prediction)
    room = prediction.peak_bytes * 0.6
    chosen = Traffic(choices, platform, storages).chosen(lives, choices.highest(lives), room)
    moved = float(choices.storage_bytes @ chosen[choices.move])
    assert (moved > 1) == moves
    assert (choices.times @ chosen > 0.5) == again
    if platform.host_bytes is not None:
        assert moved == pytest.approx(platform.host_bytes)


def test_nothing_moves_where_there_is_room_for_all():
    graph = layers(6)
    choices = Choices(graph, Surroundings(), moves=True)
    program = make_program(graph, graph.backward)
    prediction = predict(graph, program)
    lives = choices.lives(program, prediction)
    may = np.flatnonzero(choices.move).tolist()
    chosen = Traffic(choices, Platform(bandwidth=8.0), may).chosen(
        lives, choices.highest(lives), prediction.peak_bytes
    )
    assert chosen[choices.move].max() == pytest.approx(0)
