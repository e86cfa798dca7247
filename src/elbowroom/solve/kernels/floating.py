"""The dynamic program of 001 Theorem 5, completed and decomposed: least time of any schedule, for every memory.

C(s, t, ℓ, m) is the least time to run backwards t to ℓ from the input of stage s, which may be let go on the way,
with m slots besides that input. As printed, one value is a minimum over three positions (r, s', t') and a table
costs L⁶·M. Each of the thesis' compound steps is a sequence of single ones, and taking them one at a time leaves
a single minimum, over t':

  save   (s = ℓ)  forward s saving all, then (s+1, t, s+1), then backward s
  move   (s < ℓ)  forward s letting its input go: continue as (s+1, t, ℓ)
  keep            forward s keeping its input: do (s+1, t, t') first, then (s, t'−1, ℓ), for the best t' > ℓ

`move` replaces r (walk the kept input right) and, inside `keep`, also s' (walk the new one right). It covers
the case that Eq. 2.6 leaves out, one backward left (t = ℓ) with s < t. The cost falls to L⁴·M / 24.
"""

from __future__ import annotations

import numpy as np

from elbowroom.solve.kernels.compiling import compiled
from elbowroom.solve.kernels.costs import Costs, need_all, need_step, slots_up
from elbowroom.solve.kernels.rows import Floats, Ints, end_above, first_finite, relax, relax_one


@compiled
def row_of(s: int, t: int, low: int, n: int) -> int:
    """Where the row of (s, t, ℓ), 1 ≤ s ≤ ℓ ≤ t ≤ n, lies in the packed table."""
    k = n - s  # stages after s; those starting later fill k(k+1)(k+2)/6 rows
    later = k * (k + 1) * (k + 2) // 6
    d = t - s
    return later + d * (d + 1) // 2 + (low - s)


@compiled
def fill_start(costs: Costs, s: int, table: Floats, first: Ints, last: Floats) -> None:
    """Fill the rows (s, t, ℓ) for all t and ℓ; those of larger s are there already."""
    n = len(costs.output) - 1
    for t in range(s, n + 1):
        step = slots_up(costs, need_step(costs, s, t))
        for low in range(s, t + 1):
            row = row_of(s, t, low, n)
            best = table[row]
            best[:] = np.inf
            if low == s:
                for way in range(costs.first_way[s], costs.first_way[s + 1]):
                    try_save(costs, way, s, t, table, first)
            else:
                rest = row_of(s + 1, t, low, n)
                shift = costs.output_slots[s] - costs.output_slots[s - 1]
                start = max(step, max(0, shift + first[rest]))
                stop = min(len(best), len(best) + shift)  # letting go of a larger input leaves more than all
                relax_one(best, table[rest], shift, start, stop, costs.forward_time[s])
                if stop < len(best):
                    fill_tail(best, max(start, stop), costs.forward_time[s] + last[rest])
            for cut in range(low + 1, t + 1):
                left, right = row_of(s, cut - 1, low, n), row_of(s + 1, t, cut, n)
                shift = costs.output_slots[s]
                start = max(step, max(shift + first[right], first[left]))
                if start < len(best):
                    cost = costs.forward_time[s]
                    stop = end_above(best, start, (cost + last[right]) + last[left])
                    relax(best, table[left], table[right], shift, start, stop, cost)
            first[row], last[row] = first_finite(best), best[-1]


@compiled
def fill_tail(best: Floats, start: int, value: float) -> None:
    for m in range(start, len(best)):
        best[m] = min(best[m], value)


@compiled
def try_save(costs: Costs, way: int, s: int, t: int, table: Floats, first: Ints) -> None:
    n = len(costs.output) - 1
    best = table[row_of(s, t, s, n)]
    need = slots_up(costs, need_all(costs, way, s, t))
    if t == s:
        fill_tail(best, min(need, len(best)), costs.way_time[way])
        return
    rest = row_of(s + 1, t, s + 1, n)
    shift = slots_up(costs, costs.saved[way])
    relax_one(best, table[rest], shift, max(need, shift + first[rest]), len(best), costs.way_time[way])


@compiled
def fill_least(costs: Costs, least: Ints) -> None:
    """least[s, t, ℓ]: the fewest bytes, besides stage s's input, with which the state can be done at all."""
    n = len(costs.output) - 1
    for s in range(n, 0, -1):
        for t in range(s, n + 1):
            step = need_step(costs, s, t)
            for low in range(s, t + 1):
                best = np.int64(2**62)
                if low == s:
                    for way in range(costs.first_way[s], costs.first_way[s + 1]):
                        value = need_all(costs, way, s, t)
                        if t > s:
                            value = max(value, costs.saved[way] + least[row_of(s + 1, t, s + 1, n)])
                        best = min(best, value)
                else:
                    rest = least[row_of(s + 1, t, low, n)] + costs.output[s] - costs.output[s - 1]
                    best = min(best, max(step, rest))
                for cut in range(low + 1, t + 1):
                    first_part = costs.output[s] + least[row_of(s + 1, t, cut, n)]
                    second_part = least[row_of(s, cut - 1, low, n)]
                    best = min(best, max(step, max(first_part, second_part)))
                least[row_of(s, t, low, n)] = best
