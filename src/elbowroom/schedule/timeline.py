"""A time line: what happens from when to when, and how many bytes are in use meanwhile.

There is one type of it. The referee of problems returns one, so does the referee of training steps, and `measure`
makes one of what the allocator tells. Pictures and tables read nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

Resource: TypeAlias = Literal["compute", "to host", "from host"]


class Span(NamedTuple):
    """From one moment to the next: bytes in use, and the operation (its index) that is performed meanwhile.

    `resource` is what it occupies. Of a transfer, `moved_bytes` are the bytes that it moves. `waits` says of a span
    of computing that it stands still until a transfer has ended.
    """

    start: float
    end: float
    bytes: int
    operation: int
    resource: Resource = "compute"
    moved_bytes: int = 0
    waits: bool = False


@dataclass(frozen=True)
class TimeLine:
    """Spans by their start. `peak_bytes` is the most that is in use at once, `time` when the last span has ended.

    The peak is told apart from the spans: what measures it may count more exactly than what draws the line.
    """

    spans: Sequence[Span] = field(repr=False)
    peak_bytes: int
    time: float

    @classmethod
    def of_levels(
        cls,
        levels: Sequence[int],
        empty_bytes: int = 0,
        transfers: Iterable[Span] = (),
        waiting: Collection[int] = (),
    ) -> TimeLine:
        """Operations that all take one unit of time, given the bytes in use during each, those in which computing is
        `waiting`, and the transfers beside them."""
        spans = [Span(float(i), i + 1.0, level, i, waits=i in waiting) for i, level in enumerate(levels)]
        spans = sorted([*spans, *transfers], key=lambda span: (span.start, span.resource != "compute"))
        return cls(tuple(spans), max(levels, default=empty_bytes), float(len(levels)))

    @classmethod
    def of_moments(
        cls, moments: Iterable[tuple[float, int]], time: float, peak_bytes: int, base_bytes: int = 0
    ) -> TimeLine:
        """Bytes from each moment on, above a base; before the first and at the very end, there is the base."""
        line = [(0.0, 0), *moments]
        line.append((max(time, line[-1][0]), 0))
        spans = (Span(a, b, base_bytes + held, i) for i, ((a, held), (b, _)) in enumerate(pairwise(line)))
        return cls(tuple(spans), base_bytes + peak_bytes, line[-1][0])

    @property
    def computing(self) -> list[Span]:
        """The spans that say how much memory is in use, without the transfers beside them."""
        return [span for span in self.spans if span.resource == "compute"]

    @property
    def transfers(self) -> list[Span]:
        """The spans of what moves to the host and back."""
        return [span for span in self.spans if span.resource != "compute"]

    @property
    def moments(self) -> list[tuple[float, int]]:
        """When the bytes in use change, and to what."""
        return [(span.start, span.bytes) for span in self.computing]

    def above(self, base_bytes: int) -> TimeLine:
        """The same with so many bytes more in use all the time."""
        raised = tuple(span._replace(bytes=span.bytes + base_bytes) for span in self.spans)
        return TimeLine(raised, self.peak_bytes + base_bytes, self.time)
