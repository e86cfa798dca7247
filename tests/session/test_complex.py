"""Complex numbers: conjugates are shown rather than computed, and whoever computes them takes memory."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.execute.verification import verify_step  # noqa: E402
from elbowroom.step.allocator import MARGIN  # noqa: E402
from trained import only_entry, tight  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")

LAYERS = {
    "products of elements": lambda x, w: torch.tanh(x * w),
    "products of matrices": lambda x, w: torch.sin(x @ w),
    "adjoints": lambda x, w: torch.sin(x @ w.mH),
    "conjugates": lambda x, w: (x.conj() * w.conj()).sigmoid(),
    "polar": lambda x, w: torch.polar((x * w).abs(), (x * w).angle()),
    "real and imaginary": lambda x, w: torch.complex(torch.relu((x @ w).real), torch.tanh((x @ w).imag)),
}


class Rotations(nn.Module):
    def __init__(self, layer, width: int = 32, depth: int = 5) -> None:
        super().__init__()
        made = torch.randn(depth, width, width, dtype=torch.complex64) / width**0.5
        self.weights = nn.ParameterList(nn.Parameter(weight) for weight in made)
        self.layer = LAYERS[layer]

    def forward(self, x):
        for weight in self.weights:
            x = self.layer(x, weight)
        return x.abs().square().mean()


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_peak_is_the_predicted_one_and_every_bit_is_equal(layer, share):
    torch.manual_seed(0)
    model, x = Rotations(layer), torch.randn(32, 32, dtype=torch.complex64)
    fitted = tight(model, x, share=share, times="measure")
    fitted(x).backward()
    model.zero_grad()
    with elbowroom.measure("cpu") as taken:
        fitted(x).backward()
    plan = only_entry(fitted).plan
    room = plan.peak_bytes - plan.start_bytes
    assert room <= taken.peak_bytes + MARGIN
    assert taken.peak_bytes <= room + MARGIN
    # Traced or not, PyTorch multiplies conjugates in other ways: `verify_step` knows which of them is the measure.
    assert verify_step(fitted.elbowroom, (x,), {}).against in ("eager", "aot_eager")
