"""An exhaustive search for schedules that offload while memory flows: tick by tick, every set of values, all ways.

It shares no code with the package. Times are whole ticks, and a tick carries a whole number of bytes in each
direction, of which every size is a multiple. So whatever a continuous schedule does can be done at whole ticks.
Operations and copies may start at any tick; values go in order, and come back in the opposite one.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from numba import njit

from elbowroom.problem import Chain


def least_comm_time(chain: Chain, budget: int, rates, host_bytes=None, *, across_loss: bool = True) -> float:
    """The least time over every set of values and every way of each stage; inf if nothing fits.

    `rates` are bytes per tick to the host and from it. Without `across_loss`, copies to the host end before the first
    backward begins, and copies back begin after the last forward has ended.
    """
    best = float("inf")
    for ways in product(*(range(len(stage.ways)) for stage in chain.stages)):
        for moved in product((False, True), repeat=len(chain)):
            best = min(best, comm_time_of(chain, moved, ways, budget, rates, host_bytes, across_loss))
    return best


def comm_time_of(chain, moved, ways, budget, rates, host_bytes=None, across_loss=True) -> float:
    """The least time if exactly those of ā_0..ā_{n-1} move, whole and in order; inf if it does not fit."""
    n = len(chain)
    savings = [stage.ways[way] for stage, way in zip(chain.stages, ways, strict=True)]
    sizes = np.array([chain.input_bytes, *(s.saved_bytes for s in savings)], dtype=np.int64)
    flags = np.array([*moved, False]) & (sizes > 0)
    if host_bytes is not None and sizes[flags].sum() > host_bytes:
        return float("inf")
    durations = [s.forward_time for s in savings] + [s.backward_time for s in reversed(savings)]
    grads = [chain.input_gradient_bytes, *(s.gradient_bytes for s in chain.stages)]
    # Of the operations F1..Fn Bn..B1: what each adds to the stored values, the gradient that is there included.
    adds = [s.saved_bytes + s.forward_overhead_bytes + grads[n] for s in savings]
    adds += [savings[i - 1].backward_overhead_bytes + grads[i] + grads[i - 1] for i in range(n, 0, -1)]
    rests = [grads[n]] * n + grads[n:0:-1]  # and what is there besides values while nothing runs
    arrays = (np.array(each, dtype=np.int64) for each in (durations, adds, rests))
    found = _search(n, sizes, flags, *arrays, budget, *rates, across_loss)
    return float("inf") if found < 0 else float(found)


@njit(cache=True)
def _search(n, sizes, flags, durations, adds, rests, budget, rate_out, rate_back, across_loss):
    """Breadth first over (operation, ticks into it, bytes gone, bytes back); every tick is one step."""
    total = sizes[flags].sum()
    longest = max(durations.max(), 1)
    gone_steps, back_steps = total // rate_out + 1, total // rate_back + 1
    dist = np.full((2 * n + 1) * longest * gone_steps * back_steps, -1, dtype=np.int64)
    queue = np.empty(2 * dist.size + 2, dtype=np.int64)
    dist[0] = 0
    head, tail = 0, 1
    queue[0] = 0
    while head < tail:
        code = queue[head]
        head += 1
        now = dist[code]
        back = code % back_steps * rate_back
        gone = code // back_steps % gone_steps * rate_out
        inside = code // (back_steps * gone_steps) % longest
        op = code // (back_steps * gone_steps * longest)
        if op == 2 * n:
            return now
        for sends, brings in ((0, 0), (1, 0), (0, 1)):
            if sends and not _can_send(n, sizes, flags, op, gone):
                continue
            if brings and (back >= total or gone < total):
                continue
            for runs in (0, 1):
                if inside > 0 and not runs:
                    continue
                instant = durations[op] == 0
                if runs and instant and (sends or brings):
                    continue
                if runs and not _has_inputs(n, sizes, flags, op, back):
                    continue
                if not runs and not sends and not brings:
                    continue
                if not across_loss and ((op == n and runs and gone < total) or (brings and op < n)):
                    continue
                coming = back + (rate_back if brings else 0)
                if _level(n, sizes, flags, op, adds[op] if runs else rests[op], gone, coming) > budget:
                    continue
                to_op, to_inside = op, inside
                if runs:
                    to_inside += 1
                    if to_inside >= durations[op]:
                        to_op, to_inside = op + 1, 0
                to_gone = gone + (rate_out if sends else 0)
                there = ((to_op * longest + to_inside) * gone_steps + to_gone // rate_out) * back_steps
                there += coming // rate_back
                cost = 0 if runs and instant else 1
                if dist[there] < 0 or dist[there] > now + cost:
                    dist[there] = now + cost
                    if cost:
                        queue[tail] = there
                        tail += 1
                    else:  # as soon as this one: it comes next
                        head -= 1
                        queue[head] = there
    return -1


@njit(cache=True)
def _can_send(n, sizes, flags, op, gone):
    """Whether the value that goes next has been made: ā_k by forward k, ā_0 from the start."""
    before = 0
    for k in range(n):
        if flags[k]:
            if gone < before + sizes[k]:
                return op >= k  # operation number k (from 0) is forward k + 1
            before += sizes[k]
    return False


@njit(cache=True)
def _has_inputs(n, sizes, flags, op, back):
    """A backward reads the value before its stage, which must be back entirely, as all later ones."""
    if op < n:
        return True
    stage = 2 * n - op
    needed = 0
    for k in range(stage - 1, n):
        if flags[k]:
            needed += sizes[k]
    return back >= needed


@njit(cache=True)
def _level(n, sizes, flags, op, extra, gone, back):
    """The most bytes in memory during a tick, at whose start `gone` have left and at whose end `back` are back."""
    total = extra
    forward = op < n
    last = op if forward else 2 * n - op  # of the values that exist
    left = gone
    later = 0  # bytes that come back before this value's do
    for k in range(n):
        if flags[k]:
            later += sizes[k]
    for k in range(last + 1):
        size = sizes[k]
        here = size
        if k < n and flags[k]:
            later -= size
            out = min(max(left, 0), size)
            left -= size
            here = min(size, size - out + min(max(back - later, 0), size))
        if forward and k == op:  # the value that this forward reads, or will read, is whole
            here = size
        total += here
    return total
