"""Where a schedule runs, beyond computing: the link to host memory, and how much of that there is."""

from __future__ import annotations

from dataclasses import dataclass

from elbowroom.errors import InputError
from elbowroom.problem.validation import as_size, as_time, assign

_SLOWEST = 1e-18  # bytes per unit of time: with less, times could not be told from infinity


@dataclass(frozen=True, slots=True)
class Platform:
    """Rates are bytes per unit of time. Without any, there is no link.

    `to_host` and `from_host` are what the two directions carry, each alone. One that is not given is `bandwidth`, or
    else what the other is.
    `duplex` is what each of them still carries while the other is busy, too (None: as much as alone). 0 means that
    they take turns: one transfer at a time, in the order in which they are asked for. That is the link of 001 ch. 3,
    and what `bandwidth` alone means.
    `seconds_per_copy` passes before the first byte of a copy. `host_bytes` is the memory that the host has to give
    (None: without limit).
    """

    bandwidth: float | None = None
    to_host: float | None = None
    from_host: float | None = None
    duplex: float | None = None
    seconds_per_copy: float = 0.0
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in ("bandwidth", "to_host", "from_host"):
            rate = getattr(self, field)
            if rate is not None:
                assign(self, field, as_time(rate, field))
                if getattr(self, field) < _SLOWEST:
                    raise InputError(field, "must be positive" if rate == 0 else f"must be at least {_SLOWEST}")
        if self.duplex is not None:
            assign(self, "duplex", as_time(self.duplex, "duplex"))
            if 0 < self.duplex < _SLOWEST:
                raise InputError("duplex", f"must be 0 or at least {_SLOWEST}")
        assign(self, "seconds_per_copy", as_time(self.seconds_per_copy, "seconds_per_copy"))
        if self.host_bytes is not None:
            assign(self, "host_bytes", as_size(self.host_bytes, "host_bytes"))

    @property
    def rate_to_host(self) -> float | None:
        return _first(self.to_host, self.bandwidth, self.from_host)

    @property
    def rate_from_host(self) -> float | None:
        return _first(self.from_host, self.bandwidth, self.to_host)

    @property
    def has_link(self) -> bool:
        return self.rate_to_host is not None

    @property
    def takes_turns(self) -> bool:
        """Whether the two directions are one link, which carries one transfer at a time."""
        if self.duplex is None:
            return self.to_host is None and self.from_host is None
        return self.duplex == 0


def _first(*rates: float | None) -> float | None:
    return next((rate for rate in rates if rate is not None), None)
