"""What is in memory during the whole step: parameters, their gradients, optimizer state, the batch."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from elbowroom.measure.optimizer_state import state_tensors, state_to_come
from elbowroom.step.allocator import allocator_block

# Names of operators that may call the library for matrix products.
_PRODUCTS = re.compile("mm|mv|dot|ger|matmul|linear|linalg|attention|lstm|gru|rnn|einsum|cdist")


def resident_bytes(
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    *,
    multiplies: bool = True,
) -> dict[str, int]:
    """Bytes by what they are for. On CUDA, `other` is whatever else is allocated there already.

    If the step `multiplies` matrices, the workspaces of products are part of that.
    """
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    known: set[int] = set()
    parts = {
        "parameters": _bytes(parameters, device, known),
        "gradients": sum(rounded(p.numel() * p.element_size(), device) for p in _distinct(trained, device)),
        "buffers": _bytes(model.buffers(), device, known),
        "optimizer": optimizer_bytes(optimizer, device) if optimizer is not None else 0,
        "batch": _bytes((leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)), device, known),
    }
    if device.type == "cuda":
        if multiplies:
            _make_lasting_workspaces(device)
        gradients = [p.grad for p in trained if p.grad is not None]
        state = [] if optimizer is None else state_tensors(optimizer)
        ours = _bytes([*parameters, *model.buffers(), *gradients, *state], device, set())
        batch_tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        ours += _bytes(batch_tensors, device, set())
        parts["other"] = max(0, torch.cuda.memory_allocated(device) - ours)
    return parts


def multiplies_matrices(nodes: Iterable[fx.Node]) -> bool:
    """Whether some operator may use the library for matrix products. Those of others may do anything."""
    cudnn = torch.backends.cudnn  # dilated convolutions that must be deterministic are none of its
    convolutions_do = not cudnn.enabled or cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    for node in nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            namespace, _, name = node.target._schema.name.partition("::")
            if namespace not in ("aten", "prims") or _PRODUCTS.search(name):
                return True
            if convolutions_do and "conv" in name:
                return True
    return False


def _make_lasting_workspaces(device: torch.device) -> None:
    """Matrix products keep workspaces for each thread, and backwards have a thread of their own: make all now.

    Each time anew, for the workspaces may have been cleared since; where they are still there, it costs nothing.
    """
    with warnings.catch_warnings(), torch.enable_grad(), torch.autocast("cuda", enabled=False):
        warnings.filterwarnings("ignore", message=".*no current CUDA context")  # in the backward's thread, at first
        for dtype in (torch.float32, torch.bfloat16):
            _Products.apply(torch.ones(64, 64, dtype=dtype, device=device, requires_grad=True)).backward()
    torch.cuda.synchronize(device)


class _Products(torch.autograd.Function):
    """All kinds of products, in the forward and in the backward: a plan may run any of them in either."""

    @staticmethod
    def forward(ctx: Any, square: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(square)
        return _Products.all_of(square)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> torch.Tensor:
        square: torch.Tensor = ctx.saved_tensors[0]
        _Products.all_of(square)
        return square

    @staticmethod
    def all_of(square: torch.Tensor) -> torch.Tensor:
        single = square[None]
        products = square @ square, torch.addmm(square[0], square, square), torch.addmm(square, square, square)
        batches = torch.bmm(single, single), torch.baddbmm(single, single, single)
        return torch.stack([product.sum() for product in (*products, *batches)]).sum()


def in_use(device: torch.device) -> int:
    """Bytes of a GPU that somebody holds; 0 on the CPU, where nobody counts."""
    if device.type != "cuda":
        return 0
    gc.collect()
    return int(torch.cuda.memory_allocated(device))


def give_back_cached() -> None:
    """Give back what tracing, measurements and trials have left, for nobody: values in circles of Python's objects,
    and on a GPU what PyTorch's allocator keeps."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def device_of(model: nn.Module) -> torch.device:
    """Where its first tensor lives."""
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def device_bytes(model: nn.Module) -> int | None:
    """Size of the device a model lives on, where budgets may be given as a share of it."""
    device = device_of(model)
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def optimizer_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Bytes of an optimizer's state: what is there, and what its first step will make."""
    return _bytes(state_tensors(optimizer), device, set()) + state_to_come(optimizer, device)


def step_temporaries(optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes that an optimizer's step may take for a moment: one more copy of what it updates, unless it is fused.

    They fit where activations were, as a rule. They do not if something holds that memory between steps.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    return sum(
        parameter.numel() * parameter.element_size()
        for group in groups
        if not group.get("fused")
        for parameter in group["params"]
        if parameter.requires_grad
    )


def _distinct(parameters: Iterable[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return list({id(p): p for p in parameters if p.device.type == device.type}.values())


def _bytes(tensors: Iterable[torch.Tensor], device: torch.device, known: set[int]) -> int:
    """Storages on the device that were not counted before; adds them to `known`."""
    total = 0
    for tensor in tensors:
        if tensor.device.type != device.type:
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            total += rounded(storage.nbytes(), device)
    return total


def rounded(size: int, device: torch.device) -> int:
    return allocator_block(device.type == "cuda")(size)
