"""Proof that nothing changed: one planned step against one plain step, bit by bit.

Compared are what the step returns, the gradient of every parameter, every buffer, and the random streams of
PyTorch, Python and numpy. Where the plain step differs from itself traced by PyTorch without any plan (`aot_eager`:
other kernels than eager's), the planned step must equal the traced one. Fused kernels round differently from
others: such a step must be as close to `torch.compile`'s as rounding allows, with the same random numbers. How much
that is depends on the model (batch norm in half precision may turn a rounding into a tenth of a gradient), so where
a difference seems large, it is held against what `torch.compile` itself makes of parameters that were rounded
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, isinf
from typing import Any, Protocol

import torch
from torch import nn

from elbowroom.capture.backend import kept_whole
from elbowroom.capture.settings import capture_settings
from elbowroom.capture.traced_values import tensors_in
from elbowroom.errors import Mismatch
from elbowroom.execute.accumulation import unnoticed
from elbowroom.measure.random_state import RandomStates, random_states, set_random_states


@dataclass(frozen=True)
class Outcome:
    """Everything a step leaves behind."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    random: RandomStates


class Verifiable(Protocol):
    """A planned step beside the plain one: what is called, the model, and whether fused kernels run it."""

    model: nn.Module
    step: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def fuses(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool: ...


@dataclass(frozen=True)
class Verification:
    """What was compared, and against what. `against` is "eager", "aot_eager" or "torch.compile"."""

    against: str
    compared: int
    furthest: float = 0.0  # for fused kernels: the largest difference, as a share of what is compared

    def __str__(self) -> str:
        if self.against == "torch.compile":
            return (
                f"equal to torch.compile up to rounding ({self.furthest:.1e}): outputs, gradients, buffers and "
                f"random state ({self.compared} tensors)"
            )
        return f"identical to {self.against}: outputs, gradients, buffers and random state ({self.compared} tensors)"


def verify_step(session: Verifiable, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Verification:
    """Compare a planned step with plain execution; `Mismatch` names the first difference."""
    model = session.model
    planned = outcome(model, session, args, kwargs)
    if session.fuses(args, kwargs):
        return _verify_fused(session, planned, args, kwargs)
    plain = outcome(model, session.step, args, kwargs)
    difference = first_difference(plain, planned)
    if difference is None:
        return Verification("eager", _count(plain))
    with capture_settings(64), kept_whole():
        traced = outcome(model, torch.compile(session.step, backend="aot_eager", dynamic=False), args, kwargs)
    if first_difference(plain, traced) is not None and first_difference(traced, planned) is None:
        return Verification("aot_eager", _count(plain))
    raise Mismatch(f"the planned step differs from plain execution: {difference}")


def _verify_fused(
    session: Verifiable, planned: Outcome, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Verification:
    step = torch.compile(session.step, dynamic=False)
    with capture_settings(64):
        compiled = outcome(session.model, step, args, kwargs)
    low = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    low = low or any(p.dtype.itemsize == 2 for p in session.model.parameters())
    rounding = ROUNDING[torch.bfloat16 if low else torch.float32]
    apart = _apart(compiled, planned)
    if max(apart.values(), default=0.0) > rounding.usual:
        with capture_settings(64), _rounded_otherwise(session.model, rounding.one):
            moved = _apart(compiled, outcome(session.model, step, args, kwargs))
        for name, share in apart.items():
            if isinf(share) or share > max(rounding.usual, moved[name]):
                a, b = _pairs(compiled, planned)[name]
                raise Mismatch(f"the planned step differs from torch.compile: {name}{_distance(a, b)}")
    if (difference := compiled.random.differs_in(planned.random)) is not None:
        raise Mismatch(f"the planned step differs from torch.compile: {difference}")
    return Verification("torch.compile", _count(compiled), max(apart.values(), default=0.0))


@dataclass(frozen=True)
class Rounding:
    """What rounding usually does to a tensor, as a share of its norm, and at most to one number, as a share of it."""

    usual: float
    one: float


ROUNDING = {torch.float32: Rounding(1e-3, 2**-24), torch.bfloat16: Rounding(5e-2, 2**-9)}


def _apart(a: Outcome, b: Outcome) -> dict[str, float]:
    """How far apart two outcomes are, tensor by tensor."""
    typical = _typical(a)
    shares = {}
    for name, (x, y) in _pairs(a, b).items():
        if (x is None) != (y is None):
            raise Mismatch(f"the planned step differs from torch.compile: {name} is missing in one of them")
        if x is not None and y is not None and x.numel():
            shares[name] = _share_apart(x, y, typical if name.startswith("the gradient") else 0.0)
    return shares


@contextmanager
def _rounded_otherwise(model: nn.Module, share: float) -> Iterator[None]:
    """Each parameter a little larger or smaller, as if it had been rounded otherwise."""
    kept = [(p, p.detach().clone()) for p in model.parameters()]
    with torch.no_grad():
        for number, (p, value) in enumerate(kept):
            generator = torch.Generator(p.device).manual_seed(number)
            up = torch.rand(p.shape, generator=generator, device=p.device) < 0.5
            p.copy_(value * torch.where(up, 1 + share, 1 - share))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in kept:
                p.copy_(value)


def _pairs(a: Outcome, b: Outcome) -> dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]:
    pairs: dict[str, Any] = {f"output {i}": pair for i, pair in enumerate(zip(a.outputs, b.outputs, strict=True))}
    pairs |= {f"the gradient of {name}": (value, b.gradients[name]) for name, value in a.gradients.items()}
    return pairs | {f"buffer {name}": (value, b.buffers[name]) for name, value in a.buffers.items()}


def _share_apart(a: torch.Tensor, b: torch.Tensor, least: float) -> float:
    """The norm of the difference over that of the value. Gradients that are nothing but rounding count as `least`.

    What is infinite or not a number in one of them must be the same in the other, or they are infinitely far apart.
    """
    if a.shape != b.shape:
        return inf
    a, b = _wide(a), _wide(b)
    usual = a.isfinite() & b.isfinite()
    if not same_bits(a[~usual], b[~usual]):
        return inf
    norm = max(a[usual].norm().item(), least * a.numel() ** 0.5)
    apart = (a[usual] - b[usual]).norm().item()
    return apart / norm if norm else float(apart > 0)


def _typical(result: Outcome) -> float:
    """A thousandth of the usual size of a gradient's element."""
    squares, count = 0.0, 0
    for gradient in result.gradients.values():
        if gradient is not None:
            numbers = _wide(gradient[gradient.isfinite()])
            squares += float(numbers.abs().square().sum())
            count += numbers.numel()
    return 1e-3 * (squares / count) ** 0.5 if count else 0.0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, so precise that comparing them rounds nothing."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def outcome(model: nn.Module, step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
    """Run a step and its backward from the present state; the model is left as it was found."""
    with _state_kept(model):
        inputs = tensors_in((args, dict(kwargs)))
        before = [leaf.detach().clone() for leaf in inputs]
        outputs = tensors_in(step(*args, **kwargs))
        total = sum(_real(leaf).float().sum() for leaf in outputs if leaf.requires_grad)
        if isinstance(total, torch.Tensor):
            total.backward()
        result = Outcome(
            [leaf.detach().clone() for leaf in outputs],
            {name: None if p.grad is None else p.grad.clone().to_dense() for name, p in model.named_parameters()},
            {name: buffer.clone() for name, buffer in model.named_buffers()},
            random_states(),
        )
        with torch.no_grad():
            for leaf, value in zip(inputs, before, strict=True):
                if leaf.grad_fn is None:
                    leaf.copy_(value)
    return result


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def first_difference(plain: Outcome, planned: Outcome) -> str | None:
    """In words, with how far apart they are; None if all bits are equal."""
    for i, (a, b) in enumerate(zip(plain.outputs, planned.outputs, strict=True)):
        if not same_bits(a, b):
            return f"output {i}{_distance(a, b)}"
    for what, ours, theirs in (
        ("the gradient of", plain.gradients, planned.gradients),
        ("buffer", plain.buffers, planned.buffers),
    ):
        for name, a_or_none in ours.items():
            b_or_none = theirs[name]
            if a_or_none is None or b_or_none is None:
                if a_or_none is not b_or_none:
                    return f"{what} {name} is missing in one of them"
            elif not same_bits(a_or_none, b_or_none):
                return f"{what} {name}{_distance(a_or_none, b_or_none)}"
    return plain.random.differs_in(planned.random)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(a, b) or ((a == b) | (a.isnan() & b.isnan())).all())


def _distance(a: torch.Tensor | None, b: torch.Tensor | None) -> str:
    assert a is not None
    assert b is not None
    if a.shape != b.shape or a.dtype != b.dtype:
        return f" ({a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)})"
    a, b = _wide(a), _wide(b)
    if not torch.equal(a.isnan(), b.isnan()):
        return " (some of it is not a number in one of them, and is one in the other)"
    numbers = ~a.isnan()
    far, largest = (a - b)[numbers].abs().max().item(), a[numbers].abs().max().item()
    return f" (by up to {far:.3g}, where the largest value is {largest:.3g})"


def _count(result: Outcome) -> int:
    return len(result.outputs) + len(result.gradients) + len(result.buffers) + len(result.random.tensors)


@contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """Gradients start from None and come back; buffers and random states too."""
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    states = random_states()
    for p, _ in gradients:
        p.grad = None
    try:
        with unnoticed(p for p, _ in gradients):
            yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        set_random_states(states)
