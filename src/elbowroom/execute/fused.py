"""Runs a program with fused kernels: writes it as two fx graphs and has Inductor compile them.

Gradients of parameters become `.grad`. There are up to three backwards, each compiled when first called. One returns
gradients, for `.grad` where there is none, or for autograd to take (return): they come one by one, and what is free
until then serves others. The other two get tensors as inputs and overwrite them, so that kernels write where
gradients are, and nothing is held until the end: those of parameters that have some (add), or ones in a place of
their own (write).

Where the program moves values, what moves them (`to_host/lease.py`) is the last of what forward and backward take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config as inductor_config
from torch._inductor.choices import InductorChoices
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.virtualized import V

from elbowroom.capture.joint_graph import Captured
from elbowroom.capture.rewrites.rewrite import PART_COPY
from elbowroom.execute.accumulation import engine_accumulates, is_autograds
from elbowroom.execute.fused_graphs import Mode, backward_graph, forward_graph
from elbowroom.execute.tickets import ALONE, holders
from elbowroom.execute.to_host.lease import Lease
from elbowroom.execute.to_host.traced_moves import in_force
from elbowroom.execute.variants import Variants, has_numbers_that_change
from elbowroom.step.program import Program

aten = torch.ops.aten

# Inductor may look for another order with a lower peak: ours is planned. And it holds dead buffers until a value of
# the same size comes along: on a plan with a low peak that cost 30 %, and the allocator reuses memory just as well.
# The partitioner that led here is no part of what is compiled (nor of the key under which Inductor caches it).
# Checks of every input's shape at every call are left out: they are the same shapes each time.
SETTINGS: dict[str, Any] = {
    "reorder_for_peak_memory": False,
    "allow_buffer_reuse": False,
    "size_asserts": False,
    "alignment_asserts": False,
    "custom_partitioner_fn": None,
}

_NONE: frozenset[int] = frozenset()

# Kernels between two that may still be fused: enough for those of one layer, which run close together, and fewer than
# there are between two times at which a value is computed again. Inductor's own limit is 64.
_FAR = 16


class _Nearby(InductorChoices):
    """Fuses only what the plan runs close together.

    Copies of one value, computed again at different times, read the same inputs: fused into one kernel, all of them
    would be there from the first time on. And a part that is copied so that the rest can go would be copied where it
    is read. Inductor itself draws the line at 64 kernels.
    """

    @staticmethod
    def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        distance = max(abs(node1.min_order - node2.max_order), abs(node2.min_order - node1.max_order))
        return distance <= _FAR and InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)


class Fused:
    """A program compiled: the forward at once, each of its backwards when it is first called.

    `channels_last` is the layout of its images. Inductor decides on that for each graph by itself; a backward that
    recomputes a few convolutions would not take the forward's layout, and convert between the two all the time. Nor
    does it take it for gradients: they come in the layout that was traced, unless the graph says otherwise.
    """

    def __init__(self, captured: Captured, program: Program, channels_last: bool) -> None:
        self.captured = captured
        self.program = program
        self.channels_last = channels_last
        self._clock = torch.zeros(1)
        self.fixed = captured.fixed_inputs | set(captured.graph.overwritten)  # inputs that stay where they are
        self.parameters = tuple(dict.fromkeys(i for each in program.backward_runs for i in each.accumulates))
        # Parameters go to the backward for their `.grad`, whether or not it reads their values.
        self.handed = tuple(dict.fromkeys((*program.saved, *self.parameters)))
        self._among_handed = [self.handed.index(i) for i in self.parameters]
        self._among_inputs = [captured.graph.inputs.index(i) for i in self.parameters]
        # Inputs among these are handed on as they came: a compiled graph might return a copy in another layout.
        places = {i: n for n, i in enumerate(captured.graph.inputs) if i not in captured.graph.overwritten}
        computed = [i for i in self.handed if i not in places]
        self._given = [places[i] for i in self.handed if i in places]
        self._order = _merging([i in places for i in self.handed])
        graph = forward_graph(captured, program, computed, channels_last)
        inputs = self._with_clock([captured.nodes[i].meta["val"] for i in captured.graph.inputs])
        visible = range(len(captured.forward_outputs))
        aligned = [place for place, i in enumerate(captured.graph.inputs) if i in captured.graph.parameters]
        self._forward, strides = self._compile(graph, inputs, visible, aligned, is_backward=False)
        self._strides = dict(zip(computed, strides[len(captured.forward_outputs) :], strict=True))
        self._backwards: dict[tuple[Mode, frozenset[int]], Callable[[list[Any]], list[Any]]] = {}
        self.has_run: set[Mode] = set()  # kernels are loaded and tuned when they first run
        self._forward_source = str(graph.python_code("self").src)

    def source(self, makes: Mode) -> str:
        """Both graphs as Python, with the backward that makes gradients where there are none."""
        backward, _ = backward_graph(self.captured, self.program, self.parameters, makes, self.channels_last)
        return f"{self._forward_source}\n\n{backward.python_code('self').src}"

    def forward(self, arguments: list[Any]) -> list[Any]:
        given = [arguments[place] for place in self._given]
        outputs = self._call(self._forward, arguments, self._lease_of(arguments))
        count = len(self.captured.forward_outputs)
        given += outputs[count:]
        return outputs[:count] + [given[place] for place in self._order]

    def backward(self, arguments: list[Any], makes: Mode, without: frozenset[int] = _NONE) -> list[Any]:
        """Adds to the parameters' gradients, or leaves that to autograd where it wants to do it.

        `makes` is how gradients are made where there are none. No gradient reaches inputs in `without`.
        """
        parameters = [arguments[place] for place in self._among_handed]
        if without:
            parameters = [p for i, p in zip(self.parameters, parameters, strict=True) if i not in without]
        outputs = self._backward(arguments, parameters, makes, without)
        for i in without:
            outputs[i] = None
        return outputs

    def _backward(
        self, arguments: list[Any], parameters: Sequence[torch.Tensor], makes: Mode, without: frozenset[int]
    ) -> list[Any]:
        if not engine_accumulates() or any(map(is_autograds, parameters)):
            return self._run("return", arguments, [])
        mode = mode_for(parameters, makes)
        if mode == "return":
            outputs = self._run(mode, arguments, [])
            gradients = self.take_gradients(outputs, parameters, without)
        else:
            gradients = [_gradient(parameter, mode) for parameter in parameters]
            outputs = self._run(mode, arguments, gradients, without)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return outputs

    def take_gradients(
        self, outputs: list[Any], parameters: Sequence[torch.Tensor], without: frozenset[int] = _NONE
    ) -> list[torch.Tensor]:
        """The parameters' gradients out of what a backward has returned, each fit to be a `.grad`."""
        gradients: list[torch.Tensor] = []
        taken: set[int] = set()  # parameters that are added to each other have the same gradient
        reached = (i for i in self.parameters if i not in without)
        for i, parameter in zip(reached, parameters, strict=True):
            gradient, outputs[i] = outputs[i], None
            if gradient.data_ptr() in taken or not _may_keep(gradient, parameter):
                gradient = torch.empty_like(parameter).copy_(gradient)
            taken.add(gradient.data_ptr())
            gradients.append(gradient)
        return gradients

    def gradient_buffers(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Memory for the gradients of a trial."""
        return [torch.empty_like(parameter) for parameter in self.parameters_among(inputs)]

    def parameters_among(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Those that get gradients, of what a forward is called with."""
        return [inputs[place] for place in self._among_inputs]

    def run_backward(self, arguments: list[Any], buffers: list[torch.Tensor], mode: Mode) -> list[Any]:
        """A backward that takes its gradients to given buffers, or returns them, whatever the parameters have."""
        return self._run(mode, arguments, buffers)

    def _run(
        self, mode: Mode, arguments: list[Any], buffers: list[torch.Tensor], without: frozenset[int] = _NONE
    ) -> list[Any]:
        if (mode, without) not in self._backwards:
            self._backwards[mode, without] = self._compile_backward(mode, without)
        lease = self._lease_of(arguments)
        inputs = arguments[: len(self.program.saved)] + buffers + arguments[len(self.handed) :]
        arguments.clear()  # from here on the compiled program alone holds what was saved
        outputs = self._call(self._backwards[mode, without], inputs, lease)
        if not without:
            self.has_run.add(mode)
        return outputs

    def _lease_of(self, arguments: list[Any]) -> Lease | None:
        """What moves values is the last of what a program is called with, if it moves any."""
        return arguments.pop() if self.program.moves else None

    def _call(self, compiled: Callable[[list[Any]], Any], inputs: list[Any], lease: Lease | None) -> list[Any]:
        """The compiled graph empties the list of its inputs, and alone holds them from then on."""
        if lease is None:
            return list(compiled(inputs))
        inputs.append(self._clock)
        with in_force(lease):
            return list(compiled(inputs))

    def _with_clock(self, inputs: list[Any]) -> list[Any]:
        """Traced inputs, and what moves write to."""
        if not self.program.moves:
            return inputs
        mode = detect_fake_mode(inputs)
        assert mode is not None
        return [*inputs, mode.from_tensor(self._clock)]

    def _compile_backward(self, mode: Mode, without: frozenset[int]) -> Callable[[list[Any]], list[Any]]:
        reached = [i for i in self.parameters if i not in without]
        graph, inputs = backward_graph(self.captured, self.program, reached, mode, self.channels_last, without)
        for place, i in enumerate(self.program.saved):
            inputs[place] = _laid_out(inputs[place], self._strides.get(i))
        aligned = [place for place, i in enumerate(self.program.saved) if i in self._strides]
        visible = self.parameters if mode == "return" else ()
        compiled, _ = self._compile(graph, self._with_clock(inputs), visible, aligned, is_backward=True)
        return compiled

    def _compile(
        self,
        graph: fx.Graph,
        inputs: Sequence[Any],
        visible: Sequence[int],
        aligned: Sequence[int],
        *,
        is_backward: bool,
    ) -> tuple[Callable[[list[Any]], Any], list[Any]]:
        """A compiled graph, and the strides of its outputs. Outputs in `visible` keep those they were traced with.

        Inputs in `aligned` begin where an allocation does. Of others that is checked at every call: a batch may be a
        slice, and kernels read sixteen bytes at once.
        """
        compile_once = partial(self._compile_once, visible=visible, aligned=aligned, is_backward=is_backward)
        if not has_numbers_that_change(inputs):
            return compile_once(graph, list(inputs))
        variants = Variants(compile_once, graph, inputs, self.captured.module)
        return variants, variants.strides

    def _compile_once(
        self,
        graph: fx.Graph,
        inputs: list[Any],
        *,
        visible: Sequence[int],
        aligned: Sequence[int],
        is_backward: bool,
    ) -> tuple[Callable[[list[Any]], Any], list[Any]]:
        module = fx.GraphModule(self.captured.module, graph)
        returned = graph.output_node().args[0]
        nodes = [i for i in visible if isinstance(returned[i], fx.Node)]  # type: ignore[index]
        graph.output_node().meta["user_visible_output_idxs"] = nodes
        keeps_places = self.program.reruns or any(PART_COPY in node.meta for node in graph.nodes)
        convolves = graph.find_nodes(op="call_function", target=aten.convolution.default)
        with (
            _settings(inputs),
            _nearby() if keeps_places else nullcontext(),
            TracingContext.report_output_strides() as strides,
        ):
            compiled = compile_fx_inner(
                module,
                inputs,
                static_input_idxs=aligned,
                is_backward=is_backward,
                layout_opt=self.channels_last if convolves else None,
            )
        return compiled, list(strides or [None] * len(returned))  # type: ignore[arg-type]


def mode_for(parameters: Sequence[torch.Tensor], makes: Mode) -> Mode:
    """How to hand over the gradients of parameters, most of which have none as a rule."""
    return "add" if any(parameter.grad is not None for parameter in parameters) else makes


@contextmanager
def _nearby() -> Iterator[None]:
    """Inductor's caches do not know what chooses, and must not take a graph that was compiled otherwise."""
    tag = f"{torch.compiler.config.cache_key_tag} nearby {_FAR}"
    patched = torch.compiler.config.patch(cache_key_tag=tag)  # type: ignore[attr-defined]
    with V.set_choices_handler(_Nearby()), patched:
        yield


def _merging(first: Sequence[bool]) -> list[int]:
    """For values in two lists laid end to end: where each is, given which of them are in the first list."""
    firsts = sum(first)
    return [sum(first[:n]) if is_first else firsts + n - sum(first[:n]) for n, is_first in enumerate(first)]


def _may_keep(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether it can be `.grad`: laid out like its parameter, alone in its storage. Others hold one that arrived."""
    storage = gradient.untyped_storage()
    alone = storage.nbytes() == gradient.numel() * gradient.element_size() and holders(storage) <= ALONE
    return alone and gradient.stride() == parameter.stride()


def _gradient(parameter: torch.Tensor, mode: Mode) -> torch.Tensor:
    if parameter.grad is not None:
        return parameter.grad
    return torch.empty_like(parameter) if mode == "write" else torch.zeros_like(parameter)


def _laid_out(value: Any, stride: Sequence[int] | None) -> Any:
    """A traced value as the compiled forward will really return it."""
    if stride is None or not isinstance(value, torch.Tensor) or tuple(value.stride()) == tuple(stride):
        return value
    mode = detect_fake_mode([value])
    assert mode is not None
    with mode:
        return value.as_strided(value.size(), stride)


# --- compiling -----------------------------------------------------------------------------------------------


@contextmanager
def _settings(inputs: Sequence[Any]) -> Iterator[None]:
    fake_mode = detect_fake_mode(list(inputs))
    with (
        tracing(TracingContext(fake_mode)),
        torch.no_grad(),
        torch._C._DisableAutocast(),
        inductor_config.patch(SETTINGS),
    ):
        yield
