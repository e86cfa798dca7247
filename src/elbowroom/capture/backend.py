"""The `torch.compile` backend: lets AOT autograd trace forward and backward together, and takes over from there.

AOT autograd keeps its part: it handles mutated inputs, aliased outputs and tied parameters, and wraps the two
programs in one autograd function. It is handed stand-in graphs of the right shape; what runs is whatever the caller
makes of the captured graph: an object with a forward and a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import default_partition

from elbowroom.capture.absent_gradients import absent_gradients_shown
from elbowroom.capture.effects import errors_are_effects
from elbowroom.capture.fusion import contract
from elbowroom.capture.joint_graph import Captured, capture_joint, why_not
from elbowroom.capture.python_floats import compute_floats_with_tensors, unused_floats_left_alone
from elbowroom.capture.rewrites.rewrite import rewrite, rewrite_for_fusion
from elbowroom.step.allocator import allocator_block


class Runnable(Protocol):
    """What runs a captured graph. Both functions take a list that they empty, and return a list.

    The backward finds None in place of gradients that do not arrive, because nothing uses the results.
    """

    def forward(self, arguments: list[Any]) -> list[Any]: ...

    def backward(self, arguments: list[Any]) -> list[Any]: ...


R = TypeVar("R", bound=Runnable)
OnRun: TypeAlias = Callable[[list[Any]], None]


def make_backend(
    make_runnable: Callable[[Captured], R],
    on_capture: Callable[[R], None],
    on_refusal: Callable[[str], None],
    *,
    on_inference: Callable[[], OnRun | None] = lambda: None,
    fused: bool = False,
) -> Callable[..., Any]:
    """A backend that makes something runnable of every training graph it takes, and then calls `on_capture` with it,
    before the graph first runs.

    A graph that it does not take runs as it is, unless `on_refusal`, which gets the reason, raises an error; so does
    a graph without any gradient, of which `on_inference` is told. What that answers, if anything, gets the outputs of
    the graph whenever it runs.

    `fused`: its programs will be compiled by Inductor, so the graph is traced as Inductor wants it.
    """

    @errors_are_effects()
    def compile_graph(graph_module: fx.GraphModule, example_inputs: Any) -> Any:
        runnables: list[R] = []
        compute_floats_with_tensors(graph_module)

        def partition(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **rest: Any) -> Any:
            if reason := why_not(joint):
                on_refusal(reason)
                return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **rest)
            static = set(rest.get("static_lifetime_input_indices") or ())
            rewriting = rewrite_for_fusion if fused else rewrite
            captured = capture_joint(joint, num_fwd_outputs, static, allocator_block(_on_cuda(joint)), rewriting)
            runnable = make_runnable(contract(captured) if fused else captured)
            runnables.append(runnable)
            on_capture(runnable)
            return _stand_ins(captured)

        if fused:
            with unused_floats_left_alone(graph_module):
                compiled = _trace_with_inductor(graph_module, example_inputs, partition, runnables, on_inference)
            return absent_gradients_shown(compiled) if runnables else compiled

        def forward_compiler(module: fx.GraphModule, _: Any) -> Any:
            return _boxed(runnables[-1].forward) if runnables else _boxed_module(module)

        def backward_compiler(module: fx.GraphModule, _: Any) -> Any:
            return _boxed(runnables[-1].backward) if runnables else _boxed_module(module)

        def inference_compiler(module: fx.GraphModule, _: Any) -> Any:
            return _told(_boxed_module(module), on_inference())

        compiler = aot_autograd(
            fw_compiler=forward_compiler,
            bw_compiler=backward_compiler,
            partition_fn=partition,
            inference_compiler=inference_compiler,
        )
        with kept_whole(), unused_floats_left_alone(graph_module):
            compiled = compiler(graph_module, example_inputs)
        return absent_gradients_shown(compiled) if runnables else compiled

    return compile_graph


# Interpolation, and two losses. They have kernels and derivatives of their own; tracing would write them out.
_KEPT_WHOLE = (
    *(f"{kind}{rank}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for rank in (1, 2, 3)),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"),
    *("multi_margin_loss", "multilabel_margin_loss_forward"),
)


@contextmanager
def kept_whole() -> Iterator[None]:
    """Trace operators that eager runs whole as they are. Interpolation written out in index operators gives other
    bits, and takes several times as long: its gradient is one addition of every pixel to every neighbour."""
    packets = [getattr(torch.ops.aten, name) for name in _KEPT_WHOLE if hasattr(torch.ops.aten, name)]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    saved = [dict(overload.py_kernels) for overload in overloads]
    keys = torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd
    try:
        for overload in overloads:
            for key in keys:
                overload.py_kernels.pop(key, None)
            overload._dispatch_cache.clear()
        yield
    finally:
        for overload, kernels in zip(overloads, saved, strict=True):
            overload.py_kernels.update(kernels)
            overload._dispatch_cache.clear()


def _trace_with_inductor(
    graph_module: fx.GraphModule,
    example_inputs: Any,
    partition: Callable[..., Any],
    runnables: Sequence[Runnable],
    on_inference: Callable[[], OnRun | None],
) -> Any:
    """Inductor's own way to the joint graph: its decompositions and passes, then our partition by its hook.

    What it would compile then are stand-ins; programs are compiled when they are installed.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **rest: Any) -> Any:
            rest.pop("compiler", None)
            return partition(gm, joint_inputs, **rest)

        def uuid(self) -> None:
            return None

    def inner_compile(module: fx.GraphModule, inputs: Any, **rest: Any) -> Any:
        if rest.get("is_inference"):
            on_run = on_inference()
            return _told(compile_fx_inner(module, inputs, **rest), on_run)
        if not runnables:
            return compile_fx_inner(module, inputs, **rest)
        return _boxed(runnables[-1].backward if rest.get("is_backward") else runnables[-1].forward)

    with functorch_config.patch(enable_autograd_cache=False):
        return compile_fx(
            graph_module,
            example_inputs,
            inner_compile=inner_compile,
            config_patches={
                "custom_partitioner_fn": Partitioner(),
                "shape_padding": False,
            },  # see rewrites/padding.py
        )


