"""Rewrites of a traced graph before it is planned. None changes what is computed; each saves memory or time.

Tracing makes everything functional and leaves marks of its own: detached aliases, copies that nobody overwrites,
values computed twice, BatchNorm returning new statistics instead of updating its buffers, causal masks written out
because a model cannot look at them while it is traced. And autograd shows parts of a gradient where copies would let
the rest go, as some losses keep the memory of all their terms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from elbowroom.capture.rewrites.interpolation import multiply_interpolations
from elbowroom.capture.rewrites.known_values import constant_value
from elbowroom.capture.rewrites.padding import align_products
from elbowroom.capture.traced_values import evaluated, is_view, tensor_bytes, tensors_of

aten = torch.ops.aten
CHECK = aten._assert_async.msg  # `assert` of a tensor


def rewrite(graph: fx.Graph) -> list[fx.Node]:
    """Simplify a joint graph in place. Returns the nodes that must run for their effect on an input, and checks."""
    _simplify(graph, _drop_aliases, _compute_once, _keep_parts_apart, _let_terms_go)
    _drop_unused_statistics(graph)
    _use_causal_flags(graph)
    effects = [*_update_in_place(graph), *_checks(graph)]
    _drop_unused(graph, effects)
    return effects


def rewrite_for_fusion(graph: fx.Graph) -> list[fx.Node]:
    """The same for a graph whose kernels a compiler will write: it needs less help."""
    _simplify(graph, _compute_once, multiply_interpolations, align_products, partial(_keep_parts_apart, fused=True))
    _use_causal_flags(graph)
    effects = [*graph.find_nodes(op="call_function", target=aten.copy_.default), *_checks(graph)]
    _drop_unused(graph, effects)
    return effects


def _checks(graph: fx.Graph) -> list[fx.Node]:
    """They compute nothing, but may raise an error."""
    return list(graph.find_nodes(op="call_function", target=CHECK))


def _simplify(graph: fx.Graph, *steps: Callable[[fx.Graph], None]) -> None:
    """One after the other, each with views that show what they read."""
    for step in steps:
        step(graph)
        _look_again(graph)


def _drop_unused(graph: fx.Graph, effects: Collection[fx.Node]) -> None:
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op == "call_function" and node not in effects:
            graph.erase_node(node)


def _look_again(graph: fx.Graph) -> None:
    """Views of what was replaced show the memory of what they read now. Traced, they still show the other's: nobody
    would know that it must not be written over."""
    for node in graph.nodes:
        if is_view(node) and not _storages(node) <= {s for read in node.all_input_nodes for s in _storages(read)}:
            read = [tensor for each in node.all_input_nodes for tensor in tensors_of(each)]
            mode = detect_fake_mode(read) or nullcontext()
            node.meta["val"] = evaluated(node.target, node.args, node.kwargs, mode)


def _storages(node: fx.Node) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors_of(node)}


def _drop_aliases(graph: fx.Graph) -> None:
    """Detaches, and clones that keep the layout: in a functional graph the original does as well.

    A clone that computes what a conjugate or a negative merely shows is kept: most kernels would make that copy
    themselves, where no plan sees it, and some refuse what is merely shown.
    """
    returned = set(graph.output_node().all_input_nodes)
    for node in list(graph.nodes):
        alias = node.target is aten.detach.default
        if node.target is aten.clone.default and node not in returned:
            source, copy = node.args[0].meta["val"], node.meta["val"]
            whole = source.untyped_storage().nbytes() == copy.untyped_storage().nbytes()  # or it would keep the rest
            merely_shown = source.is_conj() != copy.is_conj() or source.is_neg() != copy.is_neg()
            same = whole and source.stride() == copy.stride() and not merely_shown
            alias = same and not _reaches(returned, node)
        if alias:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _reaches(returned: set[fx.Node], node: fx.Node) -> bool:
    """Whether the node's value or a view of it is returned: then the caller gets a copy of its own, as written."""
    if node in returned:
        return True
    return _storage(node) in map(_storage, returned)


