"""`offload-milp`: the fastest schedule that only offloads, in the referee's own model, by an integer program.

Every stage saves all, in one of its ways. Of the values ā_0 … ā_{n−1} some go to the host and come back, once each,
in any order and at any time: ā_k goes when it has been made, and is back before backward k + 1 begins. It is copied
whole, leaves memory as a whole and takes room as a whole (001 O.7, "int"). Operation i < n is forward i + 1; the
others are backward 2n − i. So ā_k is made by operation k − 1, read by k, and needed again by 2n − 1 − k; between
these two it may be gone.

Variables (`_choose_ways`, `_make_variables`, `_orders`), of which all but the times are 0 or 1:

    way[ℓ, w]      stage ℓ is saved in way w; Σ_w way[ℓ, w] = 1. Sizes and times are sums over ways
    move[k]        ā_k goes to the host
    begin[i]       when operation i begins; end[i] = begin[i] + its time
    start[c]       when copy c starts; c is out[k] or back[k]
                   end[c] = start[c] + move[k] · (seconds_per_copy + ā_k / rate)
    left[k, i]     out[k] has ended when operation i begins
    back[k, i]     back[k] starts before operation i begins
    within[k, i]   back[k] starts before operation i ends
    first[c, d]    copy c has ended when copy d starts; for copies of two values

Objective: the least end[2n − 1].

Rows, where "A → B" asks for B only if A is 1. Its row has a term for A, as large as the bounds of the variables allow
B to be missed. Those bounds follow from a schedule that is known beforehand, and from the operations that come before
and after.

    (1) One unit computes (`_computing_in_order`):
            begin[i] ≥ end[i − 1]
    (2) A value goes when it is made (`_copies_in_time`):
            start[out k] ≥ end[k − 1]
    (3) It comes back when it is gone, for which its reader must have ended, too; and in time (`_copies_in_time`):
            start[back k] ≥ end[out k]
            start[back k] ≥ end[k]
            begin[2n − 1 − k] ≥ end[back k]
    (4) Copies of one direction take turns, or all copies if the directions do (`_copies_in_order`):
            first[c, d] → start[d] ≥ end[c]
            first[c, d] + first[d, c] = 1 if both move
    (5) The three moments mean what they say (`_moments`):
            left[k, i] → begin[i] ≥ end[out k]
            back[k, i] → begin[i] ≥ start[back k]
            1 − back[k, i] → start[back k] ≥ begin[i]
            1 − within[k, i] → start[back k] ≥ end[i]
    (6) They come one after the other (`_moments`):
            back[k, i] ≤ within[k, i] ≤ back[k, i + 1] ≤ move[k]
            back[k, i] ≤ left[k, i] ≤ left[k, i + 1] ≤ move[k]
    (7) An operation fits. 𝓜_i is there whatever moves: what it reads and makes, gradients, overhead; k are the other
        values that are made and not yet used up (`_memory_of_operations`):
            𝓜_i + Σ_k ā_k · (1 − left[k, i] + back[k, i]) ≤ budget
    (8) A copy back has room when it starts: during operation i, or between i and the next, where 𝓜'_i is there
        whatever moves (`_memory_of_prefetches`). With H = ā_k + Σ_j ā_j · (1 − first[out j, back k] +
        first[back j, back k]) over the other values that may be gone then:
            within[k, i] − back[k, i] → 𝓜_i + H ≤ budget
            back[k, i + 1] − within[k, i] → 𝓜'_i + H ≤ budget
    (9) The host has room when a copy to it starts (`_memory_of_the_host`):
            move[k] → ā_k + Σ_j ā_j · (first[out j, out k] − first[back j, out k]) ≤ host_bytes
    (10) Copies take their time. That follows from the rows above, but those say little while HiGHS still has
        variables between 0 and 1; with it, the search is short (`_link_is_busy`). The sums are over j ≥ k:
            begin[2n − 1 − k] − end[k − 1] ≥ Σ_j move[j] · (time of out[j] and back[j])
            begin[i] − end[k − 1] ≥ Σ_j left[j, i] · (time of out[j])
            begin[2n − 1 − k] − begin[i] ≥ Σ_j (move[j] − back[j, i]) · (time of back[j])

Memory grows only where operations begin and where copies back start, so (7) and (8) are all that must be checked.

**From a solution to a schedule** (`_written`). Each copy is asked for after the last operation that has ended when
the solution starts it, in the solution's order. The referee starts it as early as it can, which is not too early:
between that operation's end, or the end of the copy before it, and its start in the solution no room appears that it
would take from others. Where each direction has a queue, a copy back that starts during an operation is asked for
when that begins, because it must not take room that the operation waits for.

What the referee cannot do is let an operation wait on purpose, for copies that are to have its room first. On one
link this never helps if the host has room: let the operation begin when it can instead, and of the copies that it
would have waited for, let those to the host go first. All of them are over at the same moment as before, none lacks
room, and whatever follows can stay as it is. So of the fastest solutions, the one whose operations begin earliest can
be followed by the referee. It is asked for where the referee is slower than the first solution (`Program.earliest`).
With two directions, or on a host that is short of memory, waiting on purpose may help; and where the directions slow
each other down, copies take longer than the program reckons. The time found can then exceed what is proven, and the
gap says by how much.

The least budget is that of all methods that only offload (`limits.py`), with the ways that need the least room. HiGHS
has a time limit. `bound_time` is what no schedule of this kind is below, and `gap` is how much more the best one
found takes, as a part of that.
"""

