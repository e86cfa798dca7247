"""Random operators told which generator to draw from: the same numbers, bit for bit, as from PyTorch's own generator
in the same state.

What draws from a generator of its own disturbs nobody, and nobody disturbs it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx

from elbowroom.capture.traced_values import tensors_of

aten = torch.ops.aten


def generator_variant(node: fx.Node) -> Callable[..., Any] | None:
    """What computes a random node, given the node's arguments and `generator`; None if nothing does."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or node.kwargs.get("generator") is not None:
        return None
    if target is aten.native_dropout.default:
        return drop_out if tensors_of(node)[0].device.type in ("cpu", "cuda") else None
    names = [argument.name for argument in target._schema.arguments]
    if "generator" in names:
        return target if names.index("generator") >= len(node.args) else None
    return _overload_with_generator(target)


def drop_out(
    values: torch.Tensor, p: float, train: bool | None, *, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """`aten.native_dropout`, which takes no generator, in the operators that PyTorch writes it in."""
    if train is False or not values.numel() or (p == 1 and values.is_cuda):  # nothing is drawn
        return aten.native_dropout.default(values, p, train)  # type: ignore[no-any-return]
    if values.is_cuda:
        kept, mask = aten._fused_dropout.default(values, 1.0 - p, generator)  # the same kernel
        return kept, mask.view(torch.bool)
    mask = torch.empty_like(values, dtype=torch.bool).bernoulli_(1.0 - p, generator=generator)
    # `mul_` with a Python number rounds otherwise in half precision.
    return aten.mul_.Scalar(values.mul(mask), 0.0 if p == 1 else 1.0 / (1.0 - p)), mask


@cache
def _overload_with_generator(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The overload that takes the same arguments and a generator."""
    packet = target._overloadpacket
    wanted = [(argument.name, str(argument.type)) for argument in target._schema.arguments]
    for name in packet.overloads():
        overload = getattr(packet, name)
        arguments = overload._schema.arguments
        others = [(a.name, str(a.type)) for a in arguments if a.name != "generator"]
        if len(others) == len(arguments) - 1 and others == wanted and not any(a.is_out for a in arguments):
            return overload  # type: ignore[no-any-return]
    return None
