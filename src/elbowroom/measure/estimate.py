"""Times of operators from their FLOPs and bytes, for when there is no device to measure on.

How fast a device is, `elbowroom/devices.py` says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from elbowroom.capture.traced_values import tensor_bytes
from elbowroom.devices import machine_of


def estimated_time(node: fx.Node, device: torch.device) -> float:
    """Seconds: whichever takes longer, the arithmetic or the memory traffic."""
    return machine_of(device.type).seconds(flops_of(node), bytes_moved(node))


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
