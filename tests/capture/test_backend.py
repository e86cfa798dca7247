"""What tracing would write out and eager runs whole is traced whole: the same bits, and the time of one kernel."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.capture import backend  # noqa: E402
from elbowroom.execute.verification import verify_step  # noqa: E402
from fitted import least_budget  # noqa: E402

SMOOTH = "linear", "bilinear", "bicubic", "trilinear"


class Interpolates(nn.Module):
    def __init__(self, mode: str, dimensions: int, antialias: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(9, 9), nn.Linear(13, 4)
        self.size = (13,) * dimensions
        self.options = {"mode": mode, "antialias": antialias, "align_corners": False if mode in SMOOTH else None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(F.interpolate(torch.sin(self.first(x)), self.size, **self.options)))


class Loss(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))
        self.function = function

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.function(self.layers(x), target)


def image(dimensions: int) -> torch.Tensor:
    return torch.randn(2, 3, *(9,) * dimensions)


CASES = {
    "nearest": lambda: (Interpolates("nearest", 2), image(2)),
    "nearest-exact": lambda: (Interpolates("nearest-exact", 3), image(3)),
    "linear": lambda: (Interpolates("linear", 1), image(1)),
    "bilinear": lambda: (Interpolates("bilinear", 2), image(2)),
    "trilinear": lambda: (Interpolates("trilinear", 3), image(3)),
    "bicubic": lambda: (Interpolates("bicubic", 2), image(2)),
    "bilinear, antialiased": lambda: (Interpolates("bilinear", 2, antialias=True), image(2)),
    "one label": lambda: (Loss(F.multi_margin_loss), torch.randn(5, 8), torch.randint(6, (5,))),
    "labels": lambda: (Loss(F.multilabel_margin_loss), torch.randn(5, 8), torch.tensor([[0, 3, -1, 1, 1, 1]] * 5)),
}


MIXED = "bilinear", "bicubic", "one label"


@pytest.mark.parametrize(("name", "mixed"), [*((name, False) for name in CASES), *((name, True) for name in MIXED)])
def test_the_step_has_eagers_bits_with_everything_saved_and_with_little(name, mixed):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, *batch = CASES[name]()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        fitted = elbowroom.fit(copy.deepcopy(model), *batch, budget="1GiB", kernels="torch")
        assert verify_step(fitted.elbowroom, tuple(batch), {}).against == "eager"
        fitted.elbowroom.set_budget(least_budget(fitted))
        assert verify_step(fitted.elbowroom, tuple(batch), {}).against == "eager"


class Remembers(nn.Module):
    """Traced, a recurrent layer runs other kernels than eager's; then the reference is a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.last = nn.LSTM(9, 9, batch_first=True), Interpolates("bilinear", 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.recurrent(x)[0].view(1, 2, 9, 9))


def test_where_a_trace_is_the_reference_it_is_made_alike():
    torch._dynamo.reset()
    batch = (torch.randn(2, 9, 9),)
    fitted = elbowroom.fit(Remembers(), *batch, budget="1GiB", kernels="torch")
    assert verify_step(fitted.elbowroom, batch, {}).against == "aot_eager"


def test_others_trace_as_before():
    op = torch.ops.aten.upsample_bilinear2d.vec
    before = dict(op.py_kernels)
    with backend.kept_whole():
        assert before.keys() - op.py_kernels.keys() == {
            torch._C.DispatchKey.Autograd,
            torch._C.DispatchKey.CompositeImplicitAutograd,
        }
    assert op.py_kernels == before
