"""`auto`: picks a method by the kind and size of the problem, and says what it picked and why."""

from __future__ import annotations

from elbowroom.errors import InputError
from elbowroom.problem import Chain, Graph, Join, Problem, Towers
from elbowroom.solve.equiv_chain import EquivChain
from elbowroom.solve.floating import Floating, affords
from elbowroom.solve.join import JoinOptimal, join_states, join_work
from elbowroom.solve.lower_set_table import few_lower_sets
from elbowroom.solve.lower_sets import LowerSets
from elbowroom.solve.lower_sets_approx import LowerSetsApprox
from elbowroom.solve.method import Method, Options
from elbowroom.solve.offload.combined import Combined
from elbowroom.solve.persistent import Persistent
from elbowroom.solve.persistent import row_count as persistent_rows
from elbowroom.solve.sequential import Sequential
from elbowroom.solve.slots import CUSTOMARY, FEWEST, TABLE_BYTES, useful_bytes
from elbowroom.solve.store_all import StoreAll
from elbowroom.solve.towers import TowersNested

AUTO = "auto"
SUMMARY = "picks a method by problem and size, and says what it picked"
_PATIENCE = 4e9  # inner steps: a few seconds
_MOST_WITH_A_LINK = 200  # stages: about a minute


def choose(problem: Problem, budget: int | None, options: Options) -> tuple[Method, str]:
    """The method to use, and a sentence that says why."""
    if budget is None:
        raise InputError("budget", "missing; give the memory to stay within, such as 8GiB")
    if isinstance(problem, Chain):
        method, why = _for_chain(problem, budget, options)
    elif isinstance(problem, Join):
        method, why = _for_join(problem, budget)
    elif isinstance(problem, Towers):
        method, why = TowersNested(), "the one method for towers that recomputes"
    else:
        method, why = _for_graph(problem, budget, options)
    return method, f"auto picked {method.name} ({why}): "


def _for_chain(chain: Chain, budget: int, options: Options) -> tuple[Method, str]:
    everything = StoreAll()
    if everything.least_budget(chain, options) <= budget and not any(s.alternatives for s in chain.stages):
        return everything, "it all fits, so nothing needs recomputing"
    if options.platform.has_link and len(chain) <= _MOST_WITH_A_LINK:
        return Combined(), "it also moves values over the link"
    n, slots = len(chain), min(options.slots or CUSTOMARY, budget, useful_bytes(chain))
    if affords(n, slots):
        return Floating(), f"{n} stages are few enough for the true optimum"
    if 9 * persistent_rows(n) * FEWEST <= TABLE_BYTES:
        return Persistent(), f"{n} stages are too many for 'floating', which would rarely be faster"
    return Sequential(), f"{n} stages are too many for any dynamic program over memory"


def _for_join(join: Join, budget: int) -> tuple[Method, str]:
    if join_work(join, budget) <= _PATIENCE and 8 * join_states(join, budget) <= TABLE_BYTES:
        return JoinOptimal(), "optimal, and small enough"
    return EquivChain(), "the branches are too long or too many for the optimum"


def _for_graph(graph: Graph, budget: int, options: Options) -> tuple[Method, str]:
    everything = StoreAll()
    if everything.least_budget(graph, options) <= budget:
        return everything, "it all fits, so nothing needs recomputing"
    family = few_lower_sets(graph)
    if family is None:
        return LowerSetsApprox(), "the graph has too many nodes or lower sets to try all"
    return LowerSets(), f"{len(family):,} lower sets are few enough to try all"
