"""`opportunist`: keeps the link busy, and saves nothing while it is (001 section 4.3).

A stage saves all; its input and what it saved go to the host; until both have left, the forwards run on without
saving anything. Then the next stage saves all, and so on until the rest of the chain fits in memory. What was passed
without saving is recomputed after the loss in the fastest way that fits beside its input.
"""

from __future__ import annotations

from typing import final

from elbowroom.problem import Chain, Platform, Problem
from elbowroom.schedule import Operation
from elbowroom.solve.method import Found, Method, Options
from elbowroom.solve.offload.graded import Graded, fallback, without_need
from elbowroom.solve.offload.leanest import Leanest
from elbowroom.solve.offload.limits import SavedChain
from elbowroom.solve.offload.parts import Moving, Part, in_a_row, shifted, sub_chain
from elbowroom.solve.offload.placing import place
from elbowroom.solve.offload.ways import fastest
from elbowroom.solve.persistent import find as find_persistent
from elbowroom.solve.persistent import least_budget as least_persistent


@final
class Opportunist(Method):
    name = "opportunist"
    kinds = ("chain",)
    summary = "saves and offloads a stage whenever the link is free, recomputes the others; O(stages³ · slots)"
    exact = False
    needs_link = True

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Chain)
        return Leanest(problem).least_bytes(options.platform)

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Chain)
        fastest = without_need(problem, budget)
        if fastest is not None:
            return fastest
        moving = opportune(problem, budget, options)
        placed = moving and place(problem, moving.computing, moving.moves, budget, options.platform)
        return (Graded(placed) if placed else fallback(Leanest(problem), budget, options)).found(problem)


def opportune(chain: Chain, budget: int, options: Options) -> Moving | None:
    """The schedule; None if something between two saved stages, or what follows the last of them, does not fit."""
    n, ways, parts = len(chain), fastest(chain).ways, []
    held, stage, host = chain.input_bytes, 1, options.platform.host_bytes
    while not _fits(chain, held, stage, budget) and stage < n:
        way = ways[stage - 1]
        saved = chain.stages[stage - 1].ways[way].saved_bytes
        if host is not None:
            host -= held + saved
            if host < 0:
                return None
        options.progress(stage / n)
        parts.append(Part.saving(stage, way, moved=held > 0))
        stop = _walk_while_busy(chain, stage + 1, saved, held + saved, budget, options.platform)
        held, stage = saved, stage + 1
        if stop >= stage:
            again = _recomputing(chain, held, stage, stop, budget, options)
            if again is None:
                return None
            parts.append(Part.walking(stage, stop, again, moved=held > 0))
            held, stage = chain.output_bytes[stop], stop + 1
    rest = _recomputing(chain, held, stage, n, budget, options)
    if rest is None:
        return None
    return in_a_row([*parts, Part(stage, tuple(rest), ())])


def _fits(chain: Chain, held: int, stage: int, budget: int) -> bool:
    """Whether the chain from a stage on, with its input of so many bytes, needs no recomputation."""
    rest = sub_chain(chain, held, stage, len(chain))
    smallest = [min(range(len(each.ways)), key=lambda way: each.ways[way].saved_bytes) for each in rest.stages]
    return SavedChain(rest, tuple(smallest)).peak_bytes <= budget


def _walk_while_busy(chain: Chain, first: int, held: int, leaving: int, budget: int, platform: Platform) -> int:
    """The last stage that runs without saving while so many bytes leave: `first` - 1 if none does.

    `held` is the input of the first. The walk ends early where the rest fits, and before the loss.
    """
    assert platform.rate_to_host is not None
    busy = leaving / platform.rate_to_host + 2 * platform.seconds_per_copy
    stage = first
    while busy > 0 and stage < len(chain) and not _fits(chain, held, stage, budget):
        busy -= chain.stages[stage - 1].forward_time
        held = chain.output_bytes[stage]
        stage += 1
    return stage - 1


def _recomputing(
    chain: Chain, held: int, first: int, last: int, budget: int, options: Options
) -> list[Operation] | None:
    """The fastest way to run backwards `last` to `first` from an input of so many bytes, the only thing stored."""
    part = sub_chain(chain, held, first, last)
    if least_persistent(part, save_early=True) > budget:
        return None
    found = find_persistent(part, budget, Options(options.slots), save_early=True)
    return shifted(found.schedule, by=first - 1)
