"""Operators that can write their output over one of their inputs: `mul(a, b, out=a)` once nobody reads `a` again.

The same kernel computes the same bits; only the new storage is saved.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import fx

from elbowroom.capture.traced_values import known_offset

aten = torch.ops.aten

# Not element by element, but every element is read only by whoever writes it, after its row was summed up. Their
# kernels write rows as if they lay one after the other, whatever the layout of what is written over.
ROW_BY_ROW = (aten._log_softmax_backward_data.default, aten._softmax_backward_data.default)


def overwritable(node: fx.Node) -> list[fx.Node]:
    """The nodes read whose tensors have exactly the output's dtype, shape, layout and storage size."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    pointwise = torch.Tag.pointwise in node.target.tags or node.target in ROW_BY_ROW
    if not pointwise or out_variant(node.target) is None:
        return []
    output = node.meta.get("val")
    reads = node.all_input_nodes[:1] if node.target in ROW_BY_ROW else node.all_input_nodes
    if not isinstance(output, torch.Tensor) or _is_ambiguous(output, [read.meta.get("val") for read in reads]):
        return []
    if node.target in ROW_BY_ROW and not output.is_contiguous():
        return []
    return [read for read in reads if _alike(read.meta.get("val"), output)]


def _is_ambiguous(output: torch.Tensor, reads: list[Any]) -> bool:
    """Whether the output may be laid out otherwise than it was traced. A dimension of one element has any stride; if
    the operands' differ, eager may choose the other one, and what reads it, another kernel."""
    strides = {value.stride() for value in reads if isinstance(value, torch.Tensor) and value.shape == output.shape}
    return 1 in output.shape and len(strides) > 1


@cache
def out_variant(target: torch._ops.OpOverload) -> tuple[torch._ops.OpOverload, str] | None:
    """The overload that takes the same arguments and a tensor to write to, and what it calls that tensor.

    Generated ones only copy the result there, so they do not count.
    """
    packet = target._overloadpacket
    wanted = [(argument.name, str(argument.type)) for argument in target._schema.arguments]
    for name in packet.overloads():
        overload = getattr(packet, name)
        written = [a for a in overload._schema.arguments if a.is_out]
        others = [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out]
        if len(written) == 1 and others == wanted and torch.Tag.generated not in overload.tags:
            return overload, written[0].name
    return None


def _alike(value: Any, output: torch.Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == output.dtype
        and value.device == output.device
        and value.shape == output.shape
        and value.stride() == output.stride()
        and known_offset(value) == 0
        and value.untyped_storage().nbytes() == output.untyped_storage().nbytes()
        and output.untyped_storage().nbytes() == output.numel() * output.element_size()
    )