def _on_cuda(joint: fx.GraphModule) -> bool:
    values = (node.meta.get("val") for node in joint.graph.nodes)
    return any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in values)


def _stand_ins(captured: Captured) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Graphs that look to AOT autograd like the programs: their outputs' metadata, and which inputs get gradients.

    The forward seems to save the inputs that have gradients, and the backward to return them. Inputs are nothing that
    a backward may overwrite, so AOT autograd lets every backward run twice (`retain_graph`).
    """
    step_graph, nodes = captured.graph, captured.nodes
    graph, copies = fx.Graph(), {}
    for node in (nodes[i] for i in step_graph.inputs):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in (nodes[i] for i in step_graph.forward):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    differentiated = [nodes[i] for i, gradient in enumerate(captured.backward_outputs) if gradient is not None]
    returned = list(captured.module.graph.output_node().args[0])  # type: ignore[arg-type]
    outputs = [copies.get(node, node) for node in returned[: len(captured.forward_outputs)]]
    output = graph.output((*outputs, *(copies[node] for node in differentiated)))
    described = captured.module.graph.output_node().meta.get("desc")
    if described is not None:
        from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

        saved = [SavedForBackwardsAOTOutput(i) for i in range(len(differentiated))]
        output.meta["desc"] = [*described[: len(outputs)], *saved]
    forward = fx.GraphModule(captured.module, graph)

    graph = fx.Graph()
    places = {}
    for node in (*differentiated, *(nodes[i] for i in step_graph.arriving)):
        places[node] = graph.placeholder(node.name)
        places[node].meta = dict(node.meta)
    gradients = enumerate(captured.backward_outputs)
    output = graph.output(tuple(places[nodes[i]] if gradient is not None else None for i, gradient in gradients))
    if described is not None:
        output.meta["desc"] = described[len(outputs) :]
    return forward, fx.GraphModule(captured.module, graph)


def _boxed(function: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """Marks a function as taking its arguments in a list that it may empty: values can be freed early."""

    def run(arguments: list[Any]) -> list[Any]:
        return function(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _boxed_module(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    return _boxed(lambda arguments: module.forward(*arguments))


def _told(compiled: Callable[[list[Any]], Any], on_run: OnRun | None) -> Callable[[list[Any]], Any]:
    """The same, and somebody gets its outputs whenever it has run."""
    if on_run is None:
        return compiled

    def run(arguments: list[Any]) -> list[Any]:
        outputs: list[Any] = compiled(arguments)
        on_run(outputs)
        return outputs

    return _boxed(run)
