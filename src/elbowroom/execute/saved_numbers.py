"""Numbers of Python that go from a forward to its backward: autograd saves tensors only, so they become some."""

from __future__ import annotations

from typing import Any

import torch

_WHOLE = {float: torch.float64, complex: torch.complex128}  # in which a number of Python keeps all of its bits


class _Number(torch.Tensor):
    """A number on its way from forward to backward: autograd saves tensors only. An integer of more than eight bytes
    is a row of them."""


def numbers_as_tensors(outputs: list[Any], visible: int) -> list[Any]:
    """What goes to the backward as tensors; what the user gets stays as it is."""
    saved = (value if isinstance(value, torch.Tensor) else _packed(value) for value in outputs[visible:])
    return [*outputs[:visible], *saved]


def _packed(number: Any) -> _Number:
    """No view: those AOT autograd detaches, which its check of a graph's first run refuses for other classes."""
    packed: _Number = torch.Tensor._make_subclass(_Number, _as_tensor(number))
    return packed


def _as_tensor(number: Any) -> torch.Tensor:
    if isinstance(number, int) and number.bit_length() > 63:
        size = number.bit_length() // 8 + 1
        return torch.tensor(list(number.to_bytes(size, "little", signed=True)), dtype=torch.uint8)
    return torch.tensor(number, dtype=_WHOLE.get(type(number)))


def as_number(value: Any) -> Any:
    if not isinstance(value, _Number):
        return value
    tensor = value.as_subclass(torch.Tensor)
    return int.from_bytes(bytes(tensor.tolist()), "little", signed=True) if tensor.dim() else tensor.item()
