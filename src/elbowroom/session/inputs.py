"""What `fit` and `plan` are given, looked at before anything runs: each thing that cannot work is named in a sentence
that says what to do instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from elbowroom.errors import InputError


def check_model(model: Any) -> None:
    """A module whose parameters and buffers are tensors in the memory of a device."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise InputError("model", f"is the class {model.__name__}; pass an instance, such as {model.__name__}()")
    if not isinstance(model, nn.Module):
        raise InputError("model", f"must be a torch.nn.Module, not {type(model).__name__}")
    for name, tensor in _tensors(model):
        if is_lazy(tensor):
            raise InputError("model", f"{name} has no shape yet; run the model once on a batch first")
        if tensor.is_meta:
            raise InputError(
                "model",
                f"{name} is on the meta device, where it has no memory; give the model memory and values first, "
                'such as with model.to_empty(device="cuda") and its state_dict',
            )
        if is_traceable_wrapper_subclass(tensor):
            raise InputError(
                "model",
                f"{name} is a {_kind(tensor)}, which is sharded or wraps other tensors; elbowroom plans models of "
                "plain tensors, so leave out what replaces them (fully_shard, parallelize_module, quantisation)",
            )


def check_example(example: Any) -> None:
    """Tensors with values."""
    if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves(example)):
        raise InputError("example", "has a tensor on the meta device; pass one with values, on the model's device")


def check_optimizer(model: nn.Module, optimizer: Any) -> None:
    """One that updates at least one of the model's parameters; what else it updates is its own business."""
    check_is_optimizer(optimizer)
    if optimizer is None:
        return
    own = {id(parameter) for parameter in model.parameters()}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if own and not own & held:
        raise InputError(
            "optimizer",
            f"{type(optimizer).__name__} holds none of the parameters of {type(model).__name__}; "
            "make it of model.parameters()",
        )


def check_is_optimizer(optimizer: Any) -> None:
    """Of whichever model."""
    if optimizer is None:
        return
    if isinstance(optimizer, type):
        name = optimizer.__name__
        raise InputError("optimizer", f"is the class {name}; pass an instance, such as {name}(model.parameters())")
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
        raise InputError("optimizer", f"must be a torch.optim.Optimizer, not {optimizer!r:.40}")


def checked_loss(returned: Any) -> Any:
    """What a loss returned, if a backward can begin there. Tracing sees shapes, so that it refuses the same."""
    if isinstance(returned, torch.Tensor) and returned.numel() == 1:
        return returned
    if isinstance(returned, torch.Tensor):
        what, remedy = f"a tensor of shape {list(returned.shape)}", "reduce it with .mean() or .sum()"
    else:
        what, remedy = f"a value of type {type(returned).__name__}", "return nothing but the loss"
    raise InputError("loss", f"must return a tensor with one number, and returned {what}; {remedy}")


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield f"parameter {name!r}", parameter
    for name, buffer in model.named_buffers():
        yield f"buffer {name!r}", buffer


def _kind(tensor: torch.Tensor) -> str:
    """Its class; parameters are made of the tensor that has it."""
    return type(tensor.data if type(tensor) is nn.Parameter else tensor).__name__
