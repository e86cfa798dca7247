"""Networks of the zoo as joint graphs, traced once in a process; times are estimated, so that no machine matters."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch

from elbowroom.capture.backend import capture_settings, make_backend
from elbowroom.execute.region import Looks, Region
from elbowroom.execute.session import measure_region, surroundings
from elbowroom.joint import Joint
from elbowroom.program import Surroundings
from zoo import ZOO, Network, t5

NETWORKS = {**ZOO, "t5, four decoder layers": Network("", partial(t5, decoder_layers=4), ZOO["t5"].batch)}


@cache
def captured(name: str, *, fused: bool = False) -> tuple[Joint, Surroundings]:
    """The only graph of a network, and what is around it; `fused`: as a fusing compiler runs it."""
    torch._dynamo.reset()
    torch.set_num_threads(1)  # parallel tests would fight
    regions: list[Region] = []
    looks = Looks()
    looks.calls = []
    network = NETWORKS[name]
    model = network.build().train()
    backend = make_backend(regions.append, pytest.fail, looks, fused=fused)
    with capture_settings(8):
        torch.compile(lambda *batch: model(*batch), backend=backend, dynamic=False)(*network.batch())
    (region,) = regions
    measure_region(region, estimate=True)
    return region.captured.joint, surroundings(region, loss_inside=True)