def _compute_once(graph: fx.Graph) -> None:
    """What is computed twice from the same values. Autocast casts what three layers read for each of them.

    Not across forward and backward: whether the backward computes a value again is for the plan to say.
    """
    returned = set(graph.output_node().all_input_nodes)
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not _is_pure(node):
            continue
        leaves, layout = tree_flatten((node.args, node.kwargs))
        when = node.meta.get("partitioner_tag")
        first = known.setdefault((node.target, when, repr(layout), *((type(leaf), leaf) for leaf in leaves)), node)
        if first is not node and not _reaches(returned, node) and not _reaches(returned, first):
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _is_pure(node: fx.Node) -> bool:
    """Whether an operator of PyTorch's own returns a tensor that follows from those it reads.

    What reads none (zeros, ranges) costs nothing to make when it is wanted.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    if not node.all_input_nodes:
        return False
    random = torch.Tag.nondeterministic_seeded in target.tags
    return not random and not target._schema.is_mutable and isinstance(node.meta.get("val"), torch.Tensor)


def _drop_unused_statistics(graph: fx.Graph) -> None:
    """In training, BatchNorm's backward ignores the running statistics it is handed."""
    for node in graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if node.args[7]:
            node.args = (*node.args[:3], None, None, *node.args[5:])


# --- updates in place ----------------------------------------------------------------------------------------


def batch_norm_updating(*args: Any) -> tuple[torch.Tensor, ...]:
    """BatchNorm in training as eager runs it: the running statistics are updated where they are."""
    return aten._native_batch_norm_legit.default(*args)  # type: ignore[no-any-return]


def _update_in_place(graph: fx.Graph) -> list[fx.Node]:
    """Let BatchNorm and counters change their buffers themselves instead of returning new ones to copy."""
    output = graph.output_node()
    effects = []
    for node in graph.find_nodes(op="call_function", target=aten._native_batch_norm_legit_functional.default):
        parts = {user.args[1]: user for user in node.users}
        updated = [parts[i] for i in (3, 4) if i in parts]
        buffers = [buffer for buffer in node.args[3:5] if isinstance(buffer, fx.Node)]
        if not node.args[5] or not all(_only_updates(part, output) for part in (*updated, *buffers)):
            continue
        for part in updated:
            part.replace_all_uses_with(node.args[part.args[1]])
            graph.erase_node(part)
        node.target = batch_norm_updating
        node.meta["val"] = tuple(node.meta["val"][:3])
        effects.append(node)
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        counter = node.args[0]
        counts = (
            isinstance(counter, fx.Node) and counter.op == "placeholder" and not isinstance(node.args[1], fx.Node)
        )
        if counts and set(node.users) == {output} and set(counter.users) == {node} and _overwrites(output, node):
            node.replace_all_uses_with(counter)
            node.target = aten.add_.Tensor
            effects.append(node)
    return effects


def _only_updates(part: fx.Node, output: fx.Node) -> bool:
    """Whether a statistic goes nowhere but into BatchNorm and back to its buffer: nobody else sees it change."""
    again = (aten._native_batch_norm_legit_functional.default, batch_norm_updating)
    return all(
        user is output or (user.target in again and part in user.args[3:5] and part not in user.args[:3])
        for user in part.users
    )


def _overwrites(output: fx.Node, node: fx.Node) -> bool:
    described = output.meta.get("desc") or []
    returned = list(output.args[0])  # type: ignore[arg-type]
    return all(
        hasattr(what, "mutated_input") for value, what in zip(returned, described, strict=False) if value is node
    ) and bool(described)


# --- parts that outlive the rest -----------------------------------------------------------------------------

PART_COPY = "part_copy"  # in the meta of such a copy
_LARGE, _MOST = 2**20, 0.75  # bytes of the whole, and its share that parts may be
_LONG = {False: 50, True: 100}  # operators by which they outlive the rest; if decomposed to be fused, there are more


def _keep_parts_apart(graph: fx.Graph, *, fused: bool = False) -> None:
    """Copies of slices of gradients that would keep a larger storage alive for long.

    The gradient of a concatenation is one tensor, and its parts are slices. In a U-Net one of them is read at once,
    and the other waits for the whole network below: half of the memory that it keeps is dead.
    """
    place = {node: n for n, node in enumerate(graph.nodes)}
    parts: list[fx.Node] = []
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.meta.get("partitioner_tag") != "is_backward" or not isinstance(value, torch.Tensor):
            continue
        if value.untyped_storage().nbytes() >= _LARGE:
            parts += _outliving(node, place, _LONG[fused])
    for part in parts:
        if not fused or _copy_of(part).stride() != part.meta["val"].stride():  # the compiler would leave it out
            _copy_after(graph, part).meta[PART_COPY] = True


