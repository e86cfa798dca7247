"""What a fusing compiler does with an operator: computes it where it is read, or stores it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import get_default_op_list

aten, prims = torch.ops.aten, torch.ops.prims


def is_fusible(node: fx.Node) -> bool:
    """Whether the compiler computes a node where it is read, together with its neighbours."""
    packet = getattr(node.target, "_overloadpacket", node.target)
    return is_elementwise(node) or packet in _FUSIBLE


def is_elementwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_never_stored(node: fx.Node) -> bool:
    """Whether the kernel of a reader computes a node, unless the reader itself wants it in memory."""
    gathered = overload_packet(node) is aten.cat or overload_packet(node) in WINDOWS_BACKWARD
    return is_fusible(node) and not is_reduction(node) and not gathered


def is_reduction(node: fx.Node) -> bool:
    return overload_packet(node) in _REDUCTIONS


def draws(node: fx.Node) -> bool:
    """Whether random numbers are computed inside a kernel, from a seed."""
    return overload_packet(node) in _RANDOM


def reads_windows(node: fx.Node) -> bool:
    """Whether the compiler stores what a node reads, for the while that it runs."""
    return overload_packet(node) in _WINDOWS


def computes_inside(node: fx.Node) -> bool:
    """Whether what a node reads need not be in memory."""
    return is_fusible(node) and overload_packet(node) not in _WINDOWS | WINDOWS_BACKWARD


def overload_packet(node: fx.Node) -> Any:
    return getattr(node.target, "_overloadpacket", None)


_REDUCTIONS = {
    aten.sum, aten.mean, aten.amax, aten.amin, aten.max, aten.min, aten.any, aten.all, aten.prod, aten.argmax,
    aten.argmin, aten.var, aten.std, aten.var_mean, aten.cumsum, prims.var, prims.sum,
    prims.prepare_softmax_online, prims._low_memory_max_pool_with_offsets,
}  # fmt: skip
_RANDOM = {prims.inductor_random, prims.inductor_randint}
_FUSIBLE = {
    *get_default_op_list().fusible_ops, *_REDUCTIONS, aten.cat, aten.clone, aten.copy, aten.embedding,
    aten.constant_pad_nd, aten.select_scatter, aten.slice_scatter, aten.index_select, aten._unsafe_index,
    aten._unsafe_masked_index, aten.max_pool2d_with_indices_backward, aten.reflection_pad2d, aten.flip, aten.tril,
    aten.scalar_tensor, prims.inductor_lookup_seed, *_RANDOM, aten.copy_,
}  # fmt: skip
# These read several elements for each one they write, so the compiler stores what they read. Of the backward ones,
# that and their own value serve other kernels, too.
_WINDOWS = {prims._low_memory_max_pool_with_offsets, aten.avg_pool2d}
WINDOWS_BACKWARD = {aten.max_pool2d_with_indices_backward, aten.avg_pool2d_backward}
