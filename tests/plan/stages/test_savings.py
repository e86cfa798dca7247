"""What a stage may save, against every subset of its values."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elbowroom.plan.stages.cuts import cut
from elbowroom.plan.stages.savings import _cheapest, _there_anyway, recomputed, ways_to_save
from stepgraphs import FORMS, Step, graph_of, graphs, missing


@st.composite
def stages(draw, most: int = 9, forms: tuple[str, ...] = FORMS):
    """A stage of at most `most` operators: all of a graph, or part of one."""
    graph = draw(graphs(2 * most, forms))
    sections = cut(graph, divide=True, most=draw(st.integers(1, 5)))
    fitting = [section for section in sections if len(section.forward) <= most and section.needs]
    assume(fitting)
    return graph, draw(st.sampled_from(fitting))


def inside(section) -> list[int]:
    return [op for op in section.needs if op in section.forward]


def costs(graph, section, saved) -> tuple[int, float]:
    """Bytes kept beyond what crosses the stage's borders, and the time of what must run again."""
    border = (*section.enters, *section.leaves)
    kept = {storage for op in saved for storage in graph.storages(op)}
    kept -= {storage for op in border for storage in graph.storages(op)}
    again = missing(graph, inside(section), {*saved, *border})
    return sum(graph.storage_bytes[storage] for storage in kept), sum(graph.ops[op].time for op in again)


FREE_VIEWS = tuple(form for form in FORMS if form != "mixed")  # running any view again takes no time
PRICES = st.sampled_from([4.0**k for k in range(-6, 7)])


@given(stages(forms=FREE_VIEWS), PRICES)
@settings(max_examples=100)
def test_the_minimum_cut_is_the_cheapest_of_all_subsets(made, price):
    """With each storage counted once. The cut counts it for every view saved, so it keeps one and remakes views."""
    graph, section = made
    compare_with_all_subsets(graph, section, price, lambda saved: costs(graph, section, saved)[0])


@given(stages(), PRICES)
@settings(max_examples=100)
def test_the_minimum_cut_is_the_cheapest_where_every_value_pays(made, price):
    graph, section = made
    compare_with_all_subsets(graph, section, price, lambda saved: sum(costs(graph, section, [op])[0] for op in saved))


def compare_with_all_subsets(graph, section, price, bytes_of) -> None:
    total = sum(graph.ops[op].time for op in section.forward) or 1.0
    price *= total / 10  # seconds per byte, around what is worth a thought

    def cost(saved) -> float:
        return price * bytes_of(saved) + costs(graph, section, saved)[1]

    saved = _cheapest(graph, section, inside(section), _there_anyway(graph, section), price)
    assert all(graph.ops[op].storable for op in saved)
    storable = [op for op in section.forward if graph.ops[op].storable]
    best = min(cost(some) for size in range(len(storable) + 1) for some in combinations(storable, size))
    assert cost(saved) <= best + 3 * len(section.forward) * total / 1e8  # capacities are whole 10⁻⁸ of the total


@given(stages(most=14))
@settings(max_examples=80)
def test_ways_start_with_everything_and_trade_bytes_for_time(made):
    graph, section = made
    ways = ways_to_save(graph, section)
    assert ways[0].saved == set(inside(section))
    assert ways[0].time == 0
    assert len(ways) <= 8
    for way in ways:
        assert (way.bytes, way.time) == costs(graph, section, way.saved)
    for more, less in pairwise(ways):
        assert more.bytes > less.bytes
        assert more.time < less.time or (more is ways[0] and less.time == 0)


@given(stages(most=14), st.integers(1, 4))
@settings(max_examples=50)
def test_fewer_ways_keep_the_ends(made, most):
    graph, section = made
    ways, fewer = ways_to_save(graph, section), ways_to_save(graph, section, most)
    assert fewer[0] == ways[0]
    assert len(fewer) == min(most, len(ways))
    assert most == 1 or fewer[-1] == ways[-1]


@given(stages(most=14))
@settings(max_examples=80)
def test_every_way_lets_the_backward_run(made):
    graph, section = made
    there = {*section.enters, *section.leaves, *graph.inputs}
    for way in ways_to_save(graph, section):
        have = {*way.saved, *there}
        for op in recomputed(graph, inside(section), have):
            assert op in section.forward
            assert have.issuperset(graph.ops[op].rerun_reads)
            have.add(op)
        assert have.issuperset(inside(section))


def test_a_view_is_saved_rather_than_the_tuple_it_comes_from():
    """Of a step's two outputs the backward reads one; the other, though there when it is saved, is not kept."""
    step = Step("tuple", (1,), (3, 40), 2, 1, 0, True, False, False, False, False, True)
    graph = graph_of([step, step])
    (section,) = cut(graph, most=1)
    everything, *_, least = ways_to_save(graph, section)
    assert all(graph.ops[op].storable for op in everything.saved)
    assert least.bytes == 0
    assert least.time == 4


def test_a_list_of_views_is_not_saved_though_it_would_be_cheapest():
    """Both items are read; one storage holds them and the list, but a list cannot be kept."""
    made = Step("plain", (1,), (3, 3), 9, 1, 0, True, False, False, False, False, False)
    split = Step("split", (1,), (3, 3), 0, 1, 0, False, False, False, False, False, False)
    graph = graph_of([made, split, Step("plain", (1, 2), (3, 3), 1, 1, 0, True, False, False, False, True, False)])
    (section,) = cut(graph, most=1)
    for price in (0.01, 0.1, 1.0):
        saved = _cheapest(graph, section, inside(section), _there_anyway(graph, section), price)
        assert saved == set(graph.forward[:1])
