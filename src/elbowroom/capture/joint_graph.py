"""Turns the joint forward–backward graph of AOT autograd into a `StepGraph`, and keeps the fx nodes beside it."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from elbowroom.capture.generator_variant import generator_variant
from elbowroom.capture.out_variant import overwritable
from elbowroom.capture.rewrites.rewrite import CHECK, PART_COPY, batch_norm_updating, rewrite
from elbowroom.capture.traced_values import tensors_of
from elbowroom.step.graph import Kind, Operator, StepGraph

aten = torch.ops.aten
DATA_DEPENDENT = "it has shapes that depend on data"  # a reason why a graph cannot be planned


@dataclass(frozen=True)
class Captured:
    """A `StepGraph` and what is needed to run it: one fx node per operator, and the order of inputs and outputs.

    `forward_outputs` and `backward_outputs` are in AOT autograd's order, by operator (or a constant / None).
    """

    graph: StepGraph
    nodes: list[fx.Node]
    forward_outputs: list[int | None]
    overwrites: list[int | None]  # per forward output: the input that it overwrites
    backward_outputs: list[int | None]
    device: torch.device
    module: fx.GraphModule
    fixed_inputs: frozenset[int] = frozenset()  # parameters and buffers: the same memory in every step
    cones: list[tuple[fx.Node, ...]] | None = None  # per operator, if a compiler fuses: the nodes that it stands for
    unfused: Captured | None = None  # then: the same graph before


def capture_joint(
    graph_module: fx.GraphModule,
    forward_outputs: int,
    static_inputs: set[int],
    block: Callable[[int], int],
    rewriting: Callable[[fx.Graph], list[fx.Node]] = rewrite,
) -> Captured:
    """Read a joint graph whose first `forward_outputs` outputs belong to the forward.

    `block` says how many bytes the allocator takes for a storage.
    """
    graph = graph_module.graph
    effects = rewriting(graph)
    _number_sequences(graph)
    output = graph.output_node()
    returned = list(output.args[0])  # type: ignore[arg-type]
    mutated = _mutated_inputs(output, forward_outputs)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    arriving = [node for node in placeholders if is_arriving(node)]
    inputs = [node for node in placeholders if not is_arriving(node)]
    body = [node for node in graph.nodes if node.op in ("call_function", "get_attr")]
    later = _backward_nodes(body, arriving, returned[:forward_outputs])
    order = [*inputs, *arriving, *(n for n in body if n not in later), *(n for n in body if n in later)]
    kinds = _kinds(inputs, arriving, body, later)
    number = {node: i for i, node in enumerate(order)}
    storages = _Storages(block)
    ops = [_op(i, node, kinds[node], number, storages) for i, node in enumerate(order)]

    def numbers(nodes: list[Any]) -> list[int | None]:
        return [number[node] if isinstance(node, fx.Node) else None for node in nodes]

    forward_returns, backward_returns = numbers(returned[:forward_outputs]), numbers(returned[forward_outputs:])
    returns = [(op, i) for op, i in zip(forward_returns, mutated, strict=True) if op is not None]
    fixed = frozenset(i for i in static_inputs if i < len(inputs))
    overwritten = {i: live_bytes(order[i]) for i in _overwritten(returns, effects, number)}
    step_graph = StepGraph(
        ops=tuple(ops),
        inputs=tuple(number[n] for n in inputs),
        arriving=tuple(number[n] for n in arriving),
        forward=tuple(number[n] for n in body if n not in later),
        backward=tuple(number[n] for n in body if n in later),
        results=tuple(op for op, i in returns if i is None),
        updates=tuple(op for op, i in returns if i is not None),
        gradients=tuple((i, g) for i, g in enumerate(backward_returns) if g is not None and i < len(inputs)),
        # One that the step itself overwrites (an embedding with `max_norm`) is not handed on to have gradients added:
        # autograd would find it changed.
        parameters=frozenset(i for i in fixed if backward_returns[i] is not None and i not in overwritten),
        effects=tuple(number[node] for node in effects),
        overwritten=overwritten,
        storage_bytes=storages.bytes,
        part_copies=frozenset(number[node] for node in body if PART_COPY in node.meta),
    )
    return Captured(
        step_graph, order, forward_returns, mutated, backward_returns, _device(order), graph_module, fixed
    )


def _number_sequences(graph: fx.Graph) -> None:
    """Autograd counts on from one trace to the next; here its numbers begin anew, so that traces of one step are
    equal."""
    found = sorted({node.meta["seq_nr"] for node in graph.nodes if node.meta.get("seq_nr") is not None})
    place = {number: i for i, number in enumerate(found)}
    for node in graph.nodes:
        if node.meta.get("seq_nr") is not None:
            node.meta["seq_nr"] = place[node.meta["seq_nr"]]


def with_overwritten(captured: Captured, places: Collection[int]) -> Captured:
    """The same graph, some of whose inputs something else overwrites before the backward comes."""
    numbers = [captured.graph.inputs[place] for place in places]
    more = {i: live_bytes(captured.nodes[i]) for i in numbers if i not in captured.graph.parameters}
    graph = replace(captured.graph, overwritten={**more, **captured.graph.overwritten})
    unfused = captured.unfused and with_overwritten(captured.unfused, places)
    return replace(captured, graph=graph, unfused=unfused)


def made_real(traced: torch.Tensor) -> torch.Tensor:
    """Memory for a value as it was traced, with nothing in it."""
    return torch.empty_strided(traced.shape, traced.stride(), dtype=traced.dtype, device=traced.device)


def live_bytes(node: fx.Node) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_of(node)}
    return sum(storages.values())


def why_not(graph_module: fx.GraphModule) -> str | None:
    """Why a graph cannot be planned, if it cannot."""
    for node in graph_module.graph.nodes:
        if node.target is torch.ops.higher_order.with_effects:
            return f"{node.args[1]} has effects besides its value"
        for leaf in tensors_of(node):
            if leaf.layout is not torch.strided:
                return f"it has sparse tensors ({node.target})"
            # Where in its storage a view begins may depend on a number: no size follows from that.
            if any(isinstance(size, torch.SymInt) for size in (*leaf.shape, *leaf.stride())):
                return DATA_DEPENDENT
    if any(node.target is CHECK for node in _reached_by_gradients(graph_module.graph)):
        return "its backward asserts something of tensors"
    return None


def _reached_by_gradients(graph: fx.Graph) -> set[fx.Node]:
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        if is_arriving(node) or any(read in reached for read in node.all_input_nodes):
            reached.add(node)
    return reached


# --- reading the graph ---------------------------------------------------------------------------------------


def _mutated_inputs(output: fx.Node, forward_outputs: int) -> list[int | None]:
    """For each forward output, the number of the input that it overwrites, if it does."""
    described = output.meta.get("desc") or [None] * forward_outputs
    mutated = (getattr(entry, "mutated_input", None) for entry in described[:forward_outputs])
    return [getattr(entry, "idx", None) for entry in mutated]


def _overwritten(
    returns: list[tuple[int, int | None]], effects: list[fx.Node], number: dict[fx.Node, int]
) -> list[int]:
    """Inputs that the step overwrites: with what it returns for them, or by copies inside the graph."""
    copied = [number[node.args[0]] for node in effects if node.target is aten.copy_.default]  # type: ignore[index]
    return [*(i for _, i in returns if i is not None), *copied]


def _backward_nodes(body: list[fx.Node], arriving: list[fx.Node], forward_returns: list[Any]) -> set[fx.Node]:
    """What the forward does not need and the arriving gradients reach, or autograd marked as its own."""
    reached: set[fx.Node] = set(arriving)
    for node in body:
        marked = node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")
        if marked or any(read in reached for read in node.all_input_nodes):
            reached.add(node)
    # Backward nodes that no arriving gradient reaches may feed a forward output: they belong to the forward.
    needed = [node for node in forward_returns if isinstance(node, fx.Node)]
    while needed:
        node = needed.pop()
        if node in reached:
            reached.discard(node)
            needed.extend(node.all_input_nodes)
    return reached - set(arriving)


def _kinds(
    inputs: list[fx.Node], arriving: list[fx.Node], body: list[fx.Node], later: set[fx.Node]
) -> dict[fx.Node, Kind]:
    kinds: dict[fx.Node, Kind] = dict.fromkeys(inputs, "input")
    kinds.update(dict.fromkeys(arriving, "gradient"))
    for node in body:
        kinds[node] = "backward" if node in later else "forward"
    return kinds


class _Storages:
    """Numbers for the storages of the traced (fake) tensors, and their bytes as the allocator counts them."""

    def __init__(self, block: Callable[[int], int]) -> None:
        self.block = block
        self.bytes: dict[int, int] = {}
        self._numbers: dict[int, int] = {}

    def of(self, node: fx.Node) -> list[int]:
        return list(dict.fromkeys(self._number(tensor) for tensor in tensors_of(node)))

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        identity = storage._cdata
        if identity not in self._numbers:
            self._numbers[identity] = len(self._numbers)
            self.bytes[self._numbers[identity]] = self.block(storage.nbytes())
        return self._numbers[identity]


def _op(index: int, node: fx.Node, kind: Kind, number: dict[fx.Node, int], storages: _Storages) -> Operator:
    reads = tuple(number[read] for read in node.all_input_nodes)
    inherited = {storage for read in node.all_input_nodes for storage in storages.of(read)}
    own = storages.of(node)
    makes = tuple((s, storages.bytes[s]) for s in own if s not in inherited)
    if kind == "input" or node.op == "get_attr":
        for storage, _ in makes:  # resident: counted before the step begins
            storages.bytes[storage] = 0
        makes = tuple((s, 0) for s, _ in makes)
    return Operator(
        index=index,
        name=node.name,
        target=_target_name(node),
        kind=kind,
        reads=reads,
        rerun_reads=tuple(number[read] for read in rerun_call(node)[1]),
        makes=makes,
        shares=tuple(s for s in own if s in inherited),
        module=_module_path(node),
        sequence=node.meta.get("seq_nr"),
        random=is_random(node),
        draws_privately=is_random(node) and generator_variant(node) is not None,
        reusable=tuple(number[read] for read in overwritable(node)),
        # What is computed of a number that changes from call to call is computed again: autograd saves tensors only.
        storable=isinstance(node.meta.get("val"), torch.Tensor) or kind == "input",
        key=_key(node),
    )


def rerun_call(node: fx.Node) -> tuple[Any, list[fx.Node], tuple[Any, ...]]:
    """How a node runs a second time: target, nodes read, arguments. BatchNorm must not touch its statistics."""
    if node.target is batch_norm_updating:
        args = (*node.args[:3], *node.args[5:])
        return aten._native_batch_norm_legit.no_stats, [a for a in args if isinstance(a, fx.Node)], args
    return node.target, node.all_input_nodes, node.args


def is_random(node: fx.Node) -> bool:
    """Whether running the node draws random numbers. Attention carries the tag even with dropout 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == "dropout_p":
            given = node.args[i] if i < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return bool(given != 0.0)
    return True


