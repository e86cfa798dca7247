"""Towers: large parts of a forward that do not depend on one another, as of CLIP, of Siamese and triplet networks.

Found with dominators. An operator dominates another if every path there from the batch goes through it. So what a
tower's first operator dominates is the tower, up to where it meets another: that is dominated only by what comes
before both. Two children of one operator in the dominator tree are towers if no path leads from one to the other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

_EACH = 0.1  # of the time, at least
_TOGETHER = 0.3  # at least: less is a detail of something else


@dataclass(frozen=True)
class Independent:
    """Their shares of the time, largest first, and the operator where two first meet, if any do."""

    shares: tuple[float, ...]
    meet: int | None


def find_towers(reads: Sequence[Sequence[int]], shares: Sequence[float]) -> Independent | None:
    """The towers that take most of the time. Operator k reads `reads[k]`, all of them before it."""
    tree = _Dominators(reads, shares)
    found = [towers for node in tree.children if (towers := tree.towers(node)) is not None]
    best = max(found, key=lambda towers: sum(towers.shares), default=None)
    return best if best is not None and sum(best.shares) >= _TOGETHER else None


class _Dominators:
    """The dominator tree, after Cooper, Harvey and Kennedy 2001: without cycles one pass will do. The root is -1."""

    def __init__(self, reads: Sequence[Sequence[int]], shares: Sequence[float]) -> None:
        self.reads = reads
        self.parent = parent = [-1] * len(reads)
        depth = [0] * len(reads)
        self.children: dict[int, list[int]] = {-1: []}
        for op, read in enumerate(reads):
            parent[op] = self._common(read, depth)
            depth[op] = depth[parent[op]] + 1 if parent[op] >= 0 else 0
            self.children.setdefault(parent[op], []).append(op)
        self.share = list(shares)  # with all that it dominates
        for op in range(len(reads) - 1, -1, -1):
            if parent[op] >= 0:
                self.share[parent[op]] += self.share[op]

    def _common(self, ops: Sequence[int], depth: Sequence[int]) -> int:
        """The lowest common ancestor."""
        common, *others = ops or (-1,)
        for op in others:
            while op != common:
                if common < 0 or op < 0:
                    return -1
                if depth[op] >= depth[common]:
                    op = self.parent[op]
                else:
                    common = self.parent[common]
        return common

    def towers(self, node: int) -> Independent | None:
        """Large children of a node without a path between them, if there are two."""
        children = self.children[node]
        large = sorted((k for k in children if self.share[k] >= _EACH), key=lambda k: -self.share[k])
        if len(large) < 2:
            return None
        behind = self._behind(node, children, set(large))
        towers = max((_independent(first, large, behind) for first in large), key=self._together)
        if len(towers) < 2:
            return None
        meet = next((k for k in children if len(behind[k].intersection(towers)) > 1), None)
        return Independent(tuple(sorted((self.share[k] for k in towers), reverse=True)), meet)

    def _together(self, towers: Sequence[int]) -> tuple[bool, float]:
        """Two towers are better than one, however large."""
        return len(towers) > 1, sum(self.share[k] for k in towers)

    def _behind(self, node: int, children: Sequence[int], large: set[int]) -> dict[int, frozenset[int]]:
        """For each child, the large ones among its siblings that it depends on."""
        first = [self._order[k] for k in children]
        behind: dict[int, frozenset[int]] = {}
        for k in children:
            sources = {children[bisect_right(first, self._order[read]) - 1] for read in self.reads[k] if read != node}
            behind[k] = frozenset(sources & large).union(*(behind[source] for source in sources))
        return behind

    @cached_property
    def _order(self) -> list[int]:
        """Numbers in depth-first order: all that an operator dominates comes right after it."""
        order = [0] * len(self.reads)
        stack = self.children[-1][::-1]
        for number in range(len(self.reads)):
            op = stack.pop()
            order[op] = number
            stack.extend(reversed(self.children.get(op, [])))
        return order


def _independent(first: int, others: Sequence[int], behind: Mapping[int, frozenset[int]]) -> list[int]:
    """The first, and those of the others without a path to or from any taken before."""
    taken = [first]
    for k in others:
        if k != first and all(k not in behind[other] and other not in behind[k] for other in taken):
            taken.append(k)
    return taken
