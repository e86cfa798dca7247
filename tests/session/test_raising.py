"""What raises an error where values are not as they should be does so under a plan, too.

PYTEST_DONT_REWRITE: these assertions are the models' own.
"""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.errors import Unplanned  # noqa: E402
from fusible import needs_compiler  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh", "quick_compiler")
KERNELS = ["torch", pytest.param("inductor", marks=needs_compiler)]


class Asserts(nn.Module):
    def __init__(self, *message: str) -> None:
        super().__init__()
        self.layer, self.message = nn.Linear(6, 6), message

    def forward(self, x):
        h = torch.tanh(self.layer(x))
        if self.message:
            assert x.sum() < 100, "too large"
        else:
            assert x.sum() < 100
        return torch.tanh(self.layer(h)).square().mean()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("message", [(), ("too large",)])
def test_assertions_about_tensors(kernels, message):
    model, x = Asserts(*message), torch.zeros(6, 6)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fitted = elbowroom.fit(model, x, budget="1MiB", kernels=kernels, times="estimate")
    assert any("fused kernels do not check" in str(each.message) for each in said) == (kernels == "inductor")
    for _ in range(2):
        with pytest.raises(AssertionError) as raised:
            fitted(x + 100)
        assert raised.value.args == message
        fitted(x).backward()
    assert fitted.elbowroom.plan.peak_bytes


class Checked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        torch._assert_async(gradient.sum() < 100, "too large")
        return gradient * 2


class AssertsInBackward(Asserts):
    def forward(self, x):
        return Checked.apply(torch.tanh(self.layer(x))).square().mean()


def test_assertions_in_a_backward_are_not_planned_and_said():
    x = torch.zeros(6, 6)
    with pytest.warns(UserWarning, match="its backward asserts something"):
        elbowroom.fit(AssertsInBackward(), x, budget="1MiB", times="estimate")(x).backward()
    with pytest.raises(Unplanned, match="its backward asserts something"):
        elbowroom.fit(AssertsInBackward(), x, budget="1MiB", times="estimate", strict=True)


class Inverts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return torch.linalg.inv(self.layer(x) * x.mean() + x.mean() * torch.eye(6)).sum()


def test_a_matrix_without_an_inverse():
    x = torch.ones(6, 6)
    with pytest.warns(UserWarning, match="has effects besides its value"):
        fitted = elbowroom.fit(Inverts(), x, budget="1MiB", times="estimate")
    with pytest.raises(torch.linalg.LinAlgError):
        fitted(torch.zeros(6, 6))
    fitted(x).backward()
