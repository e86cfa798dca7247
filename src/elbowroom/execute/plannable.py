"""A captured graph with its costs and its planner: what planning, trials and installing work on together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elbowroom.capture.joint_graph import Captured
from elbowroom.execute.region import Build, Region, makes_gradients
from elbowroom.measure.measured import Measured
from elbowroom.plan.planner import Planned, Planner
from elbowroom.step.program import Program


@dataclass(frozen=True, eq=False)
class Plannable:
    """One graph of a step. The same one may come twice in a row, where a step runs it twice."""

    region: Region
    measured: Measured
    planner: Planner

    @property
    def device(self) -> torch.device:
        return self.region.traced.device

    def build(self, program: Program, *, recorded: bool = False) -> Build:
        return Build(self.measured, program, recorded, makes_gradients(self.planner.around))

    def install(self, planned: Planned) -> None:
        """From the next forward on, run what was planned."""
        self.region.install(self.build(planned.program, recorded=planned.recorded))
        self.region.sizes[self.region.current] = planned.peak_bytes, planned.prediction.saved_bytes


def recordable(captured: Captured) -> bool:
    """Whether everything that changes from step to step can be copied in and out."""
    graph, nodes = captured.graph, captured.nodes
    if captured.device.type != "cuda" or set(graph.inputs) & set(graph.results):
        return False
    values = [nodes[i].meta["val"] for i in (*graph.inputs, *graph.arriving, *graph.results)]
    return all(isinstance(value, torch.Tensor) and value.device == captured.device for value in values)
