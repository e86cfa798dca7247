"""Times and workspaces of operators, measured once per distinct operator on the device that will run it.

What was measured is kept on disk under the operator, its shapes and dtypes, and the device and versions it was
measured on. An operator that cannot run on made-up data is estimated instead.

Where the step's own inputs are at hand (parameters, the batch), operators that read them are measured on them, and
only the rest is made up. So measuring takes no more memory than the step itself does at that operator: training may
be under way, within a budget. Programs write some outputs over an input; where memory is short, so does measuring.
"""

from __future__ import annotations

import statistics
import time as clock
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from elbowroom.capture.joint_graph import Captured
from elbowroom.capture.out_variant import out_variant, overwritable
from elbowroom.capture.traced_values import number_in, tensors_in, tensors_of
from elbowroom.measure.allocator_reports import mark, reports_during
from elbowroom.measure.cache import OpCosts, cached_costs
from elbowroom.measure.estimate import estimated_time
from elbowroom.step.allocator import allocator_block
from elbowroom.step.graph import Cost

Report = Callable[[float], None]
Given: TypeAlias = Mapping[fx.Node, torch.Tensor]  # inputs of a graph that are at hand
MakeCall: TypeAlias = Callable[..., Callable[[], Any]]  # of an operator, so that it can run

_LEAST_SAMPLE = 2e-3  # seconds: shorter operators are repeated until a sample lasts this long
_SAMPLES = 3
# In the key of an operator that is measured on images in that layout, or without the host that launches it.
CHANNELS_LAST, KERNELS_ALONE = " in channels last", ", kernels alone"
_CLOCK_HZ = 2e9  # a GPU's, at the most
_LONG_S = 0.02  # of a host that launches kernels: it waits for them


def measure_operators(
    captured: Captured,
    *,
    given: Given | None = None,
    estimate: bool = False,
    free_bytes: int | None = None,
    report: Report = lambda part: None,
) -> Captured:
    """The same graph with the time and workspace of every operator. `free_bytes` is what measuring may take."""
    distinct: dict[str, fx.Node] = {}
    for op, node in zip(captured.graph.ops, captured.nodes, strict=True):
        if op.key and not op.is_view and op.makes:
            distinct.setdefault(op.key, node)
    costs = costs_of(distinct, captured.device, given or {}, estimate, report, free_bytes)
    measured: dict[int, Cost] = {}
    for op in captured.graph.ops:
        time, workspace, sizes = costs.get(op.key, (0.0, 0, ()))
        makes = None
        if len(sizes) == len(op.makes):  # tracing may have been wrong about bytes
            makes = tuple((storage, size) for (storage, _), size in zip(op.makes, sizes, strict=True))
        measured[op.index] = Cost(time, workspace, makes)
    report(1.0)
    return replace(captured, graph=captured.graph.with_costs(measured))


def costs_of(
    nodes: dict[str, fx.Node],
    device: torch.device,
    given: Given,
    estimate: bool,
    report: Report,
    free_bytes: int | None = None,
) -> OpCosts:
    """What operators cost, by key: from what is known on disk, measured now, or estimated."""
    if estimate:
        return {key: _estimated(node, device) for key, node in nodes.items()}
    with cached_costs(device) as costs:
        missing = {key: node for key, node in nodes.items() if key not in costs}
        measure = _measure_cuda if device.type == "cuda" else _measure_cpu
        # While PyTorch traces, tensors would be made of nothing; and programs run below autocast.
        with _disable_current_modes(), torch._C._DisableAutocast():
            costs.update(measure(missing, device, partial(_made_up_call, given=given, free_bytes=free_bytes), report))
    return costs


def _estimated(node: fx.Node, device: torch.device) -> tuple[float, int, tuple[int, ...]]:
    return estimated_time(node, device), 0, ()


# --- CPU -----------------------------------------------------------------------------------------------------


def _measure_cpu(nodes: dict[str, fx.Node], device: torch.device, make_call: MakeCall, report: Report) -> OpCosts:
    if not nodes:
        return {}
    costs: OpCosts = {}
    order: list[str] = []
    for done, (key, node) in enumerate(nodes.items()):
        report(0.8 * done / len(nodes))
        try:
            costs[key] = _measure_cpu_op(make_call(node), node)
        except Exception:
            costs[key] = _estimated(node, device)
            continue
        order.append(key)
    for key, workspace in zip(order, _workspaces([nodes[key] for key in order], make_call), strict=True):
        costs[key] = costs[key][0], workspace, costs[key][2]
    return costs


