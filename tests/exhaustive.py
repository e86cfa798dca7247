"""Exhaustive searches over memory states: slow, simple, and written without looking at any solver.

They share no code with the package: the rules of memory are spelled out again here, from the papers.
"""

from __future__ import annotations

import heapq
from itertools import pairwise, product

import numpy as np
from numba import njit

from elbowroom.problem import Chain, Join, Towers
from elbowroom.schedule import Backward, Forward, Loss

INF = 2**60


def least_time_chain(chain: Chain, budget: int, *, persistent: bool = False) -> float:
    """The least time of any schedule (or any persistent one) within a budget; inf if none fits. Integer times."""
    n = len(chain)
    ways = 1 + max(len(stage.alternatives) for stage in chain.stages)
    shape = (n + 1, ways)
    saved, over_f, over_b = (np.full(shape, INF, dtype=np.int64) for _ in range(3))
    time_f, time_b = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for i, stage in enumerate(chain.stages, start=1):
        for w, way in enumerate(stage.ways):
            saved[i, w], over_f[i, w] = way.saved_bytes, way.forward_overhead_bytes
            over_b[i, w] = way.backward_overhead_bytes
            time_f[i, w], time_b[i, w] = way.forward_time, way.backward_time
    a = np.array([chain.input_bytes, *(s.output_bytes for s in chain.stages)], dtype=np.int64)
    d = np.array([chain.input_gradient_bytes, *(s.gradient_bytes for s in chain.stages)], dtype=np.int64)
    best = _search(persistent, n, ways, budget, (a, d, saved, over_f, over_b, time_f, time_b))
    return float("inf") if best >= INF else float(best)


# A state is (gradient position, which activations are stored alone, which stages have a saved set and how, the tip):
# index = ((g · 2^(n+1) + plain) · (ways+1)^n + saved digits) · tips + tip, digit 0 meaning "no saved set".
#
# In a persistent schedule the newest activation, the tip, is free until something else is done; from then on it is
# saved and stays until its backward, and nothing is ever dropped (tip n + 1: none). Other schedules need no tip.


@njit(cache=True)
def _search(persistent, n, ways, budget, costs):
    digits, plains = (ways + 1) ** n, 2 ** (n + 1)
    tips, no_tip = (n + 2, n + 1) if persistent else (1, 0)
    dist = np.full((n + 1) * plains * digits * tips, INF, dtype=np.int64)
    queue = np.empty(4_000_000, dtype=np.int64)
    queued = np.zeros(dist.size, dtype=np.bool_)
    start = (n * plains + 1) * digits * tips + no_tip
    dist[start] = 0
    head, tail, size = 0, 1, 1
    queue[0] = start
    best = INF
    new = np.empty((200, 2), dtype=np.int64)
    while size:
        state = queue[head]
        head = (head + 1) % queue.size
        size -= 1
        queued[state] = False
        cost = dist[state]
        if state < plains * digits * tips:  # the gradient of the input is there
            best = min(best, cost)
            continue
        count = _moves(persistent, n, ways, budget, costs, state, new)
        for k in range(count):
            there, total = new[k, 0], cost + new[k, 1]
            if total < dist[there] and total < best:
                dist[there] = total
                if not queued[there]:
                    queued[there] = True
                    queue[tail] = there
                    tail = (tail + 1) % queue.size
                    size += 1
    return best


@njit(cache=True)
def _moves(persistent, n, ways, budget, costs, state, new):
    """Where one operation leads from a state and its time, as rows of `new`; returns how many there are."""
    a, d, saved, over_f, over_b, time_f, time_b = costs
    base, digits, plains = ways + 1, (ways + 1) ** n, 2 ** (n + 1)
    tips, no_tip = (n + 2, n + 1) if persistent else (1, 0)
    tip, code = state % tips, state // tips % digits
    plain, g = state // tips // digits % plains, state // tips // digits // plains
    way_of = np.zeros(n + 2, dtype=np.int64)
    stored = d[g] + _stored(n, base, plain, code, a, saved, way_of)
    count = 0
    power = 1
    for i in range(1, n + 1):
        has_input = plain >> (i - 1) & 1 or (i > 1 and way_of[i - 1] > 0)
        if has_input and i <= g and way_of[i] == 0:
            if not plain >> i & 1 and stored + a[i] + over_f[i, 0] <= budget:  # keep the input
                new_tip = i if persistent else no_tip
                new[count] = ((g * plains + (plain | 1 << i)) * digits + code) * tips + new_tip, time_f[i, 0]
                count += 1
                if tip == i - 1 if persistent else plain >> (i - 1) & 1:  # let the input go
                    without = (plain | 1 << i) - (1 << (i - 1))
                    new[count] = ((g * plains + without) * digits + code) * tips + new_tip, time_f[i, 0]
                    count += 1
            for w in range(ways):
                if saved[i, w] < INF and stored + saved[i, w] + over_f[i, w] <= budget:
                    without = (g * plains + (plain & ~(1 << i))) * digits
                    new[count] = (without + code + (w + 1) * power) * tips + no_tip, time_f[i, w]
                    count += 1
        if i == g and has_input and way_of[i] > 0:
            w = way_of[i] - 1
            if stored + d[i - 1] + over_b[i, w] <= budget:
                kept = (g - 1) * plains + (plain & ~(1 << i) & ~(1 << (i - 1)))
                new[count] = (kept * digits + code - way_of[i] * power) * tips + no_tip, time_b[i, w]
                count += 1
        needed = i < n and way_of[i + 1] > 0 and not plain >> i & 1
        if not persistent and way_of[i] > 0 and not needed:  # drop a saved set
            new[count] = ((g * plains + plain) * digits + code - way_of[i] * power) * tips + no_tip, 0
            count += 1
        power *= base
    for i in range(n + 1):
        needed = i < n and way_of[i + 1] > 0
        if not persistent and plain >> i & 1 and not needed:  # drop an activation nothing saved needs
            new[count] = ((g * plains + plain - (1 << i)) * digits + code) * tips + no_tip, 0
            count += 1
    return count


