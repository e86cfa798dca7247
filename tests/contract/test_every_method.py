"""What every method must satisfy, on random problems: the contract of `solve`."""

from __future__ import annotations

from random import Random

import pytest

from elbowroom.errors import InputError
from elbowroom.problem import Chain, Graph, Join, Node, Stage
from elbowroom.schedule import simulate
from elbowroom.solve import AUTO, METHODS, Options, Status, solve
from problems import byte_chain, random_chain, random_graph, random_join, random_towers

# Methods that move values need a link: test_methods_with_a_link.py has them.
CHAIN_METHODS = [name for name, method in METHODS.items() if "chain" in method.kinds and not method.needs_link]
GRAPH_METHODS = [name for name, method in METHODS.items() if "graph" in method.kinds]
TOWER_METHODS = [name for name, method in METHODS.items() if "towers" in method.kinds]
JOIN_METHODS = [name for name, method in METHODS.items() if "join" in method.kinds]
EXACT_CHAIN_METHODS = [name for name in CHAIN_METHODS if METHODS[name].exact]


def least(problem, name):
    return METHODS[name].least_budget(problem, Options())


def check(problem, result, budget):
    again = simulate(problem, result.schedule)
    assert (again.time, again.peak_bytes) == (result.time, result.peak_bytes)
    assert result.peak_bytes <= budget
    simulate(problem, result.schedule, budget=budget)  # and the referee lets it run within the budget


def chain_of_equals(stages):
    return Chain(1, 1, tuple(Stage(f"s{i}", 1, 1, 3, 7, 3) for i in range(stages)))


def small_chains(count, *, alternatives=False):
    rng = Random(20260)
    return [random_chain(rng, rng.randint(1, 9), alternatives=alternatives) for _ in range(count)]


@pytest.mark.parametrize("name", [*CHAIN_METHODS, AUTO])
@pytest.mark.parametrize("alternatives", [False, True])
def test_chain_schedules_are_what_they_claim(name, alternatives):
    for chain in small_chains(40, alternatives=alternatives):
        floor = least(chain, "floating" if name == AUTO else name)
        for budget in (floor, floor + 1, floor + 4, floor + 50):
            result = solve(chain, budget, name)
            assert result.feasible
            check(chain, result, budget)


@pytest.mark.parametrize("name", CHAIN_METHODS)
def test_the_least_budget_of_a_chain_is_the_least(name):
    for chain in small_chains(60, alternatives=True):
        floor = least(chain, name)
        at_floor = solve(chain, floor, name)
        assert at_floor.feasible
        assert at_floor.peak_bytes == floor  # were its peak lower, a smaller budget would do
        if floor > 0:
            refused = solve(chain, floor - 1, name)
            assert not refused.feasible
            assert refused.status is Status.INFEASIBLE
            assert refused.least_budget == floor


@pytest.mark.parametrize("name", [*EXACT_CHAIN_METHODS, "sequential"])
def test_time_never_rises_with_the_budget(name):
    for chain in small_chains(25, alternatives=True):
        floor = least(chain, name)
        times = [solve(chain, budget, name).time for budget in range(floor, floor + 30)]
        assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("name", [*CHAIN_METHODS, AUTO])