def _measure_cpu_op(call: Callable[[], Any], node: fx.Node) -> tuple[float, int, tuple[int, ...]]:
    """Its time and what it makes; its workspace is measured with those of the others."""
    with torch.no_grad():
        sizes = _output_bytes(call(), node, allocator_block(cuda=False))
        return min(_cpu_samples(call)), 0, sizes  # whatever else the machine does only adds


def _cpu_samples(call: Callable[[], Any]) -> list[float]:
    """Single runs until enough time is spent: one that was interrupted looks slow, the shortest tells the truth."""
    samples: list[float] = []
    while len(samples) < _SAMPLES or (sum(samples) < 5 * _LEAST_SAMPLE and len(samples) < 50):
        samples.append(host_seconds(call))
        if sum(samples) > 1.0:
            break
    return samples


def _workspaces(nodes: Sequence[fx.Node], make_call: MakeCall) -> list[int]:
    """Per operator: the most it had allocated, above what it left (its outputs)."""

    def run_all() -> None:
        for node in nodes:
            call = make_call(node)
            mark("begins")
            result = call()
            mark("ends")
            del result, call

    with torch.no_grad():
        _, reports = reports_during(run_all)
    found, now, peak = [], 0, 0
    for report in reports:
        if report == "begins":
            now = peak = 0
        elif isinstance(report, str):
            found.append(peak - now)
        else:
            now += report
            peak = max(peak, now)
    return found


# --- CUDA ----------------------------------------------------------------------------------------------------


def _measure_cuda(nodes: dict[str, fx.Node], device: torch.device, make_call: MakeCall, report: Report) -> OpCosts:
    costs: OpCosts = {}
    for done, (key, node) in enumerate(nodes.items()):
        report(done / len(nodes))
        try:
            with torch.no_grad():
                call = make_call(node, channels_last=CHANNELS_LAST in key)
                costs[key] = _measure_cuda_op(call, node, device, hides_host=KERNELS_ALONE in key)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            costs[key] = _estimated(node, device)
        except Exception:
            costs[key] = _estimated(node, device)
    return costs


def _measure_cuda_op(
    call: Callable[[], Any], node: fx.Node, device: torch.device, *, hides_host: bool
) -> tuple[float, int, tuple[int, ...]]:
    sizes = _output_bytes(call(), node, allocator_block(cuda=True))  # picks algorithms, makes lasting workspaces
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    workspace = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    del result
    once = cuda_seconds(call, 1)
    repeats = max(1, min(20, int(_LEAST_SAMPLE / max(once, 1e-7))))
    before = _asleep_while_launching(call, repeats) if hides_host else None
    samples = [cuda_seconds(call, repeats, before) / repeats for _ in range(_SAMPLES if once < 0.05 else 1)]
    return statistics.median(samples), workspace, sizes


def _asleep_while_launching(call: Callable[[], Any], repeats: int) -> Callable[[], None] | None:
    """For as long as the host needs to launch them; not if it is so slow that it must have waited."""
    seconds = launch_seconds(call, repeats)
    return asleep(1.5 * seconds) if seconds < _LONG_S else None


def launch_seconds(call: Callable[[], Any], repeats: int = 1) -> float:
    """For how long the host is busy with them; afterwards the GPU has run them, too."""
    seconds = host_seconds(call, repeats)
    torch.cuda.synchronize()
    return seconds


def host_seconds(call: Callable[[], Any], repeats: int = 1) -> float:
    """For how long the host is busy with them; a GPU may still be running them then."""
    started = clock.perf_counter()
    for _ in range(repeats):
        call()
    return clock.perf_counter() - started


def asleep(seconds: float) -> Callable[[], None]:
    """Keeps the GPU busy, for so long at least: what is launched meanwhile then runs without a gap."""
    return partial(torch.cuda._sleep, int(_CLOCK_HZ * seconds))


def cuda_seconds(call: Callable[[], Any], repeats: int, before: Callable[[], Any] | None = None) -> float:
    """What the GPU takes for them all, one after the other; `before` is put in line first and not counted."""
    if before is not None:
        before()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def _output_bytes(result: Any, node: fx.Node, block: Callable[[int], int]) -> tuple[int, ...]:
    """Bytes of the storages an operator really made, in order; nothing if tracing was right about all of them."""
    real = tensors_in(result)
    traced = tensors_of(node)
    if len(real) != len(traced) or all(map(_as_traced, real, traced)):
        return ()
    return tuple(block(leaf.untyped_storage().nbytes()) for leaf in real)


