"""The table with a price: its schedules cost what it says, fit, and are the cheapest nearly always."""

from __future__ import annotations

from math import inf, isclose
from random import Random

import pytest

from elbowroom.problem import Platform
from elbowroom.schedule import simulate
from elbowroom.solve import METHODS, Options, solve
from elbowroom.solve.offload.placing import bytes_of, place
from elbowroom.solve.offload.priced import (
    LeastTable,
    Price,
    PricedTable,
    busy_time,
    computing_time,
    link_time,
)
from exhaustive_priced import least_priced_cost
from problems import random_chain

LINK = Platform(bandwidth=1.0)
AT_ONCE = Platform(to_host=1e12, from_host=1e12)
ENDLESS = Price(1e9)


def moving_cost(chain, price, chosen):
    sizes = [bytes_of(chain, chosen.computing, move) for move in chosen.moves]
    return sum(price.seconds * link_time(size, LINK) for size in sizes)


@pytest.mark.parametrize("price", [Price(0.0), Price(0.1), Price(1.0), ENDLESS])
def test_schedules_cost_what_the_table_says_and_fit(price):
    """Memory is what the referee measures where copies take next to no time."""
    rng = Random(1)
    for _ in range(25):
        chain = random_chain(rng, rng.randint(1, 6), alternatives=True, any_gradients=True)
        table = PricedTable(chain, LINK, price, 1, 40)
        for slots in range(0, 41, 3):
            if table.cost(slots) == inf:
                continue
            chosen = table.chosen(slots)
            placed = place(chain, chosen.computing, chosen.moves, slots, AT_ONCE)
            assert placed is not None
            time = simulate(chain, chosen.computing).time
            assert isclose(time, computing_time(chain, chosen), rel_tol=1e-12)
            assert isclose(time + moving_cost(chain, price, chosen), table.cost(slots), rel_tol=1e-9)
            assert busy_time(chain, AT_ONCE, chosen) <= placed.time + 1e-9


def test_with_an_endless_price_it_is_persistent():
    rng = Random(2)
    for _ in range(30):
        chain = random_chain(rng, rng.randint(1, 7), alternatives=True)
        table = PricedTable(chain, LINK, ENDLESS, 1, 40)
        least = METHODS["persistent"].least_budget(chain, Options())
        for slots in range(least, 41, 5):
            assert table.cost(slots) == solve(chain, slots, "persistent").time


def test_the_least_memory_is_where_the_table_begins_and_has_a_schedule():
    rng = Random(3)
    for _ in range(40):
        chain = random_chain(rng, rng.randint(1, 6), alternatives=True, any_gradients=True)
        table, least = PricedTable(chain, LINK, Price(0.1), 1, 60), LeastTable(chain, LINK)
        assert min(slots for slots in range(61) if table.cost(slots) < inf) == least.least_bytes
        for budget in (least.least_bytes, least.least_bytes + 2):
            chosen = least.chosen(budget)
            assert place(chain, chosen.computing, chosen.moves, budget, LINK) is not None


def compare_with_search(rng, rounds, most):
    """How often the table is as cheap as the cheapest of all schedules, of how many. It is never cheaper."""
    equal = count = 0
    for _ in range(rounds):
        chain = random_chain(rng, rng.randint(1, most), alternatives=True)
        price = Price(rng.choice([0.05, 0.3, 1.0]))
        table = PricedTable(chain, LINK, price, 1, 30)
        least = LeastTable(chain, LINK).least_bytes
        for slots in (least, least + 2, least + 5):
            if slots > 30:
                continue
            found = least_priced_cost(chain, slots, lambda size, p=price: p.seconds * link_time(size, LINK))
            assert found <= table.cost(slots) + 1e-9
            count += 1
            equal += found >= table.cost(slots) - 1e-9
    return equal, count


def test_nothing_is_much_cheaper():
    """What a search over all schedules finds beyond: values that leave twice for one price, or later checkpoints."""
    equal, count = compare_with_search(Random(4), 25, 3)
    assert equal >= 0.9 * count


@pytest.mark.slow
def test_nothing_is_much_cheaper_in_many_chains():
    equal, count = compare_with_search(Random(5), 150, 4)
    assert equal >= 0.9 * count
