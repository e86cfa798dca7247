"""Times of operators from their FLOPs and bytes, for when there is no device to measure on.

The figures are a device's round numbers; what matters to a plan is the proportion between operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from elbowroom.capture.values import tensor_bytes

_SPEEDS = {"cuda": (2e14, 2e12, 3e-6), "cpu": (5e10, 1e10, 3e-6)}  # FLOP/s, bytes/s, seconds to launch


def estimated_time(node: fx.Node, device: torch.device) -> float:
    """Seconds: whichever takes longer, the arithmetic or the memory traffic."""
    flops_per_s, bytes_per_s, launch = _SPEEDS.get(device.type, _SPEEDS["cuda"])
    return launch + max(flops_of(node) / flops_per_s, bytes_moved(node) / bytes_per_s)


def flops_of(node: fx.Node) -> int:
    packet = getattr(node.target, "_overloadpacket", None)
    if packet not in flop_registry:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda a: tree_map(_same, a.meta["val"]))
    try:
        return int(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]))
    except Exception:  # a formula that does not know this variant
        return 0


def bytes_moved(node: fx.Node) -> int:
    return sum(map(tensor_bytes, (*node.all_input_nodes, node)))


def _same(value: Any) -> Any:
    return value