@njit(cache=True)
def _stored(n, base, plain, code, a, saved, way_of):
    """Bytes of what is stored besides the gradient; `way_of` gets how each stage is saved, 0 if it is not."""
    stored = 0
    for i in range(1, n + 1):
        way_of[i] = code % base
        code //= base
        if way_of[i]:
            stored += saved[i, way_of[i] - 1]
    for i in range(n + 1):
        if plain >> i & 1:
            stored += a[i]
    return stored


def least_time_join(join: Join, slots: int) -> float:
    """The least time of any schedule of a join within a number of slots: Dijkstra over memory states."""
    branches = range(len(join.lengths))
    start = (None, tuple(frozenset({0}) for _ in branches))
    heap: list = [(0, 0, start)]
    settled = set()
    serial = 0
    if len(join.lengths) > slots:
        return float("inf")
    while heap:
        cost, _, state = heapq.heappop(heap)
        if state in settled:
            continue
        settled.add(state)
        gradients, values = state
        if gradients is not None and not any(gradients):
            return cost
        for extra, following in _join_moves(join, gradients, values):
            if _slots_used(join, *following) <= slots and following not in settled:
                serial += 1
                heapq.heappush(heap, (cost + extra, serial, following))
    return float("inf")


def _slots_used(join: Join, gradients, values) -> int:
    used = sum(map(len, values))
    if gradients is not None:
        used += sum(g > 0 or keep == 1 for g, keep in zip(gradients, join.keep_gradients, strict=True))
    return used


def _join_moves(join: Join, gradients, values):
    def with_values(k, new):
        return (*values[:k], frozenset(new), *values[k + 1 :])

    for k, length in enumerate(join.lengths):
        for i in values[k]:
            yield 0, (gradients, with_values(k, values[k] - {i}))
            reach = length if gradients is None else gradients[k] - 1
            if i < reach and i + 1 not in values[k]:
                yield join.forward_time, (gradients, with_values(k, values[k] | {i + 1}))
                yield join.forward_time, (gradients, with_values(k, (values[k] - {i}) | {i + 1}))
        if gradients is not None and gradients[k] > 0 and gradients[k] - 1 in values[k]:
            after = (*gradients[:k], gradients[k] - 1, *gradients[k + 1 :])
            yield join.backward_time, (after, with_values(k, values[k] - {gradients[k] - 1}))
    if gradients is None and all(n in v for n, v in zip(join.lengths, values, strict=True)):
        left = tuple(v - {n} for n, v in zip(join.lengths, values, strict=True))
        yield join.loss_time, (tuple(join.lengths), left)


def best_checkpoints(sizes: list[int], objective) -> int:
    """The least of an objective over every set of checkpoints that contains both ends."""
    n = len(sizes) - 1
    return min(
        objective(sizes, [0, *(i for i, chosen in enumerate(bits, start=1) if chosen), n])
        for bits in product((0, 1), repeat=n - 1)
    )


def dynamic_peak(sizes: list[int], checkpoints: list[int]) -> int:
    """003 Eq. 12, the largest over the checkpoints."""
    peak, held = sizes[0], sizes[0]
    for h, i in pairwise(checkpoints):
        held += sizes[i]
        peak = max(peak, held + sum(sizes[h + 1 : i]) + max(sizes[h:i]))
    return peak


def sum_peak(sizes: list[int], checkpoints: list[int]) -> int:
    """003 Eq. 6."""
    segments = [sum(sizes[h + 1 : i]) for h, i in pairwise(checkpoints)]
    return sum(sizes[i] for i in checkpoints) + max(segments)


def least_time_towers(problem: Towers, budget: int) -> float:
    """The least time of any schedule of towers within a budget: Dijkstra over memory states."""
    start = (None, tuple((frozenset({0}), frozenset()) for _ in problem.towers))
    heap: list = [(0, 0, start)]
    settled = set()
    serial = 0
    while heap:
        cost, _, state = heapq.heappop(heap)
        if state in settled:
            continue
        settled.add(state)
        if state[0] is not None and not any(state[0]):
            return cost
        for extra, made, following in _tower_moves(problem, *state):
            if _tower_bytes(problem, *state) + made <= budget and following not in settled:
                serial += 1
                heapq.heappush(heap, (cost + extra, serial, following))
    return float("inf")


