"""Networks of the zoo as step graphs, traced once in a process; times are estimated, so that no machine matters."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch

from elbowroom.capture.backend import make_backend
from elbowroom.capture.settings import capture_settings
from elbowroom.execute.region import Looks, Region
from elbowroom.measure.measured import Measured, measured
from elbowroom.session.planning import surroundings
from elbowroom.step.graph import StepGraph
from elbowroom.step.referee import Surroundings
from zoo import ZOO, Network, t5

NETWORKS = {**ZOO, "t5, four decoder layers": Network("", partial(t5, decoder_layers=4), ZOO["t5"].batch)}


@cache
def traced(name: str, *, fused: bool = False) -> tuple[Region, Measured]:
    """The only graph of a network, as a fusing compiler runs it if `fused`."""
    torch._dynamo.reset()
    torch.set_num_threads(1)  # parallel tests would fight
    regions: list[Region] = []
    looks = Looks()
    looks.begin(ends=False)
    network = NETWORKS[name]
    model = network.build().train()
    backend = make_backend(lambda captured: Region(captured, looks), regions.append, pytest.fail, fused=fused)
    with capture_settings(8):
        torch.compile(lambda *batch: model(*batch), backend=backend, dynamic=False)(*network.batch())
    (region,) = regions
    return region, measured(region.traced, estimate=True)


def captured(name: str, *, fused: bool = False) -> tuple[StepGraph, Surroundings]:
    """A network's graph, and what is around it."""
    _, graph = traced(name, fused=fused)
    return graph.captured.graph, surroundings(graph, True, {})