def _outliving(node: fx.Node, place: dict[fx.Node, int], long: int) -> list[fx.Node]:
    """Slices of a value that are read long after all that else is read of it, if they are a small part."""
    ends = {user: _end(user, place) for user in node.users}
    for end in sorted(set(ends.values()))[:-1]:
        late = [user for user in node.users if ends[user] > end]
        if all(user.target is aten.slice.Tensor for user in late):
            is_part = sum(map(tensor_bytes, late)) <= _MOST * tensor_bytes(node)
            if is_part and min(map(ends.__getitem__, late)) - end >= long:
                return late
    return []


def _end(node: fx.Node, place: dict[fx.Node, int]) -> int:
    """Where a value is read for the last time: a view of one is, where the view's own value is."""
    storage = _storage(node)
    is_view = storage is not None and any(_storage(read) == storage for read in node.args[:1])
    return max((_end(user, place) for user in node.users), default=place[node]) if is_view else place[node]


def _storage(node: Any) -> int | None:
    """Of a node's value, if it is a tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _copy_of(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    with value.fake_mode:
        copied: torch.Tensor = value.clone()
    return copied


def _copy_after(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Let everybody read a copy."""
    with graph.inserting_after(node):
        copy = graph.call_function(aten.clone.default, (node,))
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    copy.meta = {**node.meta, "val": _copy_of(node)}
    return copy


# --- losses --------------------------------------------------------------------------------------------------

_SUMS = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
)


def _let_terms_go(graph: fx.Graph) -> None:
    """Copies of losses that are added up where their terms were: the sum's storage is as large as all of them."""
    for target in _SUMS:
        for node in graph.find_nodes(op="call_function", target=target):
            if tensor_bytes(node) < tensor_bytes(node.args[0]):
                _copy_after(graph, node)


# --- causal masks --------------------------------------------------------------------------------------------

_ATTENTION = (
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
)


def _use_causal_flags(graph: fx.Graph) -> None:
    """Attention under a mask that is a constant lower triangle: say so, as the model does when run eagerly.

    Kernels skip half the work then, and no mask is kept. Only on CUDA, where masks choose slower kernels.
    """
    causal: dict[fx.Node, bool] = {}
    for target in _ATTENTION:
        for node in graph.find_nodes(op="call_function", target=target):
            mask = _argument(node, "attn_bias")
            if (
                not isinstance(mask, fx.Node)
                or mask.meta["val"].device.type != "cuda"
                or _argument(node, "is_causal")
            ):
                continue
            if mask not in causal:
                causal[mask] = _is_causal(mask)
            if causal[mask]:
                _set_argument(node, "attn_bias", None)
                _set_argument(node, "is_causal", True)


def _is_causal(mask: fx.Node) -> bool:
    """Whether a mask depends on nothing but shapes, and lets every query see itself and what comes before."""
    value = constant_value(mask)
    if value is None:
        return False
    with _disable_current_modes(), torch.no_grad():
        value = value[tuple(slice(None if stride else 1) for stride in value.stride()[:-2])]  # if expanded, once
        allowed = value if value.dtype is torch.bool else value == 0
        hidden = ~allowed if value.dtype is torch.bool else value < -1e4
        lower = torch.ones(value.shape[-2:], dtype=torch.bool, device=value.device).tril()
        return bool(value.shape[-1] == value.shape[-2] and (allowed == lower).all() and (hidden == ~lower).all())


def _position(node: fx.Node, name: str) -> int:
    return [argument.name for argument in node.target._schema.arguments].index(name)  # type: ignore[union-attr]


def _argument(node: fx.Node, name: str) -> Any:
    at = _position(node, name)
    if at < len(node.args):
        return node.args[at]
    return node.kwargs.get(name, node.target._schema.arguments[at].default_value)  # type: ignore[union-attr]


def _set_argument(node: fx.Node, name: str, value: Any) -> None:
    at = _position(node, name)
    if at < len(node.args):
        node.args = (*node.args[:at], value, *node.args[at + 1 :])
    else:
        node.kwargs = {**node.kwargs, name: value}
