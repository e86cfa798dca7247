"""Sequences of lower sets against an exhaustive search over all of them, on small random graphs."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elbowroom.errors import InputError
from elbowroom.problem import Graph, Node
from elbowroom.schedule import Backward, Discard, Forward, simulate
from elbowroom.schedule.liveness import with_liveness
from elbowroom.solve import METHODS, Options, Status, solve
from elbowroom.solve import lower_set_table as lower_sets
from elbowroom.solve.lower_set_table import Accounting, LowerSetTable, all_lower_sets, pruned_lower_sets
from problems import random_graph

OPTIONS = Options()


# --- the definitions of 002, read off the page ---


def is_lower(graph, chosen):
    return all(u in chosen for v in chosen for u in graph.predecessors[v])


def every_lower_set(graph):
    nodes = range(len(graph))
    subsets = (frozenset(s) for size in range(len(graph) + 1) for s in combinations(nodes, size))
    return [s for s in subsets if is_lower(graph, s)]


def boundary(graph, chosen):
    return {v for v in chosen if any(w not in chosen for w in graph.successors[v])}


def weight(graph, chosen):
    return sum(graph.nodes[v].bytes for v in chosen)


def time(graph, chosen):
    return sum(graph.nodes[v].time for v in chosen)


def peak(graph, sequence, accounting):
    kept, done, most = set(), frozenset(), 0
    for larger in sequence:
        part = larger - done
        if accounting is Accounting.REFEREE:
            more = weight(graph, boundary(graph, done))
        else:
            readers = {w for v in larger for w in graph.successors[v]}
            more = weight(graph, readers - larger)
            more += weight(graph, {u for w in readers for u in graph.predecessors[w]} - larger)
        most = max(most, weight(graph, kept) + 2 * weight(graph, part) + more)
        kept |= boundary(graph, larger)
        done = larger
    return most


def every_sequence(graph, family):
    """Growing sequences from the empty set, which is left out, to the whole graph."""
    whole = frozenset(range(len(graph)))

    def after(last):
        if last == whole:
            yield ()
        for following in family:
            if last < following:
                yield from ((following, *rest) for rest in after(following))

    return list(after(frozenset()))


def computed_again(graph, smaller, larger):
    """What is discarded and leads to something outside."""
    leading = boundary(graph, larger)
    while more := {v for v in larger if set(graph.successors[v]) & leading} - leading:
        leading |= more
    return (leading & larger) - smaller - boundary(graph, larger)


def overhead(graph, sequence, *, last_too):
    parts = list(zip((frozenset(), *sequence), sequence, strict=False))
    again = sum(time(graph, computed_again(graph, smaller, larger)) for smaller, larger in parts[:-1])
    return again + (time(graph, parts[-1][1] - parts[-1][0]) if last_too else 0)


def as_set(mask):
    return frozenset(v for v in range(mask.bit_length()) if mask >> v & 1)


def small_graphs(count, seed, nodes=6):
    rng = Random(seed)
    return [random_graph(rng, rng.randint(1, nodes)) for _ in range(count)]


# --- the tests ---


def test_all_lower_sets_are_found_once():
    for graph in small_graphs(300, 1, nodes=7):
        found = all_lower_sets(graph)
        assert len(found) == len(set(found))
        assert {as_set(mask) for mask in found} == set(every_lower_set(graph))


def test_the_pruned_family_has_what_each_node_depends_on():
    for graph in small_graphs(200, 2, nodes=7):
        found = {as_set(mask) for mask in pruned_lower_sets(graph)}
        for v in range(len(graph)):
            needed = {v}
            while more := {u for w in needed for u in graph.predecessors[w]} - needed:
                needed |= more
            assert frozenset(needed) in found
        assert found <= set(every_lower_set(graph))
        assert len(found) <= len(graph) + 2


@pytest.mark.parametrize("accounting", Accounting)
@pytest.mark.parametrize("family", [all_lower_sets, pruned_lower_sets])
def test_the_dynamic_program_equals_an_exhaustive_search(accounting, family):
    for graph in small_graphs(250, 3):
        masks = family(graph)
        table = LowerSetTable(graph, masks, accounting)
        sequences = every_sequence(graph, [as_set(mask) for mask in masks])
        peaks = [peak(graph, sequence, accounting) for sequence in sequences]
        assert table.least_budget == min(peaks)
        for budget in sorted({min(peaks), (min(peaks) + max(peaks)) // 2, max(peaks)}):
            fitting = [s for s, p in zip(sequences, peaks, strict=True) if p <= budget]
            chosen = [as_set(mask) for mask in table.fastest(budget).masks]
            assert peak(graph, chosen, accounting) <= budget
            least = min(overhead(graph, s, last_too=False) for s in fitting)
            assert overhead(graph, chosen, last_too=False) == pytest.approx(least, abs=1e-9)
        chosen = [as_set(mask) for mask in table.coarsest(table.least_budget).masks]
        lowest = [s for s, p in zip(sequences, peaks, strict=True) if p == min(peaks)]
        assert peak(graph, chosen, accounting) == min(peaks)
        most = max(overhead(graph, s, last_too=True) for s in lowest)
        assert overhead(graph, chosen, last_too=True) == pytest.approx(most, abs=1e-9)


def test_thousands_of_graphs_of_seven_nodes():
    """By a search that remembers where it has been: for each set and bytes kept, the least time."""
    for graph in small_graphs(2500, 4, nodes=7):
        family = every_lower_set(graph)
        table = LowerSetTable(graph, all_lower_sets(graph))
        budget = table.least_budget
        assert _least_overhead(graph, family, budget - 1) == float("inf")
        for room in (budget, budget + 3, budget + 12):
            chosen = [as_set(mask) for mask in table.fastest(room).masks]
            found = overhead(graph, chosen, last_too=False)
            assert found == pytest.approx(_least_overhead(graph, family, room), abs=1e-9)


@pytest.mark.parametrize("accounting", Accounting)
def test_larger_graphs_have_the_answer_that_is_found_without_a_guess(accounting):
    """A guess leaves out what comes too late, and what cannot end in time: never the answer."""
    rng = Random(5)
    for _ in range(150):
        graph = random_graph(rng, rng.randint(10, 14))
        table = LowerSetTable(graph, all_lower_sets(graph), accounting)
        for room in (table.least_budget, int(1.2 * table.least_budget), int(1.6 * table.least_budget)):
            starts, times, *_ = table._fronts(lower_sets.FASTEST, room, float("inf"))
            chosen = [as_set(mask) for mask in table.fastest(room).masks]
            assert overhead(graph, chosen, last_too=False) == pytest.approx(times[starts[-2]], abs=1e-9)
            assert table._least_time(room) <= times[starts[-2]] + 1e-9


def _least_overhead(graph, family, budget):
    whole = frozenset(range(len(graph)))

    @cache
    def least(done, kept):
        if done == whole:
            return 0.0
        more = weight(graph, boundary(graph, done))
        best = float("inf")
        for larger in family:
            if done < larger and kept + 2 * weight(graph, larger - done) + more <= budget:
                edge = boundary(graph, larger)
                again = time(graph, computed_again(graph, done, larger))
                best = min(best, again + least(larger, kept + weight(graph, edge - done)))
        return best

    return least(frozenset(), 0)


@pytest.mark.parametrize("name", ["lower-sets", "lower-sets-approx"])
def test_schedules_keep_the_budget_and_take_the_time_promised(name):
    for graph in small_graphs(150, 5, nodes=12):
        least = METHODS[name].least_budget(graph, OPTIONS)
        times = []
        for budget in (least, least + 5, least + 20, 10**6):
            result = solve(graph, budget, name)
            assert result.peak_bytes <= budget
            assert result.notes["model_peak_bytes"] <= budget
            plain = sum(node.time for node in graph.nodes)
            assert result.time == pytest.approx(plain + result.notes["overhead_time"])
            times.append(result.time)
        assert times == sorted(times, reverse=True)
        assert times[-1] == pytest.approx(plain)
        assert least == 0 or solve(graph, least - 1, name).status is Status.INFEASIBLE


def test_all_lower_sets_are_never_worse_than_some():
    for graph in small_graphs(100, 6, nodes=12):
        exact, pruned = (METHODS[name] for name in ("lower-sets", "lower-sets-approx"))
        assert exact.least_budget(graph, OPTIONS) <= pruned.least_budget(graph, OPTIONS)
        budget = pruned.least_budget(graph, OPTIONS) + 5
        assert solve(graph, budget, exact.name).time <= solve(graph, budget, pruned.name).time + 1e-9


@pytest.mark.parametrize("name", ["lower-sets-memory", "lower-sets-approx-memory"])
def test_memory_centric_methods_need_no_budget_and_keep_their_own(name):
    for graph in small_graphs(100, 7, nodes=12):
        result = solve(graph, None, name)
        least = METHODS[name].least_budget(graph, OPTIONS)
        assert result.peak_bytes == least <= result.notes["model_peak_bytes"]
        assert least == 0 or not solve(graph, least - 1, name).feasible


def test_too_many_lower_sets_are_refused_with_a_remedy(monkeypatch):
    monkeypatch.setattr(lower_sets, "MOST_SETS", 1000)
    broad = Graph(tuple(Node("", 1, 1) for _ in range(12)), ())
    with pytest.raises(InputError, match="use 'lower-sets-approx'"):
        solve(broad, 100, "lower-sets")
    assert solve(broad, 100, "lower-sets-approx").feasible


def test_a_thinned_table_still_keeps_its_budget(monkeypatch):
    monkeypatch.setattr(lower_sets, "MOST_PAIRS", 2)
    rng = Random(9)
    graphs = [random_graph(rng, 16, density=0.3) for _ in range(30)]
    statuses = set()
    for graph in graphs:
        least = METHODS["lower-sets"].least_budget(graph, OPTIONS)
        result = solve(graph, least + 2, "lower-sets")
        assert result.peak_bytes <= least + 2
        statuses.add(result.status)
    assert Status.HEURISTIC in statuses


# --- liveness ---


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6))
def test_liveness_keeps_a_schedule_valid_and_lowers_it(seed):
    graph = random_graph(Random(seed), 1 + seed % 12)
    masks = LowerSetTable(graph, pruned_lower_sets(graph)).fastest(10**6).masks
    schedule = lower_sets.canonical_schedule(graph, masks)
    live = with_liveness(graph, schedule)
    before, after = simulate(graph, schedule), simulate(graph, live)
    assert after.peak_bytes <= before.peak_bytes
    assert after.time <= before.time
    assert with_liveness(graph, live) == live


def test_liveness_discards_at_once_and_leaves_out_what_nobody_reads():
    graph = Graph((Node("a", 1, 4), Node("b", 1, 2), Node("c", 1, 1)), ((0, 1), (1, 2)))
    a, b, c = (Forward(v, "all") for v in range(3))
    wasteful = [a, b, Discard(0), a, Discard(0), c, Backward(2), a, Backward(1), Backward(0)]
    live = [a, b, Discard(0), c, Backward(2), a, Backward(1), Backward(0)]
    assert with_liveness(graph, wasteful) == tuple(live)


# --- chen ---


def test_chen_cuts_where_one_node_joins_both_sides():
    """Two diamonds in a row: the node between them, and those before the first and after the second."""
    edges = ((0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5), (4, 6), (5, 7), (6, 7), (7, 8))
    graph = Graph(tuple(Node(f"v{v}", 1, 4) for v in range(9)), edges)
    ends = set()
    for budget in range(METHODS["chen"].least_budget(graph, OPTIONS), 100):
        sets = solve(graph, budget, "chen").notes["lower_sets"]
        ends |= {max(chosen, key=graph.order.index) for chosen in sets}
    assert ends <= {1, 4, 7, 8}
    assert 4 in ends


def test_chen_tries_every_size_of_segment():
    """However it is cut, no threshold gives another schedule than those it chose from."""
    from elbowroom.solve.chen import _cut, _segmentations

    for graph in small_graphs(60, 10, nodes=10):
        cuts = {v for v in range(len(graph)) if graph.predecessors[v] and graph.successors[v]}
        total = sum(node.bytes for node in graph.nodes)
        tried = {_cut(graph, cuts, size)[0] for size in range(total + 1)}
        size, followed = total, set()
        while True:
            masks, largest = _cut(graph, cuts, size)
            followed.add(masks)
            if size == 0:
                break
            size = max(0, min(size, largest) - 1)
        assert followed == tried
        assert _segmentations(graph)


# --- acg ---


def test_acg_equals_an_exhaustive_search():
    for graph in small_graphs(250, 11):
        sequences = every_sequence(graph, every_lower_set(graph))

        def objective(sequence, graph=graph):
            kept = set().union(*(boundary(graph, larger) for larger in sequence))
            parts = [
                larger - smaller - kept for smaller, larger in zip((frozenset(), *sequence), sequence, strict=False)
            ]
            return weight(graph, kept) + max(weight(graph, part) for part in parts)

        result = solve(graph, None, "acg")
        assert result.notes["model_peak_bytes"] == min(map(objective, sequences))
        assert objective([frozenset(s) for s in result.notes["lower_sets"]]) == result.notes["model_peak_bytes"]


# --- as a chain ---


def test_as_a_chain_it_is_never_slower_than_the_approximation():
    for graph in small_graphs(30, 12, nodes=14):
        least = METHODS["lower-sets-approx"].least_budget(graph, OPTIONS)
        for budget in (least, least + 4, least + 15):
            assert solve(graph, budget, "lower-sets-chain").time <= solve(graph, budget, "lower-sets-approx").time


def test_as_a_chain_it_goes_lower_than_computing_everything_twice():
    """A long chain with a skip from its first node to its last: recomputing recursively needs far less."""
    nodes = tuple(Node(f"v{i}", 1, 4) for i in range(60))
    graph = Graph(nodes, (*((i, i + 1) for i in range(59)), (0, 59)))
    chained, twice = (METHODS[name].least_budget(graph, OPTIONS) for name in ("lower-sets-chain", "lower-sets"))
    assert chained < 0.5 * twice
    result = solve(graph, chained, "lower-sets-chain")
    runs = [operation.at for operation in result.schedule if isinstance(operation, Forward)]
    assert max(map(runs.count, range(60))) > 2
