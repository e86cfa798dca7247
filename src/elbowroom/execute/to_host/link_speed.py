"""How fast values move between a device and the host: each direction alone, both together, and what a copy costs
besides its bytes.

Measured by the lanes that programs use, between the device and memory that is pinned as theirs is; once for each
machine, then kept on disk.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from elbowroom.execute.to_host.lanes import Lane, lanes_of
from elbowroom.measure.cache import keep_numbers, kept_numbers
from elbowroom.measure.host_memory import HostPiece
from elbowroom.problem.platform import Platform

_WHAT = "link"
_LARGE = 64 << 20  # bytes of a copy that shows the rate
_SMALL = 4 << 10  # bytes of a copy that shows what it takes besides
_SAMPLES = 5
_IN_A_ROW = 4
_MANY = 16  # small copies, fewer than a host can ask for while a large one is under way


def link_of(device: torch.device, host_bytes: int | None) -> Platform:
    """The link as measured, and so much memory at its other end."""
    numbers = kept_numbers(_WHAT, device)
    if not {"to_host", "from_host", "both", "seconds_per_copy"} <= numbers.keys():
        numbers = _measured(device)
        keep_numbers(_WHAT, device, numbers)
    return Platform(
        to_host=numbers["to_host"],
        from_host=numbers["from_host"],
        duplex=numbers["both"],
        seconds_per_copy=numbers["seconds_per_copy"],
        host_bytes=host_bytes,
    )


def _measured(device: torch.device) -> dict[str, float]:
    piece = HostPiece(2 * _LARGE, device)
    host, other_host = piece.memory[:_LARGE], piece.memory[_LARGE:]
    there, other_there = (torch.zeros(_LARGE, dtype=torch.uint8, device=device) for _ in range(2))
    lanes = lanes_of(device)

    def out() -> None:
        lanes.to_host.copy(host, there)()

    def back() -> None:
        lanes.from_host.copy(other_there, other_host)()

    def both() -> None:
        waits = [lanes.to_host.copy(host, there), lanes.from_host.copy(other_there, other_host)]
        for wait in waits:
            wait()

    def small_ones(lane: Lane, target: torch.Tensor, source: torch.Tensor) -> None:
        """Behind a large copy, so that they wait for each other and not for whoever asks for them."""
        waits = [lane.copy(target, source)]
        waits += [lane.copy(target[:_SMALL], source[:_SMALL]) for _ in range(_MANY)]
        for wait in waits:
            wait()

    out_s, back_s, both_s = (_seconds(call, device) for call in (out, back, both))
    more_s = (
        _seconds(lambda: small_ones(lanes.to_host, host, there), device) - out_s,
        _seconds(lambda: small_ones(lanes.from_host, other_there, other_host), device) - back_s,
    )
    return {
        "to_host": _LARGE / max(out_s, 1e-9),
        "from_host": _LARGE / max(back_s, 1e-9),
        "both": _LARGE / max(both_s, 1e-9),
        "seconds_per_copy": max(0.0, *more_s) / _MANY,
    }


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    """Of one call, in a row of several, as the middle of a few samples."""
    return statistics.median(_sample(call, device) for _ in range(_SAMPLES))


def _sample(call: Callable[[], None], device: torch.device) -> float:
    _finish(device)
    begun = time.perf_counter()
    for _ in range(_IN_A_ROW):
        call()
    _finish(device)
    return (time.perf_counter() - begun) / _IN_A_ROW


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
