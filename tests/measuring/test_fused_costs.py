"""What operators of a fused graph cost: heavy ones by themselves, the rest the memory they move."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from elbowroom.capture.backend import make_backend  # noqa: E402
from elbowroom.capture.joint_graph import tensor_bytes  # noqa: E402
from elbowroom.execute.region import Looks  # noqa: E402
from elbowroom.measuring import fused  # noqa: E402
from elbowroom.measuring.fused import is_heavy, measure_fused  # noqa: E402
from elbowroom.measuring.ops import CHANNELS_LAST  # noqa: E402


def measured(model: nn.Module, x: torch.Tensor):
    """The contracted graph of a model, its operators' times estimated."""
    found, looks = [], Looks()
    looks.calls = []  # the graph is only looked at: nothing is compiled
    torch._dynamo.reset()
    torch.compile(model, backend=make_backend(found.append, pytest.fail, looks, fused=True), dynamic=False)(x)
    (region,) = found
    measure_fused(region.captured, estimate=True)
    return region.captured


def times(captured, word: str) -> dict[str, float]:
    return {op.name: op.time for op in captured.joint.ops if word in op.target}


def test_everything_that_runs_takes_time():
    captured = measured(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)), torch.randn(64, 32))
    for op in captured.joint.ops:
        runs = op.kind in ("forward", "backward") and op.target != "getitem" and not op.is_view
        assert (op.time > 0) == runs, op.name


def test_only_products_convolutions_and_attention_are_heavy():
    captured = measured(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), torch.randn(2, 3, 8, 8))
    heavy = {op.target for op, node in zip(captured.joint.ops, captured.nodes, strict=True) if is_heavy(node)}
    assert heavy == {"aten.convolution.default", "aten.convolution_backward.default"}


def test_a_pointwise_chain_costs_the_memory_it_moves_once():
    x = torch.randn(1000, 1000)
    chain = measured(nn.Sequential(nn.Linear(1000, 1000), nn.Tanh(), nn.Sigmoid(), nn.Linear(1000, 8)), x)
    short = measured(nn.Sequential(nn.Linear(1000, 1000), nn.Tanh(), nn.Linear(1000, 8)), x)

    def between(captured):
        return [
            op.time
            for op, node in zip(captured.joint.ops, captured.nodes, strict=True)
            if op.kind == "forward" and not is_heavy(node) and tensor_bytes(node) == 4_000_000
        ]

    assert between(chain) == between(short)
    assert len(between(chain)) == 1


def test_a_reduction_over_rows_is_half_read_by_the_kernel_that_uses_it():
    x = torch.randn(64, 8, 16, 16)
    rows = times(measured(nn.Sequential(nn.Conv2d(8, 8, 1), nn.LayerNorm([8, 16, 16])), x), "var_mean")
    channels = times(measured(nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)), x), "var_mean")
    assert 1.5 < max(channels.values()) / max(rows.values()) < 2.5


@pytest.mark.parametrize(("wish", "time", "expected"), [(True, 9.0, True), (False, 0.5, True), (False, 2.0, False)])
def test_on_a_gpu_convolutions_choose_their_layout_where_inductor_would_not(monkeypatch, wish, time, expected):
    """Measured channels last a convolution takes `time` seconds, else one."""
    captured = measured(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), torch.randn(2, 3, 8, 8))

    def costs_of(nodes, device, estimate, report):
        return {key: (time if key.endswith(CHANNELS_LAST) else 1.0, 0, ()) for key in nodes}

    monkeypatch.setattr(fused, "costs_of", costs_of)
    monkeypatch.setattr(fused, "inductors_layout", lambda captured: wish)
    channels_last = measure_fused(replace(captured, device=torch.device("cuda")), estimate=True)
    assert channels_last == expected
    assert set(times(captured, "convolution").values()) == {time if expected else 1.0}
