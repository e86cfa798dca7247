"""A program as two fx graphs for Inductor to compile.

The forward graph holds every node once. The backward graph holds a copy of a recomputed value's cone for each time
the program runs it, placed where the program runs it; a copy that still shows the same values is read again instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, Literal

import torch
from torch import fx

from elbowroom.capture.images import images
from elbowroom.capture.joint_graph import Captured
from elbowroom.capture.operators import draws, is_fusible, reads_windows
from elbowroom.capture.rewrites.rewrite import CHECK, PART_COPY
from elbowroom.execute.to_host import traced_moves
from elbowroom.step.graph import StepGraph
from elbowroom.step.operations import Move, Offload, Prefetch, Release, Run
from elbowroom.step.program import Program, reads_of

aten = torch.ops.aten

Mode = Literal["add", "write", "return"]  # how a backward hands its gradients over: see `Fused`

_IMAGES: dict[Any, int] = {aten.convolution.default: 1, aten.convolution_backward.default: 2}  # how many it reads


def forward_graph(captured: Captured, program: Program, saved: Sequence[int], channels_last: bool) -> fx.Graph:
    """Inputs in AOT autograd's order, and the clock of moves if there are any; its outputs, then what is saved."""
    writer = _Graph(captured, channels_last)
    for i in captured.graph.inputs:
        writer.input(i)
    copies = {i: writer.copy_of(i) for i in saved if i in captured.graph.overwritten}
    writer.clock = writer.graph.placeholder("clock") if program.moves else None
    for operation in program.forward:
        if isinstance(operation, Run):
            writer.run(operation)
        else:
            writer.move(operation)
    views = [i for i in saved if i not in captured.graph.inputs and captured.graph.copied_bytes(i)]
    copies.update({i: writer.copy_of(i) for i in views})
    outputs = [None if i is None else writer.values[captured.nodes[i]] for i in captured.forward_outputs]
    writer.graph.output([*outputs, *(copies.get(i) or writer.values[captured.nodes[i]] for i in saved)])
    return writer.graph


def backward_graph(
    captured: Captured,
    program: Program,
    parameters: Sequence[int],
    mode: Mode,
    channels_last: bool,
    without: frozenset[int] = frozenset(),
) -> tuple[fx.Graph, list[Any]]:
    """What was saved, then gradients to write to, then those that arrive; and the traced values of all these. The
    clock of moves comes last, without a value.

    Inputs in `without` get no gradient; they are not among `parameters`.
    """
    writer = _Graph(captured, channels_last)
    for i in program.saved:
        writer.input(i)
    buffers = {}
    for i in parameters if mode != "return" else ():
        buffers[i] = writer.graph.placeholder(f"gradient_of_{captured.nodes[i].name}")
        buffers[i].meta["val"] = captured.nodes[i].meta["val"]
    for i in captured.graph.arriving:
        writer.input(i)
    gradients = enumerate(captured.backward_outputs)
    returned = {i: gradient for i, gradient in gradients if gradient is not None and i not in without}
    inputs = [node.meta["val"] for node in writer.graph.nodes]
    writer.clock = writer.graph.placeholder("clock") if program.moves else None
    readers = _reader_counts(captured.graph, program.backward_runs)
    places = count()
    for run in program.backward:
        if not isinstance(run, Run):
            writer.move(run)
            continue
        place = next(places)
        writer.run(run)
        if not run.accumulates:
            writer.store(run, readers[place])
        value = writer.values[captured.nodes[run.op]]
        for i in run.accumulates:
            if i in without:
                continue
            if mode != "return":
                writer.write(buffers[i], value, add=mode == "add")
            else:
                writer.returned[i] = value
        writer.free(run, set(returned.values()))
    outputs: list[Any] = []
    for i in range(len(captured.backward_outputs)):
        if i not in returned or i in buffers:
            outputs.append(None)
        else:
            outputs.append(writer.returned.get(i) or writer.values[captured.nodes[returned[i]]])
    writer.graph.output(outputs)
    return writer.graph, inputs


def _reader_counts(step_graph: StepGraph, runs: Sequence[Run]) -> list[int]:
    """For each run of the backward, how many others read what it makes."""
    found = [0] * len(runs)
    latest: dict[int, int] = {}
    for place, run in enumerate(runs):
        for read in reads_of(step_graph, run):
            if read in latest:
                found[latest[read]] += 1
        latest[run.op] = place
    return found


