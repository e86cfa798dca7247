"""Real steps of paper 003's networks on a CUDA device: memory at the moments at which the paper looks, and time."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from selection_networks import SIDE
from selection_rows import Row

if TYPE_CHECKING:
    from torch import Tensor, nn


def measure(row: Row, reps: int) -> None:
    """Fill in what a row takes on the CUDA device, or that it ran out of memory."""
    import torch

    print(f"measuring {row.setting.network.name}, batch {row.setting.batch}, {row.how}", file=sys.stderr, flush=True)
    try:
        row.measured = measured(row, reps)
    except torch.cuda.OutOfMemoryError:
        row.measured = {"error": "OOM"}
    gc.collect()
    torch.cuda.empty_cache()


def measured(row: Row, reps: int) -> dict[str, Any]:
    """What there is between steps besides the images, memory in each phase of a step, its true peak, and seconds."""
    import torch

    modules, step, train = training(row, "cuda")
    train()  # from here on there are gradients, a momentum and workspaces
    base = torch.cuda.memory_allocated() - row.sizes[0]
    torch.cuda.reset_peak_memory_stats()
    trace = sampled(modules, step, torch.cuda.memory_allocated)
    peak = torch.cuda.max_memory_allocated()
    train()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(reps):
        train()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / reps
    return {"base_bytes": base, "trace_bytes": trace, "peak_bytes": peak, "seconds": seconds}


def training(row: Row, device: str) -> tuple[list[nn.Module], Callable[..., None], Callable[[], None]]:
    """The layers, a function that goes forward and backward, and one that also updates the weights."""
    import torch
    from torch.nn.functional import cross_entropy

    network, batch = row.setting.network, row.setting.batch
    with torch.device(device):
        pairs = zip(network.layers, network.shapes(), strict=False)
        modules = [layer.module(*shape) for layer, shape in pairs]
        images, labels = torch.randn(batch, 3, SIDE, SIDE), torch.randint(1000, (batch,))
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-6, momentum=0.9)

    def step(between: Callable[[], None] = lambda: None) -> None:
        optimizer.zero_grad(set_to_none=False)
        loss = cross_entropy(forward(modules, images, row.checkpoints), labels)
        between()
        loss.backward()

    def train() -> None:
        step()
        optimizer.step()

    return modules, step, train


def forward(modules: Sequence[nn.Module], x: Tensor, checkpoints: Sequence[int]) -> Tensor:
    """The network's output, each segment between two checkpoints under PyTorch's `checkpoint`."""
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    if not checkpoints:
        return nn.Sequential(*modules)(x)
    for h, i in pairwise([0, *checkpoints]):
        x = checkpoint(nn.Sequential(*modules[h:i]), x, use_reentrant=False)
    return x


def sampled(modules: Sequence[nn.Module], step: Callable[..., None], allocated: Callable[[], int]) -> list[int]:
    """Bytes before a step, after each layer's forward, after each layer's backward, and after the step."""
    forwards, backwards = [allocated()], []
    samples = [forwards]

    def after_forward(*_: Any) -> None:
        if samples[0] is forwards:  # in the backward, forwards that run again are not sampled
            forwards.append(allocated())

    def after_backward(*_: Any) -> None:
        backwards.append(allocated())

    # A backward hook is called when the gradient of a layer's input is there. The first layer's input has none, so
    # the sample is taken when the gradient of its weights is there.
    weight = next(modules[0].parameters())
    hooks = [module.register_forward_hook(after_forward) for module in modules]
    hooks += [module.register_full_backward_hook(after_backward) for module in modules[1:]]
    hooks.append(weight.register_post_accumulate_grad_hook(after_backward))
    step(lambda: samples.__setitem__(0, backwards))
    for hook in hooks:
        hook.remove()
    return [*forwards, *backwards, allocated()]
