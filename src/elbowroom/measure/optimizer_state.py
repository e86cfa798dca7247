"""Bytes of the state that an optimizer's first step will make, found by trying that step on parameters like its own.

Every distinct shape and dtype of a group's parameters is tried, because state need not be shaped like its parameter:
Adafactor keeps a row and a column of a matrix. Trials run on the meta device, where nothing is allocated or computed;
where a step reads numbers, they run on the CPU, one shape at a time. The optimizer itself is not run.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from elbowroom.errors import InputError
from elbowroom.measure.random_state import random_state_kept
from elbowroom.step.allocator import allocator_block

# Which implementation of a step runs makes no difference to its state, and not every one runs on every device.
_IMPLEMENTATIONS = ("fused", "foreach", "capturable")


class _Kind(NamedTuple):
    """What parameters have in common whose state is alike."""

    shape: torch.Size
    dtype: torch.dtype


def state_to_come(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Bytes on the device that coming steps will make, for all parameters that have no state yet.

    Some may have it already: a step leaves out what got no gradient in it, as a layer that was skipped by chance.
    """
    inner = _wrapped(optimizer)
    return sum(_group_bytes(inner, group, device) for group in inner.param_groups)


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Everything that an optimizer keeps: for its parameters, in its groups, and under other names."""
    return _tensors([*optimizer.state.values(), *(_settings(group) for group in optimizer.param_groups)])


def _wrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside one that only stands for it, as accelerate's does."""
    for value in vars(optimizer).values():
        if isinstance(value, torch.optim.Optimizer) and value.state is optimizer.state:
            return value
    return optimizer


def _has_state(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    return any(optimizer.state.get(parameter) for parameter in group["params"])


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _group_bytes(optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device) -> int:
    here = [p for p in group["params"] if p.requires_grad and p.device.type == device.type]
    kinds = Counter(_Kind(p.shape, p.dtype) for p in here if not optimizer.state.get(p))
    failure: Exception | None = None
    for attempt in (_on_meta, _on_cpu, _on_cpu_with_sparse_gradients) if kinds else ():
        try:
            with random_state_kept():
                return attempt(optimizer, group, kinds, device)
        except Exception as problem:  # whatever somebody's optimizer does where it cannot be tried
            failure = failure or problem
    if failure is None or any(optimizer.state.values()):  # a step was taken, and gave this group nothing
        return 0
    raise InputError(
        "optimizer",
        f"{type(optimizer).__name__} has no state yet, and its step cannot be tried to count it; take one step first",
    ) from failure


def _on_meta(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], kinds: Counter[_Kind], device: torch.device
) -> int:
    """All kinds of parameters in one trial: what is made on the meta device will be on the parameter's."""
    trial = _Trial(optimizer, group, list(kinds), torch.device("meta"), torch.zeros_like)
    return trial.bytes_on(device, kinds, count_shared=not _has_state(optimizer, group))


def _on_cpu(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    kinds: Counter[_Kind],
    device: torch.device,
    gradient: Callable[[torch.Tensor], torch.Tensor] = torch.ones_like,
) -> int:
    """One kind after the other, so that at most one parameter's state is in memory. The group's own counts once."""
    total, begun = 0, _has_state(optimizer, group)
    for number, kind in enumerate(kinds):
        trial = _Trial(optimizer, group, [kind], torch.device("cpu"), gradient)
        total += trial.bytes_on(device, kinds, count_shared=number == 0 and not begun)
    return total


def _on_cpu_with_sparse_gradients(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], kinds: Counter[_Kind], device: torch.device
) -> int:
    """As embeddings have them. Some optimizers take no others."""

    def one_row(parameter: torch.Tensor) -> torch.Tensor:
        row, index = torch.ones_like(parameter[:1]), torch.zeros(1, 1, dtype=torch.long)
        return torch.sparse_coo_tensor(index, row, parameter.shape, check_invariants=False)

    return _on_cpu(optimizer, group, kinds, device, one_row)


class _Trial:
    """One step of another optimizer of the same class, on one new parameter of each kind."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: dict[str, Any],
        kinds: Sequence[_Kind],
        where: torch.device,
        gradient: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        settings = _settings(group)
        # Counters lie on the device if the step runs there as one kernel or one CUDA graph, else on the host.
        self._counters_on_device = bool(settings.get("fused") or settings.get("capturable"))
        settings |= {key: False for key in _IMPLEMENTATIONS if key in settings}
        self._parameters = {
            kind: nn.Parameter(torch.zeros(kind.shape, dtype=kind.dtype, device=where)) for kind in kinds
        }
        for parameter in self._parameters.values():
            parameter.grad = gradient(parameter.detach())
        known = {**vars(optimizer), **settings}
        required = [p for p in _keywords(type(optimizer)) if p.default is p.empty]
        arguments = {p.name: known[p.name] for p in required if p.name in known}
        groups = [{"params": list(self._parameters.values()), **settings}]
        self._optimizer = type(optimizer)(groups, **arguments)  # type: ignore[call-arg]
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None and not p.grad.is_sparse]
        self._counted = _storages([*self._parameters.values(), *gradients, *_tensors(settings)])
        self._optimizer.step()

    def bytes_on(self, device: torch.device, kinds: Counter[_Kind], *, count_shared: bool) -> int:
        """What the step has made, for as many parameters of each kind as there are."""
        owners: dict[Any, _Kind] = {parameter: kind for kind, parameter in self._parameters.items()}
        total = 0
        for owner, state in self._optimizer.state.items():
            if owner in owners:
                kind = owners[owner]
                total += kinds[kind] * self._new_bytes(state, device, kind.shape)
            elif count_shared:
                total += self._new_bytes(state, device)
        if count_shared:
            total += sum(self._new_bytes(_settings(group), device) for group in self._optimizer.param_groups)
        return total

    def _new_bytes(self, state: Any, device: torch.device, shape: torch.Size | None = None) -> int:
        here = [tensor for tensor in _tensors(state) if self._will_be_on(device, tensor, shape)]
        block = allocator_block(device.type == "cuda")
        return sum(block(size) for storage, size in _storages(here).items() if storage not in self._counted)

    def _will_be_on(self, device: torch.device, tensor: torch.Tensor, shape: torch.Size | None) -> bool:
        if tensor.device.type in ("meta", device.type):
            return True
        tried_on_meta = next(iter(self._parameters.values())).is_meta
        is_counter = tried_on_meta or (tensor.dim() == 0 and tensor.shape != shape)
        return self._counters_on_device or not is_counter


def _keywords(kind: type) -> list[inspect.Parameter]:
    """What a constructor takes besides the parameters."""
    parameters = list(inspect.signature(kind).parameters.values())[1:]
    return [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _tensors(kept: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(kept) if isinstance(leaf, torch.Tensor)]


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes by storage. Those on the meta device have no address, so they go by identity."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage.nbytes() for storage in storages}