from __future__ import annotations

import math
import time as clock
from collections.abc import Iterator
from functools import lru_cache
from typing import final

from elbowroom.errors import InputError, InvalidSchedule
from elbowroom.problem import Chain, Platform, Problem
from elbowroom.schedule import Offload, Operation, Prefetch, Simulation, simulate
from elbowroom.schedule.operations import What
from elbowroom.solve.method import Found, Method, Options, Status
from elbowroom.solve.offload.limits import SavedChain, bound_time
from elbowroom.solve.offload.offload_program import Answer, Copy, Program
from elbowroom.solve.offload.placing import save_all

SECONDS = 20.0
MOST_STAGES = 16
_SAME = 1e-6  # HiGHS' tolerance: times that differ by less, as a part of them, are equal to it


@final
class OffloadMilp(Method):
    name = "offload-milp"
    kinds = ("chain",)
    summary = "the fastest that only offloads, by an integer program with a time limit; for small chains"
    exact = False
    needs_link = True

    def least_budget(self, problem: Problem, options: Options) -> int:
        assert isinstance(problem, Chain)
        _check_size(problem)
        return min(saved.least_bytes(options.platform) for saved in _savings(problem))

    def find(self, problem: Problem, budget: int, options: Options) -> Found:
        assert isinstance(problem, Chain)
        _check_size(problem)
        best = min(_known(problem, budget, options.platform), key=_merit)
        bound = bound_time(problem, budget, options.platform)
        if best.time > bound * (1 + _SAME):
            for proven, found in _solved(problem, budget, options.platform, best.time):
                bound = max(bound, proven)
                best = min(best, found, key=_merit) if found else best
        bound = min(bound, best.time)
        notes = {"bound_time": bound}
        if bound > 0 or best.time == 0:
            notes["gap"] = round((best.time - bound) / (bound or 1.0), 6)
        status = Status.OPTIMAL if best.time <= bound * (1 + _SAME) else Status.HEURISTIC
        return Found(tuple(best.schedule), status, best.time, notes)


def _merit(simulation: Simulation) -> tuple[float, float]:
    """The least is best: what is fast, and of equals what keeps the link free."""
    return simulation.time, simulation.link_time


def _check_size(chain: Chain) -> None:
    if len(chain) > MOST_STAGES:
        raise InputError("stages", f"{len(chain)} are too many for an integer program; it takes {MOST_STAGES}")


# --- schedules that are known without the program ---


@lru_cache(maxsize=4)
def _savings(chain: Chain) -> tuple[SavedChain, ...]:
    """Stages in their own ways, in the fastest, and in those that need the least memory."""
    times = [[way.forward_time + way.backward_time for way in stage.ways] for stage in chain.stages]
    fastest = tuple(each.index(min(each)) for each in times)
    return tuple(SavedChain(chain, ways) for ways in dict.fromkeys([(0,) * len(chain), fastest, _leanest(chain)]))


