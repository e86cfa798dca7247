"""Where to put checkpoints on a chain of sizes d0..dn for the least peak (003).

`dynamic` means PyTorch's behaviour: memory shrinks as the backward goes, and one gradient buffer as large as the
largest value of the segment is alive. A segment from checkpoint h to checkpoint i needs
U(h, i) = Σ_{h<k<i} d_k + max_{h≤k<i} d_k + d_i on top of the checkpoints up to h (Eq. 11, 12, 15), and
M(i) = d_i + min_{j>i} max(M(j), U(i, j)) is the least peak from checkpoint i on (Eq. 14, with j up to n).
"""

from __future__ import annotations

import numpy as np

from elbowroom.solve.kernels.compiling import compiled
from elbowroom.solve.kernels.rows import Ints


@compiled
def dynamic_linear(d: Ints, following: Ints) -> int:
    """Algorithm 6. Sets following[i] to the checkpoint after i; returns M(0).

    Candidates j lie on a stack, nearest on top, with M falling from top to bottom; U rises the same way. The best
    is at the crossing: at R, the nearest with U ≥ M, its value is U; at the one above it, the value is M. Both
    only ever move towards the top, and so do the places where their largest d is found. (The paper's line 13
    takes j+1 there; it must be the next on the stack.)
    """
    n = len(d) - 1
    sums = np.zeros(n + 2, dtype=np.int64)
    for k in range(n + 1):
        sums[k + 1] = sums[k] + d[k]
    least = np.zeros(n + 1, dtype=np.int64)
    stack = np.zeros(n + 1, dtype=np.int64)
    records = np.zeros(n + 1, dtype=np.int64)  # k with d_k above all before it from i on; nearest on top
    least[n] = d[n]
    stack[0] = n
    top, crossing, record_top = 0, 0, -1
    at_crossing, at_above = 0, 0  # positions in `records` of the largest d before each of the two candidates
    for i in range(n - 1, -1, -1):
        while record_top >= 0 and d[records[record_top]] <= d[i]:
            record_top -= 1
        record_top += 1
        records[record_top] = i
        at_crossing, at_above = min(at_crossing, record_top), min(at_above, record_top)
        while crossing < top:
            j = stack[crossing + 1]
            while records[at_above] >= j:
                at_above += 1
            if sums[j] - sums[i + 1] + d[records[at_above]] + d[j] < least[j]:
                break
            crossing += 1
            at_crossing = at_above
        j = stack[crossing]
        while records[at_crossing] >= j:
            at_crossing += 1
        best = max(least[j], sums[j] - sums[i + 1] + d[records[at_crossing]] + d[j])
        following[i] = j
        if crossing < top and least[stack[crossing + 1]] < best:
            following[i] = stack[crossing + 1]
            best = least[following[i]]
        least[i] = d[i] + best
        while top >= 0 and least[stack[top]] >= least[i]:
            top -= 1
        top += 1
        stack[top] = i
        if crossing >= top:  # only when d_i = 0: the crossing itself was replaced, and its U may be below M
            crossing = max(top - 1, 0)
            at_crossing, at_above = 0, 0
    return least[0]


@compiled
def dynamic_quadratic(d: Ints, following: Ints) -> int:
    """Algorithm 5: the same by trying every next checkpoint."""
    n = len(d) - 1
    least = np.zeros(n + 1, dtype=np.int64)
    least[n] = d[n]
    for i in range(n - 1, -1, -1):
        between, largest = 0, 0
        best = np.int64(2**62)
        for j in range(i + 1, n + 1):
            largest = max(largest, d[j - 1])
            value = max(least[j], between + largest + d[j])
            if value < best:
                best = value
                following[i] = j
            between += d[j]
        least[i] = d[i] + best
    return least[0]


@compiled
def least_checkpoint_sum(d: Ints, limit: int, previous: Ints, total: Ints, queue: Ints) -> int:
    """The inner step of Algorithm 3: the least Σ of checkpoints (0 and n among them) with every segment's sum at
    most `limit`. A sliding minimum; sets previous[i] to the checkpoint before i."""
    n = len(d) - 1
    head, tail = 0, 0
    total[0] = d[0]
    window = 0  # Σ d over low+1..i-1, where low is the nearest checkpoint still near enough
    low = 0
    for i in range(1, n + 1):
        while tail > head and total[queue[tail - 1]] >= total[i - 1]:
            tail -= 1
        queue[tail] = i - 1
        tail += 1
        if i >= 2:
            window += d[i - 1]
        while window > limit:
            low += 1
            window -= d[low]
        while queue[head] < low:
            head += 1
        previous[i] = queue[head]
        total[i] = d[i] + total[queue[head]]
    return total[n]


@compiled
def checkpoint_sum(d: Ints, limits: Ints, previous: Ints) -> int:
    """Algorithm 3: the least over the segment limit s (ascending) of s + Σ checkpoints (Eq. 6).

    Checkpoints sum to at least d0 + dn, so limits too large to win are not tried."""
    n = len(d) - 1
    total, queue = np.zeros(n + 1, dtype=np.int64), np.zeros(n + 2, dtype=np.int64)
    trial = np.zeros(n + 1, dtype=np.int64)
    best = np.int64(2**62)
    for limit in limits:
        if limit + d[0] + d[n] >= best:
            break
        value = limit + least_checkpoint_sum(d, limit, trial, total, queue)
        if value < best:
            best = value
            previous[:] = trial
    return best
