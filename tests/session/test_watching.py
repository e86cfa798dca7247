"""Where a watched step begins and ends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from elbowroom.session.watching import Watch, more_outside  # noqa: E402

MIB = 2**20


def test_a_backward_inside_of_another_ends_no_step():
    """As those of stages and of reentrant checkpoints."""
    ended = []
    watch = Watch(nn.Linear(1, 1), lambda _, start, taken: ended.append(taken - start))

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            watch.backward_begins()
            with torch.enable_grad():
                torch.ones(1, requires_grad=True).exp().backward()
            torch.ones(MIB, dtype=torch.uint8)  # what comes after it belongs to the step
            return gradient

    watch.begin(object(), SimpleNamespace(budget_bytes=0, resident={}), torch.device("cpu"), None)
    Node.apply(torch.ones(1, requires_grad=True)).backward()
    (taken,) = ended
    assert taken >= MIB


def test_what_a_plan_left_unused_was_taken_from_outside_too():
    plan = SimpleNamespace(budget_bytes=10 * MIB, peak_bytes=7 * MIB, resident={"outside the plan": MIB})
    assert more_outside(plan, 2 * MIB) == (1 + 3 + 2) * MIB + 2 * MIB // 8
