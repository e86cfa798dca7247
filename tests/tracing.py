"""Functions and models as graphs of operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from elbowroom.capture.backend import make_backend
from elbowroom.execute.region import Looks, Region


def traced(function, *inputs):
    """Decomposed before it is differentiated, as AOT autograd does."""
    with enable_python_dispatcher():
        return make_fx(lambda *args: function(*args), select_decomp_table(), tracing_mode="fake")(*inputs)


def looked_at(model: nn.Module, *example: Any, fused: bool = False, beside: bool = False) -> tuple[Any, Region, Any]:
    """The model as PyTorch compiled it, its only graph, and what it returned. Nothing is measured or compiled.

    `beside`: those that were looked at before are still to be used.
    """
    if not beside:
        torch._dynamo.reset()
    regions: list[Region] = []
    looks = Looks()
    looks.begin(ends=False)
    backend = make_backend(lambda captured: Region(captured, looks), regions.append, pytest.fail, fused=fused)
    compiled = torch.compile(lambda *args: model(*args), backend=backend, dynamic=False)
    outputs = compiled(*example)
    (region,) = regions
    return compiled, region, outputs
