"""Tiny models traced as `fit` traces them: `capture(model, *example)` looks at one, and `train` runs a step of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest


@dataclass
class Capture:
    """A traced model. `region.traced` is what the rewrites left of its graph."""

    compiled: Any
    region: Any
    outputs: Any

    @property
    def nodes(self) -> list[Any]:
        return self.region.traced.nodes

    @property
    def graph(self) -> Any:
        return self.region.traced.graph

    @property
    def targets(self) -> list[str]:
        return [op.target for op in self.graph.ops]

    @property
    def effects(self) -> list[str]:
        return [self.graph.ops[op].target for op in self.graph.effects]

    def train(self, *example: Any, again: bool = False, copies_parts: bool = True) -> Any:
        """One step: everything saved, or everything the backward reads computed again."""
        from elbowroom.execute.region import Build
        from elbowroom.measure.measured import Measured
        from elbowroom.step.program import make_program

        order = [*self.graph.forward, *self.graph.backward] if again else self.graph.backward
        self.region.looks.calls = None
        self.region.install(
            Build(Measured(self.region.traced), make_program(self.graph, order, copies_parts=copies_parts))
        )
        outputs = self.compiled(*example)
        total(outputs).backward()
        return outputs


def total(outputs: Any) -> Any:
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum(part.square().sum() for part in parts if part.requires_grad)


@pytest.fixture
def capture():
    torch = pytest.importorskip("torch")
    from tracing import looked_at

    torch.manual_seed(0)

    def look(model: Any, *example: Any) -> Capture:
        return Capture(*looked_at(model, *example))

    return look
