"""Counts how often a model is planned, to notice that something in it changes with every step.

A change now and then means another plan, and a few plans until what changes is known as an input. Where each step has
to be traced, none of them is worth its plan: from then on the model runs unplanned, and that is said.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from elbowroom.session.looking import Looker

MOST_TRACES = 8  # of calls that look the same


class Traces:
    """Plans of calls, by their keys (`counts`), and how many of the latest steps in parts were planned anew."""

    def __init__(self, looker: Looker) -> None:
        self.counts: Counter[Any] = Counter()
        self._looker = looker
        self._generation = looker.generation
        self._new: set[Any] = set()  # keys for which something was planned since their latest step
        self._in_a_row: Counter[Any] = Counter()

    def count(self, key: Any) -> None:
        """A call is to be planned. Code of another generation is traced anew whatever the call."""
        if self._generation != self._looker.generation:
            self._generation = self._looker.generation
            self.counts.clear()
            self._in_a_row.clear()
        self.counts[key] += 1
        self._new.add(key)

    def step_ends(self, key: Any, *, planned_midway: bool) -> None:
        """One in parts, which may have been planned before it began or in its middle."""
        is_new = planned_midway or key in self._new
        self._in_a_row[key] = self._in_a_row[key] + 1 if is_new else 0
        self._new.discard(key)

    def too_many(self, key: Any) -> bool:
        """Whether something changes with every step. Steps in parts that do are planned before every second one."""
        return self.counts[key] > MOST_TRACES or self._in_a_row[key] > MOST_TRACES - 2
