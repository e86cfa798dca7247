"""The least cost of a chain's step where copies take no time but a price: a search over what is in memory.

It knows every schedule that the referee's rules allow: any recomputation, any value dropped or moved at any time. So
it may find what no dynamic program over stages does, and never what is impossible.
"""

from __future__ import annotations

import heapq
from itertools import count


def least_priced_cost(chain, budget, price_of):
    """`price_of(bytes)` is what it costs to move a value to the host and back. None if nothing fits."""
    n = len(chain)
    start = (n, frozenset({("plain", 0, 0, True)}))
    best = {start: 0.0}
    numbers = count()
    waiting = [(0.0, next(numbers), start)]
    while waiting:
        cost, _, state = heapq.heappop(waiting)
        if cost > best[state]:
            continue
        if state[0] == 0:
            return cost
        for more, after in _steps(chain, budget, price_of, *state):
            if cost + more < best.get(after, float("inf")):
                best[after] = cost + more
                heapq.heappush(waiting, (cost + more, next(numbers), after))
    return None


def _size(chain, value):
    kind, at, way, _ = value
    return chain.output_bytes[at] if kind == "plain" else chain.stages[at - 1].ways[way].saved_bytes


def _steps(chain, budget, price_of, position, values):
    """What may be done next: its cost, and the state that follows. A value is (kind, stage, way, on the device)."""
    here = {(kind, at) for kind, at, _, present in values if present}
    stored = sum(_size(chain, value) for value in values if value[3]) + chain.gradient_bytes[position]
    saved = {at: way for kind, at, way, _ in values if kind == "saved"}

    def has(at):
        return ("plain", at) in here or ("saved", at) in here

    for at in range(1, position + 1):
        stage = chain.stages[at - 1]
        if not has(at - 1):
            continue
        known = {value for value in values if value[1] == at}
        if not known and stored + stage.output_bytes + stage.forward_overhead_bytes <= budget:
            yield stage.forward_time, (position, values | {("plain", at, 0, True)})
        if at not in saved and all(value[3] for value in known):
            for number, way in enumerate(stage.ways):
                if stored + way.saved_bytes + way.forward_overhead_bytes <= budget:
                    yield way.forward_time, (position, (values - known) | {("saved", at, number, True)})
    if ("saved", position) in here and has(position - 1):
        way = chain.stages[position - 1].ways[saved[position]]
        if stored + chain.gradient_bytes[position - 1] + way.backward_overhead_bytes <= budget:
            used = {("saved", position), ("plain", position - 1)}
            left = frozenset(value for value in values if value[:2] not in used)
            yield way.backward_time, (position - 1, left)
    for value in values:
        kind, at, way, present = value
        needed = at + 1 in saved and not (kind == "plain" and ("saved", at) in here)
        if not needed:
            yield 0.0, (position, values - {value})
        size = _size(chain, value)
        if present:
            yield price_of(size), (position, (values - {value}) | {(kind, at, way, False)})
        elif stored + size <= budget:
            yield 0.0, (position, (values - {value}) | {(kind, at, way, True)})
