"""Groups the operators of a joint graph the way a fusing compiler will run them.

Inductor computes pointwise operators wherever they are read and never stores them, unless it must: matrix products,
convolutions and attention read and write real memory, so do reductions, and so does what leaves the graph. So the
planner is shown only values that will be stored. Each of them becomes one operator, which reads other stored values
and computes everything between them and itself: its *cone*. To recompute it costs the traffic of its cone, not the
arithmetic.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import fx

from elbowroom.capture.joint_graph import Captured, is_getitem
from elbowroom.capture.operators import (
    WINDOWS_BACKWARD,
    computes_inside,
    draws,
    is_elementwise,
    is_fusible,
    is_reduction,
    overload_packet,
    reads_windows,
)
from elbowroom.capture.rewrites.rewrite import PART_COPY
from elbowroom.capture.traced_values import known_offset, tensor_bytes
from elbowroom.step.graph import Operator, StepGraph

aten, prims = torch.ops.aten, torch.ops.prims

# Where several kernels would compute a pointwise value again, it is stored if that reads much less than its cone.
_WORTH_STORING = 1.25


def contract(captured: Captured) -> Captured:
    """The same graph with stored values only, and the cone of nodes that computes each."""
    graph, nodes = captured.graph, captured.nodes
    masks = _masks(captured)
    stored, reads = _stored(captured, masks)
    inlined = _inlined_later(captured, stored, masks, reads)
    chosen = [i for i, op in enumerate(graph.ops) if op.kind in ("input", "gradient") or i in stored]
    number = {old: new for new, old in enumerate(chosen)}
    stored_later = stored - inlined
    cones = [_cone(captured, i, stored_later if graph.ops[i].kind == "backward" else stored) for i in chosen]
    keys = {node: op.key for node, op in zip(nodes, graph.ops, strict=True)}
    written_away = _written_away(captured)
    storage_bytes = {**graph.storage_bytes, **dict.fromkeys(written_away, 0)}
    ops: list[Operator] = []
    for new, old in enumerate(chosen):
        op = graph.ops[old]
        boundary = tuple(number[read] for read in reads[old])
        ops.append(
            replace(
                op,
                index=new,
                reads=boundary,
                rerun_reads=boundary,
                makes=tuple((storage, storage_bytes[storage]) for storage, _ in op.makes),
                reusable=_overwritable(op, cones[new], dict(zip(boundary, reads[old], strict=True)), captured),
                workspace=_stored_meanwhile(captured, old, stored),
                fused_sequences=_sequences(op, cones[new]),
                random=False,  # seeds are kept, so nothing draws twice
                key=_cone_key(cones[new], keys),
            )
        )

    contracted = _renumbered(captured, tuple(ops), storage_bytes, stored, number)

    def numbers_or_none(some: Iterable[int | None]) -> list[int | None]:
        return [None if i is None else number[i] for i in some]

    return replace(
        captured,
        graph=contracted,
        nodes=[nodes[i] for i in chosen],
        forward_outputs=numbers_or_none(captured.forward_outputs),
        overwrites=numbers_or_none(captured.overwrites),
        backward_outputs=numbers_or_none(captured.backward_outputs),
        cones=cones,
        unfused=captured,
    )


def _renumbered(
    captured: Captured,
    ops: tuple[Operator, ...],
    storage_bytes: Mapping[int, int],
    stored: set[int],
    number: Mapping[int, int],
) -> StepGraph:
    """The graph of the stored values alone; `number` has the new numbers of what remains."""
    graph = captured.graph

    def numbers(some: Iterable[int]) -> tuple[int, ...]:
        return tuple(number[i] for i in some)

    return StepGraph(
        ops=ops,
        inputs=numbers(graph.inputs),
        arriving=numbers(graph.arriving),
        forward=numbers(i for i in graph.forward if i in stored),
        backward=numbers(i for i in graph.backward if i in stored),
        results=numbers(graph.results),
        updates=numbers(graph.updates),
        gradients=tuple((number[i], number[gradient]) for i, gradient in graph.gradients),
        parameters=frozenset(numbers(graph.parameters)),
        effects=numbers(graph.effects),
        overwritten={number[i]: size for i, size in graph.overwritten.items()},
        storage_bytes=storage_bytes,
        kept=frozenset(numbers(_drawn(captured))),
        part_copies=frozenset(numbers(i for i in graph.part_copies if _is_slice_of_stored(captured, i, stored))),
    )


def _stored(captured: Captured, masks: set[int]) -> tuple[set[int], dict[int, tuple[int, ...]]]:
    """The operators whose values are stored, and which stored values (or inputs) each operator's cone reads."""
    graph, nodes = captured.graph, captured.nodes
    readers = _readers(graph)
    stored = _must_be_stored(captured) | masks
    reads: dict[int, tuple[int, ...]] = {}
    for i in (*graph.forward, *graph.backward):
        boundary: dict[int, None] = {}
        for read in graph.ops[i].reads:
            if graph.ops[read].kind in ("input", "gradient") or _reads_stored(captured, i, read, stored):
                boundary[read] = None
            else:
                boundary.update(dict.fromkeys(reads[read]))
        reads[i] = tuple(boundary)
        if i not in stored and not graph.ops[i].is_view and len(readers[i]) > 1:
            traffic = sum(tensor_bytes(nodes[read]) for read in boundary)
            if traffic > _WORTH_STORING * tensor_bytes(nodes[i]):
                stored.add(i)
    for i in (*graph.inputs, *graph.arriving):
        reads[i] = ()
    return stored, reads