class _Graph:
    """Writes one of the two graphs, operator by operator."""

    def __init__(self, captured: Captured, channels_last: bool) -> None:
        assert captured.cones is not None
        self.captured = captured
        self.channels_last = channels_last
        self.cones = captured.cones
        self._images = images(captured.module.graph) if channels_last else set()
        self.graph = fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}  # stored values: the latest copy
        self.returned: dict[int, fx.Node] = {}
        self.clock: fx.Node | None = None  # what moves write to
        self._inlined: dict[fx.Node, tuple[fx.Node, list[fx.Node | None]]] = {}

    def input(self, i: int) -> None:
        node = self.captured.nodes[i]
        self.values[node] = self.graph.placeholder(node.name)
        self.values[node].meta = dict(node.meta)

    def copy_of(self, i: int) -> fx.Node:
        node = self.captured.nodes[i]
        copy = self.graph.call_function(aten.clone.default, (self.values[node],))
        copy.meta["val"] = node.meta["val"]
        return copy

    def run(self, run: Run) -> None:
        *inside, root = self.cones[run.op]
        if root.target is CHECK:  # on a GPU, a failed check in a kernel would end all use of the device
            raise RuntimeError("its forward asserts something of tensors, which fused kernels do not check")
        for node in inside:
            self._inline(node)
        if run.viewed_in is not None:
            self.values[root] = self._latest(root.all_input_nodes[0])
            return
        self.values[root] = self.graph.node_copy(root, self._latest)
        self._lay_out(self.values[root])
        if reads_windows(root):  # later readers shall not take what was stored for this one
            for node in inside:
                self._inlined.pop(node, None)

    def move(self, move: Move) -> None:
        """A value on its way to the host or back; it has no gaps there, and images are laid out as here."""
        root, number = self.captured.nodes[move.value], move.value
        traced, call = root.meta["val"], self.graph.call_function
        stride = self._stride_of(root)
        if isinstance(move, Offload):
            self.values[root] = self._strided(self.values[root], stride)
            call(traced_moves.offload, (self.values[root], self.clock, number, stride))
        elif isinstance(move, Release):
            call(traced_moves.release, (self.values.pop(root), self.clock, number))
        elif isinstance(move, Prefetch):
            call(traced_moves.prefetch, (self.clock, number))
        else:
            form = (list(traced.size()), stride, traced.dtype, traced.device)
            self.values[root] = call(traced_moves.arrive, (self.clock, number, *form))
            self.values[root].meta["val"] = traced

    def _stride_of(self, root: fx.Node) -> list[int]:
        """Strides without gaps in the order of a value's own, or channels last."""
        traced = root.meta["val"]
        image = self.channels_last and root in self._images and traced.dim() == 4
        order = torch.empty(traced.size(), device="meta", memory_format=torch.channels_last) if image else traced
        return list(torch.empty_like(order, device="meta", memory_format=torch.preserve_format).stride())

    def store(self, run: Run, readers: int) -> None:
        """Has the compiler store an image that is planned as a value of its own, because it is read more than once.

        It might rather compute it inside its readers, keep all that it reads until the last of them, and then store
        one of those instead: in float32, twice as large. And random numbers would be drawn by each reader.
        """
        *inside, root = self.cones[run.op]
        if run.viewed_in is not None:
            return
        if PART_COPY in root.meta or (readers > 1 and any(map(draws, inside))):
            self.values[root] = self._strided(self.values[root], root.meta["val"].stride())
        elif root in self._images and is_fusible(root) and not self.captured.graph.ops[run.op].is_view:
            self.values[root] = self._channels_last(self.values[root])

    def _lay_out(self, node: fx.Node) -> None:
        """Images that a convolution reads, and gradients that its backward reads, in the program's layout."""
        operands = _IMAGES.get(node.target, 0)
        with self.graph.inserting_before(node):
            for place in range(operands):
                node.update_arg(place, self._channels_last(node.args[place]))  # type: ignore[arg-type]

    def _channels_last(self, node: fx.Node) -> fx.Node:
        value = node.meta["val"]
        if not self.channels_last or not isinstance(value, torch.Tensor) or value.dim() != 4:
            return node
        return self._strided(
            node, torch.empty(value.size(), device="meta", memory_format=torch.channels_last).stride()
        )

    def _strided(self, node: fx.Node, strides: Sequence[int]) -> fx.Node:
        """Stored, and laid out like this."""
        laid_out = self.graph.call_function(torch.ops.prims.inductor_force_stride_order.default, (node, strides))
        laid_out.meta["val"] = node.meta["val"]
        return laid_out

    def free(self, run: Run, kept: set[int]) -> None:
        """Forget values, so that nothing that reads them is taken for current."""
        for i in run.frees:
            if i not in kept:
                self.values.pop(self.captured.nodes[i], None)

    def write(self, buffer: fx.Node, value: fx.Node, *, add: bool) -> None:
        if add:
            total = self.graph.call_function(aten.add.Tensor, (buffer, value))
            total.meta["val"] = buffer.meta["val"]
            value = total
        written = self.graph.call_function(aten.copy_.default, (buffer, value))
        written.meta["val"] = buffer.meta["val"]

    def _inline(self, node: fx.Node) -> None:
        reads = [self._find(read) for read in node.all_input_nodes]
        known = self._inlined.get(node)
        if known is None or None in reads or known[1] != reads:
            self._inlined[node] = (self.graph.node_copy(node, self._latest), reads)

    def _find(self, node: fx.Node) -> fx.Node | None:
        if node in self.values:
            return self.values[node]
        return self._inlined[node][0] if node in self._inlined else None

    def _latest(self, node: fx.Node) -> fx.Node:
        found = self._find(node)
        assert found is not None, f"{node} is read before it is computed"
        return found
