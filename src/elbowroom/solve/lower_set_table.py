"""Sequences of lower sets and the strategy that each stands for (002 §3–4): what all four methods on them share.

A *lower set* contains all predecessors of its nodes. A growing sequence of them cuts a graph into parts. The forward
computes part after part and keeps of each only its *boundary*, the values that later parts read. The backward takes
the parts in reverse, computes each again from the boundaries kept, and reverses it. Nodes that lead nowhere outside
their part are not computed twice, though 002's Eq. 1 counts them: only the backward needs them. So all of the last
part is computed once.

The memory of part i is M(U) + 2 M(V) + M(∂L): the boundaries kept before it, its own values and gradients, and the
gradients of the boundary it starts from. 002's Eq. 2 has two other terms for the last one, because its framework
keeps the gradients of readers where the referee keeps those of what is read; `Accounting.PAPER` counts like that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from elbowroom.errors import InputError
from elbowroom.problem import Graph
from elbowroom.schedule import Backward, Discard, Forward, Operation
from elbowroom.schedule.liveness import with_liveness
from elbowroom.solve.kernels.lower_sets import (
    COARSEST,
    FASTEST,
    NEVER,
    SMALLEST,
    Sets,
    fill_fronts,
    is_reachable,
)
from elbowroom.solve.kernels.rows import Floats, Ints

MOST_SETS = 40_000
FEW_SETS, FEW_NODES = 4_000, 800  # to try all of them takes seconds
MOST_PAIRS = 2_000  # of time and memory, for each set
FEWER_PAIRS = 2**17  # for all sets together, where the answer is not exact anyway
FEW_PAIRS = 1_000  # for all sets together: they cost nothing

Mask = int  # a set of nodes, one bit for each


class Accounting(Enum):
    """Which gradients are in memory beside those of the part that is reversed."""

    REFEREE = "those of the boundary it starts from"
    PAPER = "those of the nodes that read it, and what these read besides (002 Eq. 2)"


# --- families of lower sets ----------------------------------------------------------------------------------


def all_lower_sets(graph: Graph, most: int | None = None) -> list[Mask]:
    """Every one, the empty set included."""
    most = most or MOST_SETS
    needed = [sum(1 << u for u in graph.predecessors[v]) for v in range(len(graph))]
    roots = sum(1 << v for v in range(len(graph)) if not needed[v])
    ready = {0: roots}  # for each set, the nodes that may join it
    layer = [0]
    while layer:
        following: dict[Mask, Mask] = {}
        for mask in layer:
            left = ready[mask]
            while left:
                bit = left & -left
                left ^= bit
                larger = mask | bit
                if larger not in following:
                    v = bit.bit_length() - 1
                    joined = sum(1 << w for w in graph.successors[v] if not needed[w] & ~larger)
                    following[larger] = (ready[mask] ^ bit) | joined
        ready |= following
        if len(ready) > most:
            raise InputError(
                "nodes", f"have more than {most:,} lower sets, too many to try all; use 'lower-sets-approx'"
            )
        layer = list(following)
    return list(ready)


def few_lower_sets(graph: Graph) -> list[Mask] | None:
    """Every one, unless they are too many to try all by default. The more nodes, the more pairs each may have."""
    if len(graph) > FEW_NODES:
        return None
    try:
        return all_lower_sets(graph, FEW_SETS)
    except InputError:
        return None


def pruned_lower_sets(graph: Graph) -> list[Mask]:
    """For each node, what it depends on and itself (002 §4.3); and the empty set and the whole graph."""
    below = [0] * len(graph)
    for v in graph.order:
        below[v] = 1 << v
        for u in graph.predecessors[v]:
            below[v] |= below[u]
    return [0, *below, (1 << len(graph)) - 1]


# --- the dynamic program -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """A growing sequence of lower sets, the empty one left out, and whether nothing was left untried."""

    masks: tuple[Mask, ...]
    is_exact: bool


class LowerSetTable:
    """The dynamic program over one family of lower sets of one graph."""

    def __init__(
        self,
        graph: Graph,
        family: Iterable[Mask],
        accounting: Accounting = Accounting.REFEREE,
        *,
        approximate: bool = False,
    ) -> None:
        self.graph = graph
        self.masks = sorted(set(family), key=lambda mask: (mask.bit_count(), mask))
        count, nodes = len(self.masks), len(graph)
        self.most_pairs = max(16, min(MOST_PAIRS, FEWER_PAIRS // count)) if approximate else MOST_PAIRS
        node_bytes: Ints = np.array([node.bytes for node in graph.nodes], dtype=np.int64)
        node_times: Floats = np.array([node.time for node in graph.nodes], dtype=np.float64)
        width = (nodes + 63) // 64
        packed = b"".join(mask.to_bytes(8 * width, "little") for mask in self.masks)
        bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8).reshape(count, -1), axis=1, bitorder="little")
        self._inside: NDArray[np.bool_] = bits[:, :nodes].astype(bool)
        boundary = self._boundary()
        ending = self._ending(boundary)
        nothing = np.zeros(count, dtype=np.int64)
        referee = accounting is Accounting.REFEREE
        self.sets = Sets(
            np.frombuffer(packed, dtype="<u8").astype(np.uint64).reshape(count, width),
            self._inside @ node_bytes,
            self._inside @ node_times,
            boundary @ node_bytes if referee else nothing,
            nothing if referee else self._readers(node_bytes),
            *_listed(boundary),
            *_listed(ending),
            (boundary | ending) @ node_times,
            node_bytes,
            node_times,
            *self._dearest(node_bytes, node_times),
        )

    @cached_property
    def least_budget(self) -> int:
        """The smallest budget that some sequence keeps."""
        sets = self.sets
        low, high = 0, int(2 * sets.sizes[-1] + sets.before[0] + sets.after[-1])  # the whole graph as one part
        while low < high:
            middle = (low + high) // 2
            if is_reachable(middle, sets):
                high = middle
            else:
                low = middle + 1
        return low

    def fastest(self, budget: int) -> Chosen:
        """The sequence with the least time within the budget."""
        return self._best(FASTEST, budget)

    def coarsest(self, budget: int) -> Chosen:
        """The sequence that computes most again within the budget (002 §4.4: its parts are large)."""
        return self._best(COARSEST, budget)

    def smallest(self) -> tuple[Chosen, int]:
        """The sequence with the least sum of all boundaries and the largest part without its own; and that sum."""
        starts, largest, kept, origins, thinned = self._fronts(SMALLEST, NEVER, math.inf)
        sums = largest[starts[-2] :] + kept[starts[-2] :]
        best = int(np.argmin(sums))
        return self._traced(starts, origins, int(starts[-2]) + best, thinned), int(sums[best])

    def _best(self, goal: int, budget: int) -> Chosen:
        """What takes longer than the answer need not be looked at: the answer is guessed, and the guess raised.

        While that costs nothing, by little, for the number of pairs may rise steeply; then by as much as should make
        them three times as many.
        """
        forward_time = float(self.sets.times[-1])
        guess = max(forward_time / 64, self._least_time(budget) if goal == FASTEST else 0.0)
        before = 0.0, 0
        while True:
            starts, _, _, origins, thinned = self._fronts(goal, budget, guess if guess < forward_time else math.inf)
            if starts[-1] > starts[-2]:
                return self._traced(starts, origins, int(starts[-2]), thinned)  # the whole graph's first pair is best
            assert guess < forward_time, "a budget below the least"
            reached = guess, int(starts[-1])
            guess, before = guess * _raised(*reached, *before), reached

    def _least_time(self, budget: int) -> float:
        """No sequence takes less: what is not computed again takes room."""
        order, price = self.sets.dearest, self.sets.price
        fitting = int(np.searchsorted(np.cumsum(price[order]), budget, side="right"))
        spared = float(self.sets.node_times[order[: fitting + 1]].sum())
        return float(self.sets.times[-1]) - spared

    def _fronts(self, goal: int, budget: int, most_time: float) -> tuple[Ints, Floats, Ints, Ints, bool]:
        return fill_fronts(budget, most_time, self.most_pairs, goal, self.sets)

    def _traced(self, starts: Ints, origins: Ints, at: int, thinned: bool) -> Chosen:
        masks = []
        while at > 0:
            masks.append(self.masks[int(np.searchsorted(starts, at, side="right")) - 1])
            at = int(origins[at])
        return Chosen(tuple(reversed(masks)), not thinned)

    def _boundary(self) -> NDArray[np.bool_]:
        """For each set, its nodes that have a reader outside."""
        read_outside = np.zeros_like(self._inside)
        for u, v in self.graph.edges:
            read_outside[:, u] |= ~self._inside[:, v]
        return self._inside & read_outside

    def _ending(self, boundary: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """For each set, its nodes that lead nowhere outside it."""
        leading = boundary.copy()
        for v in reversed(self.graph.order):
            for w in self.graph.successors[v]:
                leading[:, v] |= leading[:, w]
        return self._inside & ~leading

    def _dearest(self, node_bytes: Ints, node_times: Floats) -> tuple[Ints, Ints]:
        """Nodes by how much time is spared for each byte that it costs not to compute them again; and what it costs.

        Nothing where a part that is not the last may hold all that depends on them: they lead nowhere outside it.
        """
        needed = pruned_lower_sets(self.graph)[1:-1]  # for a node; then for all that depends on it
        for v in reversed(self.graph.order):
            for w in self.graph.successors[v]:
                needed[v] |= needed[w]
        whole = (1 << len(self.graph)) - 1
        price = np.where([mask == whole for mask in needed], node_bytes, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            gain = np.where(price > 0, node_times / price, np.inf)
        return np.argsort(-gain, kind="stable").astype(np.int64), price.astype(np.int64)

    def _readers(self, node_bytes: Ints) -> Ints:
        """002 Eq. 2 (iii) and (iv): nodes outside that read the set, and nodes outside that these read."""
        readers, read = np.zeros_like(self._inside), np.zeros_like(self._inside)
        for u, v in self.graph.edges:
            readers[:, v] |= self._inside[:, u]
        for u, v in self.graph.edges:
            read[:, u] |= readers[:, v]
        outside = ~self._inside
        return np.asarray((readers & outside) @ node_bytes + (read & outside) @ node_bytes)


def _raised(guess: float, pairs: int, guess_before: float, pairs_before: int) -> float:
    """The factor for a guess that was too low, given how many pairs it left, and the one before."""
    if pairs < FEW_PAIRS:
        return 1.03
    if not pairs_before:
        return 2.0
    steepness = math.log(max(1.0, pairs / pairs_before)) / math.log(guess / guess_before)
    return min(4.0, max(1.02, 3 ** (1 / max(steepness, 0.1))))


def _listed(members: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """The members of all sets in a row, and where those of each begin."""
    starts = np.concatenate(([0], np.cumsum(members.sum(axis=1)))).astype(np.int64)
    return starts, np.nonzero(members)[1].astype(np.int64)


# --- from a sequence to a schedule ---------------------------------------------------------------------------


def canonical_schedule(graph: Graph, masks: Sequence[Mask]) -> tuple[Operation, ...]:
    """The strategy that a sequence stands for. Values are discarded at the end of their part, not earlier."""
    operations: list[Operation] = []
    kept: set[int] = set()
    parts = list(parts_of(graph, masks))
    for mask, part in zip(masks, parts, strict=True):
        operations += [Forward(v, "all") for v in part]
        boundary = {v for v in part if _is_read(graph, v, mask)}
        kept |= boundary
        if mask != masks[-1]:
            operations += [Discard(v) for v in part if v not in boundary]
    for mask, part in zip(reversed(masks), reversed(parts), strict=True):
        if mask != masks[-1]:
            operations += [Forward(v, "all") for v in part if v not in kept]
        operations += [Backward(v) for v in reversed(part)]
    return tuple(operations)


def live_schedule(graph: Graph, masks: Sequence[Mask]) -> tuple[Operation, ...]:
    """The same without what nobody reads, and with every value discarded after its last reader."""
    return with_liveness(graph, canonical_schedule(graph, masks))


def recomputed(graph: Graph, masks: Sequence[Mask]) -> list[int]:
    """What that schedule computes twice: nodes that are in no boundary, and lead to one."""
    found = []
    for mask, part in zip(masks, parts_of(graph, masks), strict=True):
        leading = {v for v in part if _is_read(graph, v, mask)}
        for v in reversed(part):
            if v not in leading and any(w in leading for w in graph.successors[v]):
                leading.add(v)
                found.append(v)
    return found


def formula_peak(graph: Graph, masks: Sequence[Mask]) -> int:
    """The memory of the most expensive part, as the dynamic program counts it."""
    peak = kept = done = 0
    for mask, part in zip(masks, parts_of(graph, masks), strict=True):
        arriving = sum(graph.nodes[v].bytes for v in boundary_of(graph, done))
        peak = max(peak, kept + 2 * sum(graph.nodes[v].bytes for v in part) + arriving)
        kept += sum(graph.nodes[v].bytes for v in part if _is_read(graph, v, mask))
        done = mask
    return peak


def _is_read(graph: Graph, v: int, mask: Mask) -> bool:
    """Whether a node of the set has a reader outside."""
    return any(not mask >> w & 1 for w in graph.successors[v])


def members(mask: Mask) -> list[int]:
    return [v for v in range(mask.bit_length()) if mask >> v & 1]


def boundary_of(graph: Graph, mask: Mask) -> frozenset[int]:
    return frozenset(v for v in members(mask) if _is_read(graph, v, mask))


def parts_of(graph: Graph, masks: Sequence[Mask]) -> Iterable[list[int]]:
    """What each set adds to the one before, in topological order."""
    done = 0
    for mask in masks:
        yield [v for v in graph.order if (mask & ~done) >> v & 1]
        done = mask
