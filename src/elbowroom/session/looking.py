"""Looking at a model: traces one call, computing outputs only; tells which graphs it runs and what it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from elbowroom.capture.backend import capture_settings, make_backend
from elbowroom.capture.unplanned import hooked_modules, unplanned_nodes
from elbowroom.errors import ElbowroomError
from elbowroom.execute.region import Looks, Region
from elbowroom.measure.random_state import random_state_kept


@dataclass(frozen=True)
class Sight:
    """The graphs that one call runs, in order; a graph may run twice. `left_out` says what no graph holds, if any."""

    regions: tuple[Region, ...]
    left_out: str = ""


class Looker:
    """Traces a step, a function that calls the model, and runs it as traced.

    `on_capture` is called with a graph that is traced in the middle of a step, and must install a program.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Callable[..., Any],
        on_capture: Callable[[Region], None],
        *,
        fused: bool,
        graph_limit: int,
    ) -> None:
        self.model = model
        self._looks = Looks()
        self._refusals: list[str] = []
        self._graph_limit = graph_limit

        def captured(region: Region) -> None:
            if self._looks.calls is None:
                on_capture(region)

        backend = make_backend(
            lambda traced: Region(traced, self._looks), captured, self._refusals.append, fused=fused
        )
        self._compiled = torch.compile(step, backend=backend, dynamic=False)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The step as it was traced, with the programs that are installed."""
        with capture_settings(self._graph_limit), _own_errors():
            return self._compiled(*args, **kwargs)

    def look(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sight:
        """What one call runs. Changes no buffer and no random state."""
        self._refusals[:] = []
        if hooked := hooked_modules(self.model):
            hook = f"module {hooked[0]!r} has a backward hook, which tracing does not see"
            return Sight((), f"{hook}; remove it, or pass stages=[…]")
        self._looks.calls = []
        try:
            with random_state_kept(), torch.enable_grad():
                outputs = self.run(args, kwargs)
            left_out = unplanned_nodes(self.model, outputs)
        finally:
            regions, self._looks.calls = tuple(self._looks.calls or ()), None
        return Sight(regions, self._said_of(regions, left_out))

    def _said_of(self, regions: tuple[Region, ...], left_out: str) -> str:
        if self._refusals:
            return self._refusals[0]
        if not regions:
            return "PyTorch did not trace it"
        if left_out:
            return (
                f"part of it runs outside the traced graphs ({left_out}); TORCH_LOGS=graph_breaks shows where "
                "tracing stops, and stages=[…] needs no tracing"
            )
        return ""


@contextmanager
def _own_errors() -> Iterator[None]:
    """Our errors as they are, not wrapped in PyTorch's report about a backend that failed."""
    try:
        yield
    except BackendCompilerFailed as report:
        if isinstance(report.inner_exception, ElbowroomError):
            raise report.inner_exception from None
        raise