def test_chains_in_bytes_keep_their_budget(name):
    """Sizes that share no divisor, rounded to slots: the plan must fit in bytes, down to the least budget."""
    rng = Random(7)
    for stages in (1, 2, 5, 12, 20):
        chain = byte_chain(rng, stages)
        floor = least(chain, "floating" if name == AUTO else name)
        everything = least(chain, "store-all")
        for budget in (floor, floor + 1, (floor + everything) // 2, everything, 10 * everything):
            if budget >= floor:
                check(chain, solve(chain, budget, name), budget)
        assert not solve(chain, floor - 1, name).feasible


def test_auto_takes_the_optimum_however_many_slots_are_asked_for():
    """Slots beyond the bytes there are cost nothing, so they must not drive auto to a lesser method."""
    chain = random_chain(Random(1), 9)
    budget = least(chain, "floating") + 1
    assert solve(chain, budget, slots=10**9).solver == "floating"


def test_coarse_slots_still_keep_the_budget():
    chain = byte_chain(Random(3), 12)
    floor = least(chain, "persistent")
    for slots in (1, 3, 10, 50):
        for budget in (floor, floor * 5 // 4, floor * 2):
            for name in ("persistent", "floating", "revolve"):
                if budget >= least(chain, name):
                    check(chain, solve(chain, budget, name, slots=slots), budget)


def test_slots_beyond_what_fits_are_refused_unless_none_is_needed():
    with pytest.raises(InputError, match=r"^slots: 100000 for 300 stages need a table"):
        solve(byte_chain(Random(3), 300), 10**10, "persistent", slots=100_000)
    small = random_chain(Random(3), 300)
    floor = least(small, "persistent")
    assert solve(small, floor + 50, "persistent", slots=10**9).status is Status.OPTIMAL
    check(small, solve(small, 10**9, "persistent"), 10**9)


def test_finer_slots_are_no_slower():
    chain = byte_chain(Random(5), 15)
    budget = least(chain, "persistent") * 3 // 2
    times = [solve(chain, budget, "persistent", slots=slots).time for slots in (20, 200, 2000)]
    assert times[0] > times[2]
    assert times[1] >= times[2] * (1 - 1e-12)


@pytest.mark.parametrize("name", [*JOIN_METHODS, AUTO])
def test_join_schedules_are_what_they_claim(name):
    rng = Random(11)
    for _ in range(60):
        join = random_join(rng, rng.randint(1, 3), 6)
        floor = least(join, "join" if name == AUTO else name)
        for budget in (floor, floor + 1, floor + 3, floor + 40):
            check(join, solve(join, budget, name), budget)
        refused = solve(join, floor - 1, name)
        assert not refused.feasible
        assert refused.least_budget == floor


@pytest.mark.parametrize("name", JOIN_METHODS)
def test_joins_with_times_that_are_not_whole(name):
    for lengths in ((9,), (7, 4), (5, 0, 3)):
        join = Join(lengths, 0.1, 0.3, 1 / 3, (0,) * len(lengths))
        floor = least(join, name)
        for budget in (floor, floor + 2, floor + 5):
            check(join, solve(join, budget, name), budget)


@pytest.mark.parametrize(
    ("problem", "name", "field"),
    [
        (chain_of_equals(20_000), "persistent", "stages"),
        (chain_of_equals(20_000), "revolve", "stages"),
        (chain_of_equals(500), "floating", "stages"),
        (chain_of_equals(5_000), "checkpoint-sum", "stages"),
        (Join((300, 300, 300, 300), 1, 1, 1, (0, 0, 0, 0)), "join", "lengths"),
        (Join((200_000,), 1, 1, 1, (0,)), "equiv-chain", "lengths"),
    ],
)
def test_what_is_too_large_is_refused_at_once_and_auto_finds_a_way(problem, name, field):
    with pytest.raises(InputError, match=f"^{field}: .* too "):
        solve(problem, 10**9, name)
    if not isinstance(problem, Join):
        check(problem, solve(problem, 10**9), 10**9)
        tight = least(problem, "sequential") * 11 // 10
        check(problem, solve(problem, tight), tight)


@pytest.mark.parametrize("name", [*TOWER_METHODS, AUTO])
def test_schedules_of_towers_are_what_they_claim(name):
    rng = Random(21)
    for _ in range(40):
        problem = random_towers(rng, rng.randint(1, 3), 4)
        floor = least(problem, "towers" if name == AUTO else name)
        for budget in (floor, floor + 1, floor + 5, floor + 60):
            check(problem, solve(problem, budget, name), budget)
        assert floor == 0 or not solve(problem, floor - 1, name).feasible


@pytest.mark.parametrize("name", ["join", "equiv-chain"])
def test_join_time_never_rises_with_the_slots(name):
    rng = Random(13)
    for _ in range(15):
        join = random_join(rng, rng.randint(1, 3), 7)
        floor = least(join, name)
        times = [solve(join, slots, name).time for slots in range(floor, floor + 20)]
        assert times == sorted(times, reverse=True)


def test_graphs_can_be_stored_and_run():
    graph = Graph(tuple(Node(f"v{i}", 1, 2) for i in range(4)), ((0, 1), (0, 2), (1, 3), (2, 3)))
    result = solve(graph, 1000)
    check(graph, result, 1000)
    assert result.time == 4
    assert solve(graph, result.peak_bytes - 1, "store-all").status is Status.INFEASIBLE


def small_graphs(count):
    rng = Random(31)
    return [random_graph(rng, rng.randint(1, 10)) for _ in range(count)]


@pytest.mark.parametrize("name", [*GRAPH_METHODS, AUTO])
def test_graph_schedules_are_what_they_claim(name):
    for graph in small_graphs(40):
        floor = least(graph, "lower-sets" if name == AUTO else name)
        for budget in (floor, floor + 1, floor + 6, floor + 100):
            result = solve(graph, budget, name)
            assert result.feasible
            check(graph, result, budget)
        assert floor == 0 or not solve(graph, floor - 1, name).feasible


def test_auto_takes_a_method_by_the_number_of_lower_sets():
    narrow = Graph(tuple(Node(f"v{i}", 1, 2) for i in range(9)), tuple((i, i + 1) for i in range(8)))
    assert solve(narrow, least(narrow, "lower-sets")).solver == "lower-sets"
    broad = Graph(tuple(Node(f"v{i}", 1, 2) for i in range(31)), tuple((i, 30) for i in range(30)))
    everything = least(broad, "store-all")
    assert solve(broad, everything).solver == "store-all"
    assert solve(broad, everything - 1).solver == "lower-sets-approx"


def test_exact_methods_order():
    """Each class of schedules contains the next, so the optima are ordered."""
    for chain in small_chains(40):
        floor = least(chain, "revolve")
        for budget in (floor, floor + 3, floor + 9):
            floating, persistent, revolve = (
                solve(chain, budget, n).time for n in ("floating", "persistent", "revolve")
            )
            assert floating <= persistent <= revolve
            for name in ("sequential", "sqrt", "store-all"):
                other = solve(chain, budget, name)
                assert not other.feasible or persistent <= other.time