def _as_traced(real: torch.Tensor, traced: torch.Tensor) -> bool:
    """A sum may be left in a storage that held all its terms, which tracing does not know."""
    return real.dtype == traced.dtype and real.untyped_storage().nbytes() <= traced.untyped_storage().nbytes()


# --- running one operator on made-up data --------------------------------------------------------------------


def _made_up_call(
    node: fx.Node, given: Given, free_bytes: int | None = None, *, channels_last: bool = False
) -> Callable[[], Any]:
    """The operator on what is given of its inputs, and on made-up ones. What shares memory in the step does here."""
    limit = _index_limit(node)
    given = {} if _writes_to_inputs(node) else given
    made: dict[Any, torch.Tensor] = {}

    def real(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return number_in(value)
        tensor = made_up(value, limit, made)
        return tensor.to(memory_format=torch.channels_last) if channels_last and tensor.dim() == 4 else tensor

    def argument(read: fx.Node) -> Any:
        value = read.meta["val"]
        own = given.get(read)
        if own is None or channels_last or not is_like(own, value):
            return tree_map(real, value)
        return own

    target: Any = node.target
    reads = {read: argument(read) for read in node.all_input_nodes}
    args, kwargs = fx.map_arg((node.args, node.kwargs), reads.__getitem__)
    over = next((read for read in overwritable(node) if read not in given), None)
    if over is not None and free_bytes is not None and _most_bytes(node, given) > free_bytes:
        target, place = out_variant(target) or (target, "out")
        kwargs = {**kwargs, place: reads[over]}
    return lambda: target(*args, **kwargs)


def _most_bytes(node: fx.Node, given: Given) -> int:
    """What measuring an operator may take, if it writes to new memory: what is made up and what it makes, and as much
    again for its workspace, which is not known yet. Kernels that convert their inputs first take that."""
    tensors = [tensor for read in (node, *node.all_input_nodes) if read not in given for tensor in tensors_of(read)]
    sizes: dict[int, int] = {
        tensor.untyped_storage()._cdata: number_in(tensor.untyped_storage().nbytes()) for tensor in tensors
    }
    return 2 * sum(sizes.values())


def _writes_to_inputs(node: fx.Node) -> bool:
    """Whether an operator changes what it reads. Those with running statistics do, and most of them do not say so."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or schema.is_mutable or any(each.name == "running_mean" for each in schema.arguments)


def is_like(tensor: torch.Tensor, traced: torch.Tensor) -> bool:
    """Whether a tensor can stand for a traced one. `model.double()` makes another of the same parameter."""
    described = [(t.shape, t.dtype, t.device, t.is_conj(), t.is_neg()) for t in (tensor, traced)]
    return described[0] == described[1] and tensor.stride() == traced.stride()


def made_up(fake: torch.Tensor, limit: int, made: dict[Any, torch.Tensor] | None = None) -> torch.Tensor:
    """A real tensor with the traced one's shape, strides and dtype, a conjugate if that is one. Indices stay within
    `limit`. `made` has the memory that was made up for others, by their traced storage and dtype."""
    made = {} if made is None else made
    place = fake.untyped_storage()._cdata, fake.dtype
    if place not in made:
        made[place] = _made_up_elements(fake, limit)
    tensor = made[place].as_strided(fake.shape, fake.stride(), number_in(fake.storage_offset()))
    tensor = tensor.conj() if fake.is_conj() else tensor
    return torch._neg_view(tensor) if fake.is_neg() else tensor


def _made_up_elements(fake: torch.Tensor, limit: int) -> torch.Tensor:
    """Elements for all of a traced tensor's storage."""
    count = fake.untyped_storage().nbytes() // fake.element_size()
    if fake.is_floating_point() and fake.element_size() > 1:
        return torch.empty(count, dtype=fake.dtype, device=fake.device).uniform_(-1, 1)
    if fake.dtype in (torch.int64, torch.int32) and limit > 1:
        return torch.randint(limit, (count,), dtype=fake.dtype, device=fake.device)
    return torch.zeros(count, dtype=fake.dtype, device=fake.device)


def _index_limit(node: fx.Node) -> int:
    """Integers are zeros, which no operator finds out of range; embeddings are timed on spread-out rows."""
    if node.target is torch.ops.aten.embedding.default:
        return int(node.args[0].meta["val"].shape[0])  # type: ignore[union-attr]
    if node.target is torch.ops.aten.embedding_dense_backward.default:
        return int(node.args[2])  # type: ignore[call-overload, arg-type]
    return 1
