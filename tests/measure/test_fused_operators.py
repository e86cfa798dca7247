"""What operators of a fused graph cost: heavy ones by themselves, the rest the memory they move."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from elbowroom.capture.operators import draws  # noqa: E402
from elbowroom.capture.traced_values import tensor_bytes  # noqa: E402
from elbowroom.measure import fused_operators, plain_operators  # noqa: E402
from elbowroom.measure.fused_operators import is_heavy, measure_fused  # noqa: E402
from elbowroom.measure.plain_operators import CHANNELS_LAST, KERNELS_ALONE  # noqa: E402
from tracing import looked_at  # noqa: E402


def measured(model: nn.Module, x: torch.Tensor):
    """The contracted graph of a model, its operators' times estimated."""
    _, region, _ = looked_at(model, x, fused=True)
    captured, _ = measure_fused(region.traced, estimate=True)
    return captured


def times(captured, word: str) -> dict[str, float]:
    return {op.name: op.time for op in captured.graph.ops if word in op.target}


def test_everything_that_runs_takes_time():
    captured = measured(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)), torch.randn(64, 32))
    for op in captured.graph.ops:
        runs = op.kind in ("forward", "backward") and op.target != "getitem" and not op.is_view
        assert (op.time > 0) == runs, op.name


def test_only_products_convolutions_and_attention_are_heavy():
    captured = measured(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), torch.randn(2, 3, 8, 8))
    heavy = {op.target for op, node in zip(captured.graph.ops, captured.nodes, strict=True) if is_heavy(node)}
    assert heavy == {"aten.convolution.default", "aten.convolution_backward.default"}


def test_a_pointwise_chain_costs_the_memory_it_moves_once():
    x = torch.randn(1000, 1000)
    chain = measured(nn.Sequential(nn.Linear(1000, 1000), nn.Tanh(), nn.Sigmoid(), nn.Linear(1000, 8)), x)
    short = measured(nn.Sequential(nn.Linear(1000, 1000), nn.Tanh(), nn.Linear(1000, 8)), x)

    def between(captured):
        return [
            op.time
            for op, node in zip(captured.graph.ops, captured.nodes, strict=True)
            if op.kind == "forward" and not is_heavy(node) and tensor_bytes(node) == 4_000_000
        ]

    assert between(chain) == between(short)
    assert len(between(chain)) == 1


def test_a_reduction_over_rows_is_half_read_by_the_kernel_that_uses_it():
    x = torch.randn(64, 8, 16, 16)
    rows = times(measured(nn.Sequential(nn.Conv2d(8, 8, 1), nn.LayerNorm([8, 16, 16])), x), "var_mean")
    channels = times(measured(nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)), x), "var_mean")
    assert 1.5 < max(channels.values()) / max(rows.values()) < 2.5


def test_random_numbers_take_their_time_where_that_is_longer_than_what_is_moved(monkeypatch):
    real = fused_operators.costs_of

    def slow(nodes, *args):
        return {key: (1.0, 0, ()) if draws(nodes[key]) else cost for key, cost in real(nodes, *args).items()}

    monkeypatch.setattr(fused_operators, "costs_of", slow)
    captured = measured(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 8)), torch.randn(64, 32))
    drawn = times(captured, "aten.gt")
    assert len(drawn) == 1
    for op in captured.graph.ops:
        assert (op.time > 1) == (op.name in drawn), op.name


@pytest.mark.parametrize(("wish", "time", "expected"), [(True, 9.0, True), (False, 0.5, True), (False, 2.0, False)])
def test_on_a_gpu_convolutions_choose_their_layout_where_inductor_would_not(monkeypatch, wish, time, expected):
    """Measured channels last a convolution takes `time` seconds, else one."""
    captured = measured(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), torch.randn(2, 3, 8, 8))

    def costs_of(nodes, device, given, estimate, report):
        return {key: (time if key.endswith(CHANNELS_LAST) else 1.0, 0, ()) for key in nodes}

    monkeypatch.setattr(fused_operators, "costs_of", costs_of)
    monkeypatch.setattr(fused_operators, "inductors_layout", lambda captured: wish)
    on_gpu, channels_last = measure_fused(replace(captured, device=torch.device("cuda")), estimate=True)
    assert channels_last == expected
    assert set(times(on_gpu, "convolution").values()) == {time if expected else 1.0}


class Clock:
    """A GPU that needs `kernel_s` for an operator once the host has launched it, and that sleeps when told to."""

    kernel_s, host_s = 1e-5, 1e-4

    def __init__(self) -> None:
        self.host = self.free = 0.0  # what time it is for the host, and when the GPU will have done all it has

    def perf_counter(self) -> float:
        return self.host

    def launch(self, seconds: float) -> None:
        self.host += self.host_s
        self.free = max(self.free, self.host) + seconds

    def sleep(self, cycles: int) -> None:
        self.free = max(self.free, self.host) + cycles / 1.5e9

    def event(self, **_):
        clock = self

        class Event:
            def record(self) -> None:
                self.time = max(clock.free, clock.host)

            def synchronize(self) -> None:
                clock.synchronize()

            def elapsed_time(self, other) -> float:
                return 1e3 * (other.time - self.time)

        return Event()

    def synchronize(self, *_) -> None:
        self.host = self.free = max(self.free, self.host)


@pytest.mark.parametrize(("suffix", "expected"), [(KERNELS_ALONE, Clock.kernel_s), ("", Clock.host_s)])
def test_on_a_gpu_a_kernel_is_timed_without_the_host_where_that_does_not_count(monkeypatch, suffix, expected):
    clock = Clock()
    monkeypatch.setattr(plain_operators, "clock", clock)
    monkeypatch.setattr(plain_operators, "_output_bytes", lambda *_: ())
    on_gpu = {"Event": clock.event, "_sleep": clock.sleep, "synchronize": clock.synchronize}
    memory = {"reset_peak_memory_stats": 0, "max_memory_allocated": 7, "memory_allocated": 3}
    for name, stand_in in {**on_gpu, **{name: lambda *_, size=size: size for name, size in memory.items()}}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    nodes, device = {f"mm{suffix}": None}, torch.device("cuda")
    costs = plain_operators._measure_cuda(
        nodes, device, lambda node, **_: lambda: clock.launch(clock.kernel_s), lambda part: None
    )
    ((seconds, workspace, _),) = costs.values()
    assert seconds == pytest.approx(expected, rel=0.01)
    assert workspace == 4