def _leanest(chain: Chain) -> tuple[int, ...]:
    """The ways with which most can be offloaded: max over ℓ of max(𝓜_Fℓ, 𝓜_Bℓ) + ā_ℓ₋₁ is least."""
    found: list[tuple[int, tuple[int, ...]]] = [(0, ())]  # for each way of the last stage: the need, and all ways
    sizes = [chain.input_bytes]
    for at, stage in enumerate(chain.stages, start=1):
        after, before = chain.gradient_bytes[at], chain.gradient_bytes[at - 1]
        reached = []
        for number, way in enumerate(stage.ways):
            forward = way.forward_overhead_bytes + chain.gradient_bytes[-1]
            need = way.saved_bytes + max(forward, way.backward_overhead_bytes + after + before)
            options = ((max(most, need + size), ways) for (most, ways), size in zip(found, sizes, strict=True))
            most, ways = min(options)
            reached.append((most, (*ways, number)))
        found, sizes = reached, [way.saved_bytes for way in stage.ways]
    return min(found)[1]


def _known(chain: Chain, budget: int, platform: Platform) -> Iterator[Simulation]:
    """Everything goes that can, or the first few values."""
    for saved in _savings(chain):
        if saved.least_bytes(platform) <= budget:
            yield saved.eager(budget, platform)
        for count in range(len(chain)):
            found = saved.offloading(range(count), budget, platform)
            if found is not None:
                yield found


# --- the program ---


def _solved(
    chain: Chain, budget: int, platform: Platform, known_time: float
) -> Iterator[tuple[float, Simulation | None]]:
    """Bounds that are proven and schedules that are found, until one of these takes as long as its program says."""
    until = clock.monotonic() + SECONDS
    program = Program(chain, budget, platform, known_time)
    fastest = program.fastest(SECONDS)
    found = _refereed(chain, fastest, budget, platform)
    yield fastest.bound, found
    if fastest.time == math.inf or _keeps(found, fastest):
        return
    left = until - clock.monotonic()
    if left > 0:
        found = _refereed(chain, program.earliest(fastest.time * (1 + _SAME), left), budget, platform)
        yield fastest.bound, found
    left = until - clock.monotonic()
    if left > 0 and not _keeps(
        found, fastest
    ):  # bytes that HiGHS does not see, because they are so few of the budget
        cautious = Program(chain, math.floor(budget * (1 - 2 * _SAME)), platform, known_time).fastest(left)
        yield fastest.bound, _refereed(chain, cautious, budget, platform)


def _keeps(found: Simulation | None, answer: Answer) -> bool:
    return found is not None and found.time <= answer.time * (1 + _SAME)


def _refereed(chain: Chain, answer: Answer, budget: int, platform: Platform) -> Simulation | None:
    if answer.time == math.inf:
        return None
    try:
        return simulate(chain, _written(chain, answer, platform), budget=budget, platform=platform)
    except InvalidSchedule:
        return None


def _written(chain: Chain, answer: Answer, platform: Platform) -> tuple[Operation, ...]:
    """The schedule of a solution."""
    asked: dict[int, list[Copy]] = {}
    last: dict[str, int] = {}  # the operation after which each queue was last asked for a copy
    for copy in answer.copies:
        queue = "" if platform.takes_turns else copy.transfer[0]
        last[queue] = max(last.get(queue, -1), copy.after)
        asked.setdefault(last[queue], []).append(copy)
    written: list[Operation] = []
    for index, operation in enumerate((None, *save_all(chain, answer.ways)), start=-1):
        written += [operation] if operation else []
        copies = asked.get(index, [])
        place = len(written) + len(copies)  # of the next operation
        for copy in copies:
            direction, k = copy.transfer
            at: int = max(k, 1)
            what: What = "all" if k else "input"
            start = place if copy.during_next and not platform.takes_turns else None
            written.append(Offload(at, what) if direction == "out" else Prefetch(at, what, start=start))
    return tuple(written)
