"""Times of a fused graph's operators: heavy kernels are measured, everything else is the traffic of its cone.

A fused kernel reads what its cone reads and writes its own value; arithmetic hides behind that, but for random
numbers. Matrix products, convolutions and attention run as they would unfused and are measured so, in the layout that
they will have; so are random numbers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx
from torch._inductor.graph import GraphLowering

from elbowroom.capture.joint_graph import Captured, is_getitem
from elbowroom.capture.operators import draws, is_fusible, is_reduction
from elbowroom.capture.traced_values import tensor_bytes
from elbowroom.devices import machine_of
from elbowroom.measure.plain_operators import CHANNELS_LAST, KERNELS_ALONE, Given, Report, costs_of, cuda_seconds
from elbowroom.step.graph import Cost

_LAUNCH = 2e-6  # seconds
_COPIED = 2**26  # bytes, to see how fast copies are: enough for the full rate, little where memory is short
_REACHED = 0.75  # of a plain copy's speed, by generated kernels (ResNet-101 and GPT-2 medium on an H200)
_ROWS_SHARE = 0.5  # of the reads of a reduction over rows: the kernel that uses its result reads the same row anyway


def measure_fused(
    captured: Captured, *, given: Given | None = None, estimate: bool = False, report: Report = lambda part: None
) -> tuple[Captured, bool]:
    """The contracted graph with its operators' times and workspaces; and whether its images go channels last."""
    graph, nodes, cones, given = captured.graph, captured.nodes, captured.cones, given or {}
    assert cones is not None
    unfused = _unfused_keys(captured)
    heavy = {op.index: nodes[op.index] for op in graph.ops if op.key and is_heavy(nodes[op.index])}
    keys, channels_last = _laid_out(captured, heavy, unfused, given, estimate, report)
    random = {unfused[node]: node for cone in cones for node in cone if draws(node)}
    alone = {keys[i]: node for i, node in heavy.items()} | random
    costs = costs_of(alone, captured.device, given, estimate, report)
    speed = _bytes_per_second(captured.device, estimate)
    measured: dict[int, Cost] = {}
    for op in graph.ops:
        if op.index in heavy:
            time, workspace, _ = costs[keys[op.index]]
            measured[op.index] = Cost(time, workspace)
        elif op.kind in ("forward", "backward") and not is_getitem(nodes[op.index]) and not op.is_view:
            drawing = sum(costs[unfused[node]][0] for node in cones[op.index] if draws(node))
            time = _LAUNCH + max(drawing, _traffic(captured, op.index) / (_REACHED * speed))
            measured[op.index] = Cost(time, op.workspace)
    return replace(captured, graph=graph.with_costs(measured)), channels_last


def is_heavy(node: fx.Node) -> bool:
    name = str(node.target)
    return not is_fusible(node) and any(word in name for word in _HEAVY)


_HEAVY = ("mm.", "convolution", "attention", "lstm", "gru", "rnn")


def inductors_layout(captured: Captured) -> bool:
    """Whether Inductor would lay the forward's images out channels last."""
    return bool(GraphLowering.decide_layout_opt(captured.module, is_inference=False))


def _unfused_keys(captured: Captured) -> dict[fx.Node, str]:
    """Nodes by the keys that they have where nothing is fused."""
    assert captured.unfused is not None
    keys = {node: op.key for op, node in zip(captured.unfused.graph.ops, captured.unfused.nodes, strict=True)}
    # The host of a compiled program is faster than ours, or replays it.
    suffix = KERNELS_ALONE if captured.device.type == "cuda" else ""
    return {node: key + suffix for node, key in keys.items()}


def _laid_out(
    captured: Captured,
    heavy: dict[int, fx.Node],
    unfused: dict[fx.Node, str],
    given: Given,
    estimate: bool,
    report: Report,
) -> tuple[dict[int, str], bool]:
    """Keys of heavy operators in the better layout, and whether that is channels last. Where Inductor would not
    choose it, on a GPU, the convolutions decide: its rule is an old one."""
    plain = {i: unfused[node] for i, node in heavy.items()}
    if captured.device.type != "cuda":
        return plain, inductors_layout(captured)
    convolutions = {i: node for i, node in heavy.items() if "convolution" in str(node.target)}
    last = {i: key + CHANNELS_LAST * (i in convolutions) for i, key in plain.items()}
    if inductors_layout(captured) or not convolutions:
        return last, bool(convolutions)
    both = {keys[i]: node for keys in (plain, last) for i, node in convolutions.items()}
    costs = costs_of(both, captured.device, given, estimate, report)
    in_plain, in_last = (sum(costs[keys[i]][0] for i in convolutions) for keys in (plain, last))
    return (last, True) if in_last <= in_plain else (plain, False)


def _traffic(captured: Captured, i: int) -> float:
    op, node = captured.graph.ops[i], captured.nodes[i]
    reads = sum(tensor_bytes(captured.nodes[read]) for read in op.reads)
    return _ROWS_SHARE * reads if _reduces_rows(node) else reads + tensor_bytes(node)


def _reduces_rows(node: fx.Node) -> bool:
    """Whether a reduction runs over the last dimensions (LayerNorm, softmax) and not over the first (BatchNorm)."""
    if not is_reduction(node) or len(node.args) < 2:
        return False
    rank, over = node.args[0].meta["val"].dim(), node.args[1]  # type: ignore[union-attr]
    dimensions = [over] if isinstance(over, int) else over
    if not isinstance(dimensions, list | tuple) or not all(isinstance(each, int) for each in dimensions):
        return False
    return all(each % rank >= rank - len(dimensions) for each in dimensions)


def _bytes_per_second(device: torch.device, estimate: bool) -> float:
    if device.type != "cuda" or estimate:
        return machine_of(device.type).copy_bytes_per_second
    source = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    repeats = 20
    return 2 * source.nbytes * repeats / cuda_seconds(lambda: target.copy_(source), repeats)