def _masks(captured: Captured) -> set[int]:
    """Forward values that follow from random numbers alone and that the backward reads: where dropout drops, say.

    They could be drawn again wherever they are read, from a seed, but that is arithmetic which hides behind no
    traffic. Each is stored at its smallest, a byte an element for dropout.
    """
    graph, nodes = captured.graph, captured.nodes
    readers = _readers(graph)
    from_random: set[int] = set()
    for i in graph.forward:
        follows = graph.ops[i].is_view or _is_pointwise(captured, i)
        if draws(nodes[i]) or (follows and graph.ops[i].reads and from_random.issuperset(graph.ops[i].reads)):
            from_random.add(i)

    def smallest(i: int) -> int:
        i = _behind_views(captured, i)
        smaller = [read for read in graph.ops[i].reads if read in from_random]
        is_larger = sum(tensor_bytes(nodes[read]) for read in smaller) < tensor_bytes(nodes[i])
        return smallest(smaller[0]) if len(smaller) == 1 and is_larger else i

    later = (i for i in from_random if any(graph.ops[reader].kind == "backward" for reader in readers[i]))
    return {smallest(i) for i in later}


def _inlined_later(
    captured: Captured, stored: set[int], masks: set[int], reads: dict[int, tuple[int, ...]]
) -> set[int]:
    """Forward values that only the forward stores: a backward kernel computes them where it reads them.

    A matrix product has them stored, but in the backward only pointwise kernels read them, and may as well read what
    they are computed from: no more bytes, and fewer to save. So it is with an attention's weights after dropout: the
    scores are there anyway. What backward operators read is brought up to date in `reads`.
    """
    graph, nodes = captured.graph, captured.nodes
    readers = _readers(graph)
    returned = {_behind_views(captured, i) for i in (*graph.results, *graph.updates, *graph.effects)}
    needed_by: defaultdict[int, set[int]] = defaultdict(set)
    for reader in graph.backward:
        for read in reads[reader] if reader in stored else ():
            needed_by[read].add(reader)
    inlined: set[int] = set()
    for i in reversed(graph.forward):
        if i not in stored or i in masks or i in returned or not needed_by[i] or not _is_pointwise(captured, i):
            continue
        size = tensor_bytes(nodes[i])
        besides = [read for read in reads[i] if graph.ops[read].kind == "forward" and not needed_by[read]]
        saves = sum(tensor_bytes(nodes[read]) for read in besides) < size
        reads_little = (
            sum(tensor_bytes(nodes[read]) for read in reads[i] if read not in masks) <= _WORTH_STORING * size
        )
        later = [nodes[reader] for reader in readers[i] if graph.ops[reader].kind == "backward"]
        if saves and reads_little and all(map(computes_inside, later)):
            inlined.add(i)
            for reader in needed_by.pop(i):
                instead = (reads[i] if read == i else (read,) for read in reads[reader])
                reads[reader] = tuple(dict.fromkeys(chain.from_iterable(instead)))
                for read in reads[i]:
                    needed_by[read].add(reader)
    return inlined


def _is_pointwise(captured: Captured, i: int) -> bool:
    op, node = captured.graph.ops[i], captured.nodes[i]
    return is_fusible(node) and not (is_reduction(node) or is_getitem(node) or op.is_view or op.random)


