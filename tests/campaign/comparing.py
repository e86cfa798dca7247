"""What a step leaves behind, taken down and compared: parameters, gradients, buffers, attributes, generators."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn

# What `nn.Module` itself keeps in a module's `__dict__`, and what `fit` may put there. `training` is the user's.
INTERNAL = {*vars(nn.Module()), "_compiled_call_impl", "elbowroom"} - {"training"}

# Attributes hold means of activations, which cancel out, and are as exact as those, whose size is not noted.
MEAN_OF = 0.1


@dataclasses.dataclass(frozen=True)
class Failure:
    """What went wrong, in a word to sort by and a sentence. `share` is how far numbers are apart, if that is it."""

    kind: str
    text: str
    share: float = math.inf

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclasses.dataclass(frozen=True)
class Difference:
    """Two values that are not the same. `share` is how far they are apart beside their size; infinite for others."""

    kind: str
    where: str
    share: float
    text: str


@dataclasses.dataclass(frozen=True)
class Generators:
    """The states of all generators of random numbers that a model may draw from."""

    python: Any
    numpy: Any
    torch: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def now(cls) -> Generators:
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return cls(random.getstate(), numpy.random.get_state(), torch.get_rng_state(), cuda)

    def put_back(self) -> None:
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)

    def differences(self, other: Generators) -> Iterator[Difference]:
        def differs(name: str) -> Difference:
            return Difference("generator", f"{name}'s", math.inf, "is in another state")

        if self.python != other.python:
            yield differs("python")
        if not all(numpy.array_equal(a, b) for a, b in zip(self.numpy, other.numpy, strict=True)):
            yield differs("numpy")
        if not torch.equal(self.torch, other.torch):
            yield differs("torch")
        if self.cuda is not None and other.cuda is not None and not torch.equal(self.cuda, other.cuda):
            yield differs("cuda")


def drawing_as_plainly(kernels: str) -> contextlib.AbstractContextManager[None]:
    """Has fused kernels draw the random numbers that PyTorch's draw. By default Inductor draws others, from seeds."""
    if kernels != "inductor":
        return contextlib.nullcontext()
    from torch._inductor import config

    return config.patch(fallback_random=True)


def state_of(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Everything that a step may change in a model, copied, by what it is and where."""
    state: dict[tuple[str, str], Any] = {}
    for name, parameter in model.named_parameters():
        state["gradient", name] = noted(parameter.grad)
        state["parameter", name] = noted(parameter)
        state["requires_grad", name] = parameter.requires_grad
    for name, buffer in model.named_buffers():
        state["buffer", name] = noted(buffer)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in INTERNAL:
                state["attribute", f"{path}.{name}".lstrip(".")] = noted(value)
    return state


def noted(value: Any) -> Any:
    """A copy of a value that can be compared: tensors by their bits, containers by what they hold.

    It lies on the host: on a GPU, whatever is there counts in the budget.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, list | tuple | collections.deque):
        return [type(value).__name__, *(noted(each) for each in value)]
    if isinstance(value, Mapping):
        return {key: noted(each) for key, each in value.items()}
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | numpy.ndarray):
        return value
    return f"a {type(value).__name__}"


def state_differences(expected: Mapping[Any, Any], actual: Mapping[Any, Any]) -> Iterator[Difference]:
    """Between two states of models of one kind. Gradients are as far apart as the largest of them lets it seem."""
    typical = largest_in(value for (kind, _), value in expected.items() if kind == "gradient")
    for key in dict.fromkeys([*expected, *actual]):
        kind, where = key
        if key not in expected or key not in actual:
            yield Difference(kind, where, math.inf, f"is there only {'as planned' if key in actual else 'plainly'}")
            continue
        floor = {"gradient": typical, "attribute": MEAN_OF}.get(kind, 0.0)
        share, text = apart(expected[key], actual[key], floor)
        if text:
            yield Difference(kind, where, share, text)


def apart(expected: Any, actual: Any, floor: float = 0.0) -> tuple[float, str]:
    """How far two noted values are apart beside their size, or beside `floor`, and that in words; empty if equal."""
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        return _tensors_apart(expected, actual, floor)
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        found = [apart(a, b, floor) for a, b in zip(expected, actual, strict=True)]
        return max((one for one in found if one[1]), default=(0.0, ""))
    if isinstance(expected, dict) and isinstance(actual, dict) and expected.keys() == actual.keys():
        found = [apart(value, actual[key], floor) for key, value in expected.items()]
        return max((one for one in found if one[1]), default=(0.0, ""))
    if isinstance(expected, float) and isinstance(actual, float):
        if expected == actual or (math.isnan(expected) and math.isnan(actual)):
            return 0.0, ""
        share = abs(expected - actual) / max(abs(expected), floor, 1e-12)
        return share if math.isfinite(share) else math.inf, f"is {actual!r}, not {expected!r}"
    if isinstance(expected, numpy.ndarray) and isinstance(actual, numpy.ndarray):
        return (0.0, "") if numpy.array_equal(expected, actual) else (math.inf, "is another array")
    if type(expected) is type(actual) and expected == actual:
        return 0.0, ""
    return math.inf, f"is {_short(actual)}, not {_short(expected)}"


def _tensors_apart(expected: torch.Tensor, actual: torch.Tensor, floor: float) -> tuple[float, str]:
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return math.inf, f"is {_short(actual)}, not {_short(expected)}"
    if not expected.numel() or torch.equal(expected, actual):
        return 0.0, ""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = expected.to(wide), actual.to(wide)
    same = (a == b) | ((a != a) & (b != b))
    if same.all():
        return 0.0, ""
    difference, size = float((a - b)[~same].abs().max()), max(floor, float(a.abs().nan_to_num(0, 0, 0).max()), 1e-30)
    share = difference / size
    share = share if math.isfinite(share) else math.inf
    return share, f"differs by {difference:.3g} where its largest number is {float(a.abs().max()):.3g}"


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}, {tuple(value.shape)}"
    return repr(value)[:80]


def largest_in(tensors: Iterable[torch.Tensor | None]) -> float:
    """The largest number that any of them holds, of those that are finite."""
    sound = [t for t in tensors if t is not None and t.numel() and t.isfinite().all()]
    return max((float(t.abs().max()) for t in sound), default=0.0)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in what a model answers."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for each in value.values() for tensor in tensors_in(each)]
    if isinstance(value, list | tuple | collections.deque):
        return [tensor for each in value for tensor in tensors_in(each)]
    if dataclasses.is_dataclass(value):
        return [tensor for field in dataclasses.fields(value) for tensor in tensors_in(getattr(value, field.name))]
    return []
