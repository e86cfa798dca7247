"""A fused program recorded as two CUDA graphs, forward and backward: the host starts each with a single call.

Where kernels are short, a step takes as long as the host needs to launch them. A recording replays them without it.
Its memory is one pool in which every value has a fixed address: what the program frees early is used again by what it
computes later, just as when it was launched, so the pool is as large as the program's peak. It belongs to the
recording between steps, too, and is shown as allocated to whoever asks PyTorch.

Parameters and buffers are read where they are. A batch is copied into the pool and results are copied out of it.
Gradients are written to tensors that are handed out as `.grad` again and again. Or they are made in the pool, in what
activations leave free, and handed out as they lie there: the next forward needs that memory, and whoever replays it
sees to it that nobody holds them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from elbowroom.capture.joint_graph import made_real
from elbowroom.execute.fused import Fused
from elbowroom.execute.fused_graphs import Mode
from elbowroom.execute.to_host.lease import Lease
from elbowroom.measure.expandable_segments import expandable_segments
from elbowroom.step.allocator import SMALL

LOG = logging.getLogger("elbowroom")


class Recording:
    """The two graphs, and where in the pool they expect and leave values; `gradients` lie in it, or were given.

    Values that move lie in the part of the host's memory that `lease` is for. It belongs to the recording as the
    pool does: the graphs copy there and from there whenever they are replayed.
    """

    def __init__(
        self,
        fused: Fused,
        arguments: Sequence[Any],
        gradients: list[torch.Tensor],
        mode: Mode,
        lease: Lease | None = None,
    ) -> None:
        """Records a program that has run before in this mode: nothing may be compiled or tuned meanwhile."""
        self.fused = fused
        self.mode = mode
        self.lease = lease
        self._moving = [] if lease is None else [lease]  # as the program takes it: after everything else
        self.gradients = gradients
        graph = fused.captured.graph
        self._fixed = [place for place, i in enumerate(graph.inputs) if i in fused.fixed]
        self._copied = [place for place, i in enumerate(graph.inputs) if i not in fused.fixed]
        self._addresses = [arguments[place].data_ptr() for place in self._fixed]
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self._pool = torch.cuda.graph_pool_handle()
        device = fused.captured.device
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.no_grad(), expandable_segments():
            # In many pieces, recording ResNet-50 took 3,816 MiB where in one it took 2,414.
            with _workspaces_inside():
                self._record(list(arguments))
            self._held = self._hold()

    @property
    def bytes(self) -> int:
        """What it takes while it exists: the pool, and copies of what enters and leaves it."""
        outside = [value for value in (*self._results, *self._arriving) if value is not None]
        return _pool_bytes(self._pool) + sum(value.untyped_storage().nbytes() for value in outside)

    def reads(self, arguments: Sequence[Any]) -> bool:
        """Whether parameters and buffers are still where they were."""
        return self._addresses == [arguments[place].data_ptr() for place in self._fixed]

    def forward(self, arguments: Sequence[Any]) -> list[Any]:
        for place, value in zip(self._copied, self._batch, strict=True):
            value.copy_(arguments[place])
        self._forward.replay()
        return [None if value is None else value.clone() for value in self._results]

    def backward(self, arriving: Sequence[torch.Tensor]) -> list[Any]:
        """Adds to the gradients, overwrites them or makes them, as it was recorded."""
        for value, given in zip(self._arriving, arriving, strict=True):
            value.copy_(given)
        self._backward.replay()
        return [None if value is None else value.clone() for value in self._returned]

    def handed(self, inputs: Sequence[Any]) -> list[Any]:
        """What the launched backward would take: the given inputs where they are fixed, else values in the pool."""
        given = iter(inputs)
        return [next(given) if value is None else value for value in self._saved]

    def _record(self, arguments: list[Any]) -> None:
        captured, nodes = self.fused.captured, self.fused.captured.nodes
        parameters = self.fused.parameters_among(arguments)
        with self._recording(self._forward):
            for place in self._copied:
                arguments[place] = made_real(nodes[captured.graph.inputs[place]].meta["val"])
            self._batch = [_alias(arguments[place]) for place in self._copied]
            arguments += self._moving
            outputs = self.fused.forward(arguments)
            self._join()
        count = len(captured.forward_outputs)
        self._results = [None if value is None else _alias(value) for value in outputs[:count]]
        handed = outputs[count:]
        del outputs  # results are copied out before the backward runs, which may use their memory
        pairs = zip(self.fused.handed, handed, strict=True)
        self._saved = [None if i in self.fused.fixed else _alias(value) for i, value in pairs]
        with self._recording(self._backward):
            arriving = [made_real(nodes[i].meta["val"]) for i in captured.graph.arriving]
            self._arriving = [_alias(value) for value in arriving]
            handed += arriving
            del arriving
            handed += self._moving
            returned = self.fused.run_backward(handed, self.gradients, self.mode)
            self._join()
            if self.mode == "return":
                self.gradients = self.fused.take_gradients(returned, parameters)
        self._returned = [None if value is None else _alias(value) for value in returned]

    def _join(self) -> None:
        """A recording ends when its copies have: the other one cannot wait for them."""
        for lease in self._moving:
            lease.join()

    @contextmanager
    def _recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        current = torch.cuda.current_stream()
        try:
            # Other threads, such as one that pins batches, may go on with what they do.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                yield
        except BaseException:
            _end_broken(self._pool, self._stream)
            for lease in self._moving:
                lease.abandon()
            raise
        finally:
            torch.cuda.set_stream(current)  # a recording that fails leaves its own

    def _hold(self) -> list[torch.Tensor]:
        """Tensors that fill the pool. Nobody reads them; PyTorch's figures then say what the recording takes.

        But for small gaps in large segments, between gradients: no tensor can be had there. Only while segments are
        expandable does the allocator look into those that are; else it would ask for more.
        """
        before = _pool_bytes(self._pool)
        sizes = []
        for segment in _segments(self._pool):
            gaps = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
            if segment["segment_type"] == "small":
                sizes += [min(SMALL, gap - start) for gap in gaps for start in range(0, gap, SMALL)]
            else:
                sizes += [gap for gap in gaps if gap > SMALL]
        with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(SimpleNamespace(id=self._pool)):  # type: ignore[arg-type]
            device = self._stream.device
            held = [torch.empty(size, dtype=torch.uint8, device=device) for size in sorted(sizes, reverse=True)]
        return held if _pool_bytes(self._pool) == before else []


def _end_broken(pool: Any, stream: torch.cuda.Stream) -> None:
    """Finish what PyTorch leaves undone if CUDA refuses a recording, as of an operator that waits for the GPU.

    Then memory goes on to be taken from the recording's pool, which nobody gives back, and the generator is taken to
    be recorded: whoever draws from it gets an error, in whichever model.
    """
    try:
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
    except RuntimeError:  # the recording had ended: the program failed, and not CUDA
        return
    torch._C._cuda_releasePool(stream.device_index, pool)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # sets the generator right
        torch.zeros((), device=stream.device)


def _alias(value: torch.Tensor) -> torch.Tensor:
    """The same memory, without keeping it: the recording's own pool does."""
    owner = value.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(owner.data_ptr(), value.device, owner.nbytes())
    alias = torch.empty(0, dtype=value.dtype, device=value.device)
    return alias.set_(storage, value.storage_offset(), value.size(), value.stride())  # type: ignore[call-overload, no-any-return]


def _segments(pool: Any) -> list[dict[str, Any]]:
    return [segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) == tuple(pool)]


def _pool_bytes(pool: Any) -> int:
    return sum(segment["total_size"] for segment in _segments(pool))


@contextmanager
def _workspaces_inside() -> Iterator[None]:
    """Matrix products get their workspaces from the pool, where nobody else frees or uses them."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
