"""What a stage may save, against every subset of its values."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elbowroom.stages.cuts import cut
from elbowroom.stages.savings import _cheapest, _there_anyway, recomputed, ways_to_save
from joints import FORMS, Step, joint_of, joints, missing


@st.composite
def stages(draw, most: int = 9, forms: tuple[str, ...] = FORMS):
    """A stage of at most `most` operators: a whole joint graph, or part of one."""
    joint = draw(joints(2 * most, forms))
    pieces = cut(joint, divide=True, most=draw(st.integers(1, 5)))
    fitting = [piece for piece in pieces if len(piece.forward) <= most and piece.needs]
    assume(fitting)
    return joint, draw(st.sampled_from(fitting))


def inside(piece) -> list[int]:
    return [op for op in piece.needs if op in piece.forward]


def costs(joint, piece, saved) -> tuple[int, float]:
    """Bytes kept beyond what crosses the stage's borders, and the time of what must run again."""
    border = (*piece.enters, *piece.leaves)
    kept = {storage for op in saved for storage in joint.storages(op)}
    kept -= {storage for op in border for storage in joint.storages(op)}
    again = missing(joint, inside(piece), {*saved, *border})
    return sum(joint.storage_bytes[storage] for storage in kept), sum(joint.ops[op].time for op in again)


FREE_VIEWS = tuple(form for form in FORMS if form != "mixed")  # running any view again takes no time
PRICES = st.sampled_from([4.0**k for k in range(-6, 7)])


@given(stages(forms=FREE_VIEWS), PRICES)
@settings(max_examples=100)
def test_the_minimum_cut_is_the_cheapest_of_all_subsets(made, price):
    """With each storage counted once. The cut counts it for every view saved, so it keeps one and remakes views."""
    joint, piece = made
    compare_with_all_subsets(joint, piece, price, lambda saved: costs(joint, piece, saved)[0])


@given(stages(), PRICES)
@settings(max_examples=100)
def test_the_minimum_cut_is_the_cheapest_where_every_value_pays(made, price):
    joint, piece = made
    compare_with_all_subsets(joint, piece, price, lambda saved: sum(costs(joint, piece, [op])[0] for op in saved))


def compare_with_all_subsets(joint, piece, price, bytes_of) -> None:
    total = sum(joint.ops[op].time for op in piece.forward) or 1.0
    price *= total / 10  # seconds per byte, around what is worth a thought

    def cost(saved) -> float:
        return price * bytes_of(saved) + costs(joint, piece, saved)[1]

    saved = _cheapest(joint, piece, inside(piece), _there_anyway(joint, piece), price)
    assert all(joint.ops[op].storable for op in saved)
    storable = [op for op in piece.forward if joint.ops[op].storable]
    best = min(cost(some) for size in range(len(storable) + 1) for some in combinations(storable, size))
    assert cost(saved) <= best + 3 * len(piece.forward) * total / 1e8  # capacities are whole 10⁻⁸ of the total


@given(stages(most=14))
@settings(max_examples=80)
def test_ways_start_with_everything_and_trade_bytes_for_time(made):
    joint, piece = made
    ways = ways_to_save(joint, piece)
    assert ways[0].saved == set(inside(piece))
    assert ways[0].time == 0
    assert len(ways) <= 8
    for way in ways:
        assert (way.bytes, way.time) == costs(joint, piece, way.saved)
    for more, less in pairwise(ways):
        assert more.bytes > less.bytes
        assert more.time < less.time or (more is ways[0] and less.time == 0)


@given(stages(most=14), st.integers(1, 4))
@settings(max_examples=50)
def test_fewer_ways_keep_the_ends(made, most):
    joint, piece = made
    ways, fewer = ways_to_save(joint, piece), ways_to_save(joint, piece, most)
    assert fewer[0] == ways[0]
    assert len(fewer) == min(most, len(ways))
    assert most == 1 or fewer[-1] == ways[-1]


@given(stages(most=14))
@settings(max_examples=80)
def test_every_way_lets_the_backward_run(made):
    joint, piece = made
    there = {*piece.enters, *piece.leaves, *joint.inputs}
    for way in ways_to_save(joint, piece):
        have = {*way.saved, *there}
        for op in recomputed(joint, inside(piece), have):
            assert op in piece.forward
            assert have.issuperset(joint.ops[op].replay_reads)
            have.add(op)
        assert have.issuperset(inside(piece))


def test_a_view_is_saved_rather_than_the_tuple_it_comes_from():
    """Of a step's two outputs the backward reads one; the other, though there when it is saved, is not kept."""
    step = Step("tuple", (1,), (3, 40), 2, 1, 0, True, False, False, False, False, True)
    joint = joint_of([step, step])
    (piece,) = cut(joint, most=1)
    everything, *_, least = ways_to_save(joint, piece)
    assert all(joint.ops[op].storable for op in everything.saved)
    assert least.bytes == 0
    assert least.time == 4


def test_a_list_of_views_is_not_saved_though_it_would_be_cheapest():
    """Both items are read; one storage holds them and the list, but a list cannot be kept."""
    made = Step("plain", (1,), (3, 3), 9, 1, 0, True, False, False, False, False, False)
    split = Step("split", (1,), (3, 3), 0, 1, 0, False, False, False, False, False, False)
    joint = joint_of([made, split, Step("plain", (1, 2), (3, 3), 1, 1, 0, True, False, False, False, True, False)])
    (piece,) = cut(joint, most=1)
    for price in (0.01, 0.1, 1.0):
        saved = _cheapest(joint, piece, inside(piece), _there_anyway(joint, piece), price)
        assert saved == set(joint.forward[:1])
