"""Matrix products whose rows begin at odd addresses get zeros appended, and their results are read without.

Tensor cores want rows that begin at multiples of sixteen bytes. With a vocabulary of 50,257 words in bfloat16, hardly
any row of the logits does. Inductor pads, too, but each operand of each product for itself, which copies the logits'
gradient twice, and only if it has just measured that to be faster: of two runs of one GPT-2, one took 1.5 GiB more.
Here a value is padded once, by the kernel that computes it, and whoever else reads it reads that: nothing is copied,
and nothing is larger but by a few columns.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch import fx

from elbowroom.capture.operators import is_never_stored
from elbowroom.capture.rewrites.writer import Writer
from elbowroom.capture.traced_values import evaluated, is_view, tensor_bytes

aten = torch.ops.aten

_DEVICES = ("cuda",)
_ALIGNED = {torch.bfloat16: 8, torch.float16: 8}  # elements that are sixteen bytes
_LARGE = 2**33  # multiplications: fewer take microseconds, however they are aligned
_LITTLE = 4  # times smaller than the largest operand: such a one may be copied


def align_products(graph: fx.Graph) -> None:
    """Pad what large products read and write, where it is computed by kernels that the compiler writes itself."""
    pads = _Pads(graph)
    for node in list(graph.nodes):
        if node.target in (aten.mm.default, aten.addmm.default) and not node.kwargs and _is_slow(node):
            _align(pads, node)
    pads.let_others_read_them()


def _is_slow(node: fx.Node) -> bool:
    *_, first, second = node.args
    (rows, inner), columns = first.meta["val"].shape, second.meta["val"].shape[1]  # type: ignore[union-attr]
    value = node.meta["val"]
    aligns = value.dtype in _ALIGNED and value.device.type in _DEVICES
    return aligns and rows * inner * columns >= _LARGE and any(_missing(node))


def _missing(node: fx.Node) -> tuple[int, int, int]:
    """Rows of the first operand, columns of it and rows of the second, columns of that: how many to append.

    Only where they are what lies side by side in memory: of an operand, or of the result.
    """
    *_, first, second = (arg.meta["val"] for arg in node.args)  # type: ignore[union-attr]
    step = _ALIGNED[node.meta["val"].dtype]
    rows, inner, columns = (-size % step for size in (*first.shape, second.shape[1]))
    return (
        rows if first.stride(0) == 1 else 0,
        inner if first.stride(1) == 1 or second.stride(0) == 1 else 0,
        columns,
    )


def _align(pads: _Pads, node: fx.Node) -> None:
    *bias, first, second = node.args
    rows, inner, columns = _missing(node)
    operands = [(first, rows, inner), (second, inner, columns)]
    largest = max(map(tensor_bytes, (first, second, node)))  # type: ignore[arg-type]
    size = node.meta["val"].shape
    if any(each.meta["val"].shape != size[1:] for each in bias):  # type: ignore[union-attr]
        return
    if not all(_is_cheap(each, largest) for each, *sizes in operands if any(sizes)):
        return
    with node.meta["val"].fake_mode:
        padded = node.meta["val"].new_empty(size[0] + rows, size[1] + columns)
    if not _can_show(node, padded[: size[0], : size[1]]):
        return
    multiplied = [pads.padded(each, node, *sizes) for each, *sizes in operands]
    with pads.graph.inserting_before(node):
        write = Writer(pads.graph, node)
        added = [write(aten.constant_pad_nd.default, each, [0, columns], 0.0) for each in bias] if columns else bias
        product = write(node.target, *added, *multiplied)
        node.replace_all_uses_with(_first(write, product, size))


def _is_cheap(operand: Any, largest: int) -> bool:
    """Whether zeros can be written along with a value, or a copy of it is small."""
    return is_never_stored(_behind_views(operand)) or _LITTLE * tensor_bytes(operand) <= largest


class _Pads:
    """Values with zeros appended, each once."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._known: dict[fx.Node, fx.Node] = {}

    def padded(self, operand: Any, reader: fx.Node, rows: int, columns: int) -> fx.Node:
        """A matrix, or what it transposes, with rows and columns of zeros appended."""
        if not rows and not columns:
            return operand  # type: ignore[no-any-return]
        if operand.target is aten.permute.default:
            transposed = self.padded(operand.args[0], reader, columns, rows)
            with self.graph.inserting_before(reader):
                return Writer(self.graph, reader)(aten.permute.default, transposed, [1, 0])
        if operand not in self._known:
            self._known[operand] = self._pad(operand, reader)
        size = operand.meta["val"].shape
        with self.graph.inserting_before(reader):
            wanted = torch.Size((size[0] + rows, size[1] + columns))
            return _first(Writer(self.graph, reader), self._known[operand], wanted)

    def _pad(self, value: fx.Node, reader: fx.Node) -> fx.Node:
        """Rows and columns, whether or not this reader wants both: there shall be but one."""
        step = _ALIGNED[value.meta["val"].dtype]
        rows, columns = (-size % step for size in value.meta["val"].shape)
        computed = value.op == "call_function"
        with self.graph.inserting_after(value) if computed else self.graph.inserting_before(reader):
            write = Writer(self.graph, value if computed else reader)
            return write(aten.constant_pad_nd.default, value, [0, columns, 0, rows], 0.0)

    def let_others_read_them(self) -> None:
        """Whoever else reads a value reads the padded one, so that the other need not be stored."""
        for value, padded in self._known.items():
            if value.op != "call_function":
                continue
            size = value.meta["val"].shape
            if _can_show(value, padded.meta["val"][: size[0], : size[1]], besides=padded):
                with self.graph.inserting_before(padded.next):
                    part = _first(Writer(self.graph, value), padded, size)
                value.replace_all_uses_with(part, delete_user_cb=partial(operator.is_not, padded))


def _first(write: Writer, padded: fx.Node, size: torch.Size) -> fx.Node:
    """The matrix without what was appended, or without some of it."""
    for dim in (0, 1):
        if padded.meta["val"].shape[dim] != size[dim]:
            padded = write(aten.slice.Tensor, padded, dim, 0, size[dim])
    return padded


def _can_show(node: fx.Node, value: torch.Tensor, besides: fx.Node | None = None) -> bool:
    """Whether views of a node can show another value as well, and whoever gets it from the graph sees the same."""
    for user in node.users:
        if user is besides:
            continue
        if user.op == "output" and value.stride() != node.meta["val"].stride():
            return False
        if is_view(user):
            values = {**{read: read.meta["val"] for read in user.all_input_nodes}, node: value}
            try:
                shown = evaluated(user.target, user.args, user.kwargs, value.fake_mode, values.__getitem__)  # type: ignore[attr-defined]
            except (RuntimeError, ValueError):
                return False
            if not isinstance(shown, torch.Tensor) or not _can_show(user, shown):
                return False
    return True


def _behind_views(node: Any) -> fx.Node:
    while is_view(node):
        node = node.args[0]
    return node  # type: ignore[no-any-return]
