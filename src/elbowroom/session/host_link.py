"""Whether a session's values may move to the host, how fast, and how much of the host's memory they have."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from elbowroom.errors import InputError
from elbowroom.execute.to_host.link_speed import link_of
from elbowroom.measure.host_memory import free_host_bytes
from elbowroom.problem.platform import Platform
from elbowroom.session.options import Options
from elbowroom.units import parse_bytes, parse_rate

# Of the host's free memory, if nobody says how much: the data loader, the page cache and other processes need some,
# and pinned memory cannot be taken from us.
_SHARE = 0.5


@dataclass(frozen=True)
class Moving:
    """The link and the host's memory for values that move; None if none do. They are `preferred` to values that are
    computed again, even where that is slower."""

    platform: Platform | None = None
    preferred: bool = False

    def shared(self, count: int) -> Moving:
        """For one of several programs whose values are on the host at the same time."""
        return self if self.host_bytes is None else self._with(self.host_bytes // count)

    def without(self, taken_bytes: int) -> Moving:
        """With what is left of the host's memory after others have taken so much."""
        return self if self.host_bytes is None else self._with(max(0, self.host_bytes - taken_bytes))

    def _with(self, host_bytes: int) -> Moving:
        assert self.platform is not None
        return replace(self, platform=replace(self.platform, host_bytes=host_bytes))

    @property
    def host_bytes(self) -> int | None:
        return None if self.platform is None else self.platform.host_bytes


STILL = Moving()


def moving_of(options: Options, device: torch.device) -> Moving:
    """What a session's options ask for on a device."""
    return Moving(platform_of(options, device), options.offload == "always")


def platform_of(options: Options, device: torch.device) -> Platform | None:
    """The link and the host's memory for the values of a session; None if none are to move.

    Without a GPU the values are on the host already: they move only where that is asked for.
    """
    if options.offload == "never" or (options.offload == "auto" and device.type != "cuda"):
        return None
    host_bytes = host_bytes_of(options)
    if options.link is None:
        return link_of(device, host_bytes)
    rate = parse_rate(options.link)
    return Platform(to_host=rate, from_host=rate, host_bytes=host_bytes)


def host_bytes_of(options: Options) -> int:
    """Bytes on the host for all values that are there at once."""
    given = given_host_bytes(options)
    if given is not None:
        return given
    free = free_host_bytes()
    if free is None:
        raise InputError("host_budget", "is missing, and the system does not tell how much of its memory is free")
    return int(_SHARE * free)


def given_host_bytes(options: Options) -> int | None:
    """The same as far as somebody says it."""
    if options.host_budget is None:
        return None
    return parse_bytes(options.host_budget, field="host_budget", device_bytes=free_host_bytes())


def notes_on_moves(device: torch.device) -> tuple[str, ...]:
    """What a plan that moves values says of that to people, besides figures."""
    if device.type == "cuda":
        return ()
    return ("Without a GPU values are copied at once, in computing's time, which predicted times leave out.",)