_ROOT = re.compile(r"^[LG]\['\w+'\]")  # the name of the model where it is called is not part of it
_STEP = re.compile(r"\['?([^'\]]+)'?\]")


def _module_path(node: fx.Node) -> str:
    """`transformer.h.3.attn`: where in the user's model the node comes from."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = _ROOT.sub("", str(list(stack.values())[-1][0]))
    return _STEP.sub(r".\1", path.replace("._modules", "")).lstrip(".")


def _key(node: fx.Node) -> str:
    if node.op != "call_function":
        return ""

    def shown(value: Any) -> str:
        if isinstance(value, fx.Node):
            return shown(value.meta.get("val"))
        if isinstance(value, torch.Tensor):
            shows = f"{'*' if value.is_conj() else ''}{'-' if value.is_neg() else ''}"
            return f"{shows}{str(value.dtype)[6:]}{list(value.shape)}{list(value.stride())}"
        if isinstance(value, list | tuple):
            return "[" + ",".join(map(shown, value)) + "]"
        return str(value)

    named = "".join(f",{k}={shown(v)}" for k, v in sorted(node.kwargs.items()))
    return f"{_target_name(node)}({','.join(map(shown, node.args))}{named})"


def _target_name(node: fx.Node) -> str:
    return str(node.target) if hasattr(node.target, "_schema") else getattr(node.target, "__name__", str(node.target))


def _device(nodes: list[fx.Node]) -> torch.device:
    """The device most of the step runs on."""
    for node in reversed(nodes):
        for tensor in tensors_of(node):
            if tensor.device.type not in ("cpu", "meta"):
                return tensor.device
    return torch.device("cpu")


def is_arriving(node: fx.Node) -> bool:
    """Whether it is the gradient of a result."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem
