"""Where a schedule runs, beyond computing: the link to host memory, and how much of that there is."""

from __future__ import annotations

from dataclasses import dataclass

from elbowroom.errors import InputError
from elbowroom.problem.validation import as_size, as_time, assign


@dataclass(frozen=True, slots=True)
class Platform:
    """Rates are bytes per unit of time; None means that there is no such link.

    `bandwidth` is one link that both directions share, one transfer at a time, as in 001 ch. 3: the referee of chains
    knows that one. The referee of training steps knows a link with two directions: `to_host` and `from_host` are
    their rates alone, `both` is what each has while the other is busy, too (None: as much as alone).
    `seconds_per_copy` passes before the first byte of a copy. `host_bytes` is the memory that the host has to give
    (None: without limit).
    """

    bandwidth: float | None = None
    to_host: float | None = None
    from_host: float | None = None
    both: float | None = None
    seconds_per_copy: float = 0.0
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in ("bandwidth", "to_host", "from_host", "both"):
            rate = getattr(self, field)
            if rate is not None:
                assign(self, field, as_time(rate, field))
                if getattr(self, field) == 0:
                    raise InputError(field, "must be positive")
        assign(self, "seconds_per_copy", as_time(self.seconds_per_copy, "seconds_per_copy"))
        if self.host_bytes is not None:
            assign(self, "host_bytes", as_size(self.host_bytes, "host_bytes"))