def _must_be_stored(captured: Captured) -> set[int]:
    graph, nodes = captured.graph, captured.nodes
    returned = {*graph.results, *graph.updates, *graph.effects, *(gradient for _, gradient in graph.gradients)}
    stored = set(returned) | {_behind_views(captured, i) for i in returned}
    for i in (*graph.forward, *graph.backward):
        op, node = graph.ops[i], nodes[i]
        computed = node.op != "get_attr" and not op.is_view and not is_getitem(node)
        if computed and (not is_fusible(node) or overload_packet(node) in WINDOWS_BACKWARD):
            stored.add(i)
            stored.update(_behind_views(captured, read) for read in op.reads)
        elif is_getitem(node) or is_reduction(node) or _is_gathered(node) or op.random or not op.storable:
            stored.add(i)
    return {i for i in stored if graph.ops[i].kind in ("forward", "backward") and nodes[i].op != "get_attr"}


def _is_gathered(node: fx.Node) -> bool:
    """Whether a value is there to be in one place."""
    return node.target is aten.cat.default or PART_COPY in node.meta


def _is_slice_of_stored(captured: Captured, i: int, stored: set[int]) -> bool:
    """Whether a copy of a part is all that is computed. The whole may never be in memory, but for its parts."""
    (part,) = captured.graph.ops[i].reads
    return captured.graph.ops[part].reads[0] in stored


def _reads_stored(captured: Captured, i: int, read: int, stored: set[int]) -> bool:
    """Whether an operator reads a stored value. What it reads for its shape alone need not be in memory."""
    node = captured.nodes[i]
    measures = node.target is aten.max_pool2d_with_indices_backward.default and node.args[1] is captured.nodes[read]
    return read in stored and not measures


def _stored_meanwhile(captured: Captured, i: int, stored: set[int]) -> int:
    """Bytes of what an operator that reads windows has the compiler store."""
    if not reads_windows(captured.nodes[i]):
        return 0
    read = (_behind_views(captured, read) for read in captured.graph.ops[i].reads)
    return sum(captured.graph.ops[r].bytes for r in read if r not in stored)


def _drawn(captured: Captured) -> set[int]:
    """Random values, and the parts of random tuples: drawn once, then kept."""
    ops, nodes = captured.graph.ops, captured.nodes
    drawn = {i for i in captured.graph.forward if ops[i].random}
    return drawn | {i for i in captured.graph.forward if is_getitem(nodes[i]) and ops[i].reads[0] in drawn}


def _behind_views(captured: Captured, i: int) -> int:
    """The value whose storage a view shows; parts of tuples count as values of their own."""
    ops = captured.graph.ops
    while ops[i].is_view and not is_getitem(captured.nodes[i]) and ops[i].kind in ("forward", "backward"):
        shared = set(ops[i].shares)
        i = next(read for read in ops[i].reads if shared & set(captured.graph.storages(read)))
    return i


def _readers(graph: StepGraph) -> dict[int, set[int]]:
    """The operators that are no views and read a value, directly or through views."""
    found: dict[int, set[int]] = {op.index: set() for op in graph.ops}
    for op in reversed(graph.ops):
        through = found[op.index] if op.is_view else {op.index}
        for read in op.reads:
            found[read] |= through
    return found


def _cone(captured: Captured, root: int, stored: set[int]) -> tuple[fx.Node, ...]:
    """The nodes that compute a stored value from other stored ones, in order; it comes last."""
    ops = captured.graph.ops
    if ops[root].kind in ("input", "gradient"):
        return ()
    inside, waiting = {root}, [root]
    while waiting:
        reader = waiting.pop()
        for read in ops[reader].reads:
            outside = ops[read].kind in ("input", "gradient") or _reads_stored(captured, reader, read, stored)
            if not outside and read not in inside:
                inside.add(read)
                waiting.append(read)
    return tuple(captured.nodes[i] for i in sorted(inside))


def _sequences(op: Operator, cone: tuple[fx.Node, ...]) -> tuple[int, ...]:
    """Autograd's numbers of what runs inside. A backward cone may hold forward nodes: those tell nothing."""
    if op.kind == "backward":
        cone = tuple(node for node in cone if node.meta.get("partitioner_tag") == "is_backward")
    found = (node.meta.get("seq_nr") for node in reversed(cone[:-1]))
    return tuple(dict.fromkeys(sequence for sequence in found if sequence is not None))