def _tower_bytes(problem: Towers, gradients, held) -> int:
    used = problem.resident_bytes
    for k, (tower, (plain, saved)) in enumerate(zip(problem.towers, held, strict=True)):
        used += sum(tower.output_bytes[i] for i in plain) + sum(tower.steps[i - 1].saved_bytes for i in saved)
        if gradients is not None and (gradients[k] > 0 or tower.keep_gradient):
            used += tower.gradient_bytes[gradients[k]]
    return used


def _tower_moves(problem: Towers, gradients, held):
    """What it costs, what is in memory besides while it runs, and the state after."""

    def put(k, plain, saved):
        return (*held[:k], (frozenset(plain), frozenset(saved)), *held[k + 1 :])

    for k, (tower, (plain, saved)) in enumerate(zip(problem.towers, held, strict=True)):
        outputs, grads = tower.output_bytes, tower.gradient_bytes
        for i in plain:
            if i + 1 not in saved:
                yield 0, 0, (gradients, put(k, plain - {i}, saved))
        for i in saved:
            if i + 1 not in saved or i in plain:
                yield 0, 0, (gradients, put(k, plain, saved - {i}))
        reach = len(tower) if gradients is None else gradients[k]
        for i in (plain | saved) & set(range(reach)):
            step = tower.steps[i]
            if i + 1 in saved:
                continue
            if step.saved_bytes is not None:
                made = step.saved_bytes + step.forward_overhead_bytes
                yield step.forward_time, made, (gradients, put(k, plain - {i + 1}, saved | {i + 1}))
            if i + 1 not in plain:
                made = outputs[i + 1] + step.forward_overhead_bytes
                yield step.forward_time, made, (gradients, put(k, plain | {i + 1}, saved))
                if i in plain:
                    over = outputs[i] if problem.in_place else 0
                    made = max(0, outputs[i + 1] - over) + step.forward_overhead_bytes
                    yield step.forward_time, made, (gradients, put(k, (plain - {i}) | {i + 1}, saved))
        at = 0 if gradients is None else gradients[k]
        if at > 0 and at - 1 in plain | saved:
            step = tower.steps[at - 1]
            if (step.saved_bytes is None) != (at in saved):
                before, after = grads[at], grads[at - 1]
                made = (max(0, after - before) if problem.in_place else after) + step.backward_overhead_bytes
                moved = (*gradients[:k], at - 1, *gradients[k + 1 :])
                yield step.backward_time, made, (moved, put(k, plain - {at - 1}, saved - {at}))
    ready = all(len(t) in plain | saved for t, (plain, saved) in zip(problem.towers, held, strict=True))
    if gradients is None and ready:
        made, left = problem.loss_overhead_bytes, []
        for tower, (plain, saved) in zip(problem.towers, held, strict=True):
            over = tower.output_bytes[-1] if len(tower) in plain and problem.in_place else 0
            made += max(0, tower.gradient_bytes[-1] - over)
            left.append((plain - {len(tower)}, saved))
        yield problem.loss_time, made, (tuple(map(len, problem.towers)), tuple(left))


def nested_schedules(problem: Towers):
    """Every schedule in which what is saved stays, and towers are reversed in the opposite order of forwards."""

    def walk(k, p, q):
        first = Forward((k + 1, p + 1), "input")
        return [first, *(Forward((k + 1, i), "nothing") for i in range(p + 2, q + 1))]

    def stretch(k, p, q):
        own = problem.towers[k].steps[p]
        every, back = Forward((k + 1, p + 1), "all"), Backward((k + 1, p + 1))
        if q == p + 1:
            yield [back] if own.saved_bytes is None else [every, back]
            return
        if own.saved_bytes is not None:
            for rest in stretch(k, p + 1, q):
                yield [every, *rest, back]
        for i in range(p + 1, q):
            for right in stretch(k, i, q):
                for left in stretch(k, p, i):
                    yield [*walk(k, p, i), *right, *left]

    def meeting(at):
        if all(p == len(t) for p, t in zip(at, problem.towers, strict=True)):
            yield [Loss()]
        for k, (p, tower) in enumerate(zip(at, problem.towers, strict=True)):
            moved = [(*at[:k], q, *at[k + 1 :]) for q in range(p + 1, len(tower) + 1)]
            if moved and tower.steps[p].saved_bytes is not None:
                for rest in meeting(moved[0]):
                    yield [Forward((k + 1, p + 1), "all"), *rest, Backward((k + 1, p + 1))]
            for q, following in enumerate(moved, start=p + 1):
                for rest in meeting(following):
                    for own in stretch(k, p, q):
                        yield [*walk(k, p, q), *rest, *own]

    yield from meeting((0,) * len(problem.towers))
