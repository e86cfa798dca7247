"""What the user asked for: one frozen object behind `fit`, `plan`, the compile backend and the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import nn
from torch.utils._triton import has_triton

from elbowroom.errors import InputError
from elbowroom.measure.resident import device_bytes
from elbowroom.plan.plan import Plan
from elbowroom.units import parse_bytes, parse_rate


class Wishes(TypedDict, total=False):
    """The keywords of `fit` and `plan` besides the budget, for type checkers; `Options` says what they mean."""

    optimizer: torch.optim.Optimizer | None
    loss: Callable[..., torch.Tensor] | None
    stages: Sequence[nn.Module] | None
    plan: Plan | str | Path | None
    forwards: int
    strict: bool
    max_shapes: int
    times: str
    kernels: str
    compilations: int
    cuda_graphs: bool
    accumulates: bool
    offload: str
    host_budget: int | str | None
    link: float | str | None


@dataclass(frozen=True)
class Options:
    """What to keep to, and how to plan.

    `budget`: bytes, as a number or as text such as "8GiB". `optimizer`: its state is counted. `loss` is computed
    inside the step. `stages` cuts the model by hand. `plan` is one made earlier (`of` loads it if it is a path).
    `forwards` is how many forwards wait for one backward. `strict` raises where part of the model would run outside
    the plan. At most `max_shapes` shapes of input are planned. `times` is "measure", or "estimate" to plan without
    running operators. `kernels` are "torch", PyTorch's own; "inductor", fused ones; or "auto", fused ones where the
    model is on a GPU and a compiler is there. For fused ones at most `compilations` plans are compiled and measured
    for a budget; with `cuda_graphs` they are replayed as such where that is faster. With `accumulates`, gradients of
    earlier backwards are there when a step begins; else that is found out when it happens.

    `offload` says whether values move to the host's memory and back: "never"; "auto", on a GPU and where that is
    faster than computing them again; or "always", wherever the budget does not hold everything. They have
    `host_budget` bytes there, or a share of what is free (`host_link.py`). `link` is how fast they move, as measured
    if it is not given.
    """

    budget: int | str
    optimizer: torch.optim.Optimizer | None = None
    loss: Callable[..., torch.Tensor] | None = None
    stages: Sequence[nn.Module] | None = None
    plan: Plan | None = None
    forwards: int = 1
    strict: bool = False
    max_shapes: int = 8
    times: str = "measure"
    kernels: str = "auto"
    compilations: int = 3
    cuda_graphs: bool = True
    accumulates: bool = False
    offload: str = "never"
    host_budget: int | str | None = None
    link: float | str | None = None

    def __post_init__(self) -> None:
        if self.times not in ("measure", "estimate"):
            raise InputError("times", f'must be "measure" or "estimate", not {self.times!r}')
        if self.kernels not in ("auto", "torch", "inductor"):
            raise InputError("kernels", f'must be "auto", "torch" or "inductor", not {self.kernels!r}')
        if self.offload not in ("never", "auto", "always"):
            raise InputError("offload", f'must be "never", "auto" or "always", not {self.offload!r:.40}')
        if self.host_budget is not None:
            parse_bytes(self.host_budget, field="host_budget", device_bytes=1)
        if self.link is not None:
            parse_rate(self.link)
        for name in ("max_shapes", "forwards", "compilations"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(name, f"must be a whole number of at least 1, not {value!r:.40}")
        if self.loss is not None:
            _check_loss(self.loss)
        if self.stages is not None:
            self._check_stages(self.stages)
        if self.plan is not None and not isinstance(self.plan, Plan):
            raise InputError("plan", f"must be an elbowroom.Plan or the path of a saved one, not {self.plan!r:.40}")

    def _check_stages(self, stages: Sequence[nn.Module]) -> None:
        if isinstance(stages, str) or not isinstance(stages, Sequence | nn.Sequential | nn.ModuleList):
            raise InputError("stages", f"must be a list of modules, not {type(stages).__name__}")
        if not len(stages):
            raise InputError("stages", "is empty; list the modules that the model runs one after another")
        if self.kernels == "inductor":
            raise InputError("kernels", "fused ones are for traced models, not for stages cut by hand")
        for i, stage in enumerate(stages):
            if not isinstance(stage, nn.Module):
                raise InputError(f"stages[{i}]", "must be a torch.nn.Module, so that its parameters are known")
        if self.forwards > 1:
            raise InputError("forwards", "more than one is for traced models, not for stages cut by hand")
        if self.plan is not None:
            raise InputError("plan", "is for programs, not for stages cut by hand; leave one of them out")

    @classmethod
    def of(cls, budget: int | str, wishes: Mapping[str, Any]) -> Options:
        """From the keywords of a call."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in wishes if name not in known]
        if unknown:
            raise InputError(unknown[0], f"is not an option; there are {', '.join(known)}")
        plan = wishes.get("plan")
        given = {"plan": Plan.load(plan)} if isinstance(plan, str | Path) else {}
        return cls(budget, **{**wishes, **given})

    def for_model(self, model: nn.Module) -> Options:
        """The same with its budget in bytes and its kernels chosen."""
        kernels = "torch" if self.stages is not None else choose_kernels(self.kernels, model.parameters())
        return replace(self, budget=parse_bytes(self.budget, device_bytes=device_bytes(model)), kernels=kernels)

    @property
    def budget_bytes(self) -> int:
        """Once it is known for which model."""
        assert isinstance(self.budget, int)
        return self.budget

    @property
    def estimate(self) -> bool:
        return self.times == "estimate"

    @property
    def fuses(self) -> bool:
        """Once it is known for which model."""
        return self.kernels == "inductor"

    @property
    def records(self) -> bool:
        """Whether programs may be replayed as CUDA graphs."""
        return self.fuses and self.cuda_graphs


def choose_kernels(wish: str, tensors: Iterable[Any]) -> str:
    """PyTorch's or Inductor's. By default fused ones where they are known to pay: on a GPU with a compiler for it."""
    if wish != "auto":
        return wish
    on_gpu = any(isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda" for tensor in tensors)
    return "inductor" if on_gpu and has_triton() else "torch"


def _check_loss(loss: Any) -> None:
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise InputError("loss", f"is the class {loss.__name__}; pass an instance, such as {loss.__name__}()")
    if not callable(loss):
        said = "must be a function of the output, or of the output and a target"
        raise InputError("loss", f"{said}, such as torch.nn.functional.cross_entropy, not {loss!r:.40}")