def _cone_key(cone: tuple[fx.Node, ...], keys: dict[fx.Node, str]) -> str:
    """Equal for cones that compute the same: their operators on the same shapes, connected alike."""
    if len(cone) < 2:
        return keys[cone[0]] if cone else ""
    places = {node: place for place, node in enumerate(cone)}
    parts = [(keys[node], [places.get(read, -1) for read in node.all_input_nodes]) for node in cone]
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return f"{keys[cone[-1]]} fused with {len(cone) - 1} more, {digest}"


def _written_away(captured: Captured) -> set[int]:
    """Storages of gradients that are computed straight into the parameter's `.grad` and nowhere else."""
    graph = captured.graph
    readers: dict[int, list[int]] = {}
    for op in graph.ops:
        for read in op.reads:
            readers.setdefault(read, []).append(op.index)
    returned = Counter(gradient for _, gradient in graph.gradients)
    away: set[int] = set()
    for i, gradient in graph.gradients:
        if i not in graph.parameters or gradient in readers or returned[gradient] > 1:
            continue
        source = _behind_views(captured, gradient)  # a bias's gradient is a view of a sum
        alone = source == gradient or (readers[source] == [gradient] and source not in returned)
        if alone and is_fusible(captured.nodes[source]):
            away.update(storage for storage, _ in graph.ops[source].makes)
    return away


def _overwritable(
    op: Operator, cone: tuple[fx.Node, ...], boundary: dict[int, int], captured: Captured
) -> tuple[int, ...]:
    """Stored values that a kernel may write its output over, if nobody reads them again.

    A pointwise one must read each element where it writes it: not through a slice, say. One that writes into some
    places of what it reads first leaves the others as they are. `boundary` has numbers new and old.
    """
    if len(op.makes) != 1 or not cone:
        return ()
    if overload_packet(cone[-1]) in _WRITE_PLACES:
        return tuple(new for new, old in boundary.items() if captured.nodes[old] is cone[-1].args[0])
    keeps_places = _keeps_or_cuts_columns if cone[-1].target is aten.constant_pad_nd.default else _keeps_places
    if is_reduction(cone[-1]) or not keeps_places(cone[-1]):
        return ()
    there: set[fx.Node] = {cone[-1]}
    elsewhere: set[fx.Node] = set()
    for node in reversed(cone):
        keeps = node in there and node not in elsewhere and keeps_places(node)
        (there if keeps else elsewhere).update(node.all_input_nodes)
    size = op.makes[0][1]
    alike = [new for new, old in boundary.items() if _bytes_alone(captured, old) == size]
    return tuple(new for new in alike if captured.nodes[boundary[new]] in there - elsewhere)


def _bytes_alone(captured: Captured, i: int) -> int | None:
    """Bytes of a value that is one storage of its own, or that part of a tuple."""
    op, storages = captured.graph.ops[i], captured.graph.storages(i)
    if len(storages) != 1 or (op.is_view and not is_getitem(captured.nodes[i])):
        return None
    return captured.graph.storage_bytes[storages[0]]


def _keeps_places(node: fx.Node) -> bool:
    return is_elementwise(node) or overload_packet(node) in _KEEP_PLACES


def _keeps_or_cuts_columns(node: fx.Node) -> bool:
    """The same for a matrix with columns appended, computed from one of which only the others are read."""
    value = node.meta["val"]
    if node.target is aten.slice.Tensor:
        whole = node.all_input_nodes[0].meta["val"]
        offset = known_offset(value)
        return offset is not None and offset == known_offset(whole) and value.shape[:-1] == whole.shape[:-1]
    if node.target is aten.constant_pad_nd.default:
        appended: Any = node.args[1]
        return not appended[0] and not any(appended[2:])
    columns = {read.meta["val"].shape[-1:] for read in node.all_input_nodes if _is_as_large(read, node)}
    return _keeps_places(node) and columns <= {value.shape[-1:]}


def _is_as_large(read: fx.Node, node: fx.Node) -> bool:
    return bool(read.meta["val"].numel() == node.meta["val"].numel())


_KEEP_PLACES = {
    aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.clone, aten.alias, aten.detach,
    aten._to_copy, prims.convert_element_type,
}  # fmt: skip
# An embedding's gradient, say, into zeros.
_WRITE_PLACES = {
    aten.index_put, aten._unsafe_index_put, aten._unsafe_masked_index_put_accumulate, aten.scatter_add,
    aten.scatter_reduce,
}  # fmt: skip
