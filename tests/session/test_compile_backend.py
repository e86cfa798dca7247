"""`torch.compile(model, backend="elbowroom")`."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")


from torch._dynamo.exc import BackendCompilerFailed  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.errors import InputError  # noqa: E402
from elbowroom.session import compile_backend  # noqa: E402
from elbowroom.session.graph_group import GraphGroup  # noqa: E402
from elbowroom.units import parse_bytes  # noqa: E402
from fusible import gradients, needs_compiler, perceptron, set_gradients  # noqa: E402
from trained import Net, assert_same_state, batch  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


def test_the_compile_backend():
    model, reference = Net(), Net()
    reference.load_state_dict(model.state_dict())
    plan = elbowroom.plan(model, *batch(), budget="1GiB", times="estimate")
    budget = plan.resident_bytes + (plan.peak_bytes - plan.resident_bytes) * 2 // 3
    compiled = torch.compile(
        model, backend="elbowroom", options={"budget": budget, "times": "estimate"}, dynamic=False
    )
    torch.manual_seed(3)
    compiled(*batch()).backward()
    torch.manual_seed(3)
    reference(*batch()).backward()
    assert_same_state(reference, model)


class InTwo(torch.nn.Module):
    """Two graphs, with Python between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = perceptron()[0], perceptron()[0]

    def forward(self, x):
        between = self.first(x)
        torch._dynamo.graph_break()
        return self.second(between).square().sum()


@pytest.mark.parametrize("host_budget", ["6KiB", "100MiB"])
def test_values_of_several_graphs_move_within_one_host_budget(host_budget, monkeypatch):
    groups = []
    monkeypatch.setattr(compile_backend, "GraphGroup", lambda: groups.append(GraphGroup()) or groups[-1])
    model, x = InTwo(), torch.randn(32, 16)
    model(x).backward()
    expected = gradients(model)
    options = {"budget": "34KiB", "offload": "always", "host_budget": host_budget, "link": "1GB/s"}
    compiled = torch.compile(model, backend="elbowroom", options=options | {"kernels": "torch", "times": "estimate"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the budget is for one of the two
        for _ in range(3):
            set_gradients(model, None)
            compiled(x).backward()
            for found, wanted in zip(gradients(model), expected, strict=True):
                assert torch.equal(found, wanted)
    (group,) = groups
    held = [region.host_bytes for region in group._members]
    assert held[0] > 0 or host_budget == "6KiB"  # as little as that need not be of use
    assert sum(held) == group.host_room.bytes <= parse_bytes(host_budget)


@needs_compiler
@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("fails", [False, True])
def test_the_compile_backend_with_fused_kernels(monkeypatch, fails):
    model, x = perceptron()
    model(x).square().sum().backward()
    expected = gradients(model)
    set_gradients(model, None)
    if fails:
        monkeypatch.setattr("elbowroom.execute.fused.compile_fx_inner", None)
    options = {"budget": "1GiB", "kernels": "inductor", "times": "estimate"}
    compiled = torch.compile(model, backend="elbowroom", options=options)
    with pytest.warns(UserWarning, match=r"PyTorch's own kernels.*compiling it failed") if fails else nullcontext():
        compiled(x).square().sum().backward()
    for found, wanted in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {},
            r"options: needs a budget, such as \{\"budget\": \"8GiB\"\}; elbowroom takes budget, times, kernels",
        ),
        ({"budget": "1GiB", "bugdet": 1}, "options: has no 'bugdet'; elbowroom takes budget, times, kernels"),
        ({"budget": "1GiB", "loss": None}, "options: has no 'loss'"),
        ({"budget": "1GiB", "optimizer": torch.optim.Adam}, r"options\.optimizer: is the class Adam"),
        ({"budget": "lots"}, r"options\.budget: "),
        ({"budget": "1GiB", "times": "guess"}, r"options\.times: must be"),
        ({"budget": "1GiB", "kernels": "triton"}, r"options\.kernels: must be"),
    ],
)
def test_options_that_make_no_sense_are_named(options, said):
    model, x = perceptron()
    with pytest.raises(BackendCompilerFailed, match=said) as failure:
        torch.compile(model, backend="elbowroom", options=options)(x)
    assert isinstance(failure.value.inner_exception, InputError)
