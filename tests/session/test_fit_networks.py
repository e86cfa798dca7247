"""Real networks, each at several budgets: the budget is kept, the prediction is right, nothing else changes."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.capture.rewrites import rewrite  # noqa: E402
from elbowroom.execute.verification import verify_step  # noqa: E402
from elbowroom.measure.estimate import flops_of  # noqa: E402
from fitted import least_budget, step_peak  # noqa: E402
from zoo import ZOO  # noqa: E402

SHARES = (1.0, 0.5)  # of what the plain step needs, resident state aside
DIFFERS_FROM_EAGER = {"lstm"}  # traced, it runs other kernels than eager's; `verify_step` shows that


# Others of their kind are tried every time.
RARELY = "swin", "clip", "bert", "convnext", "inception"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in RARELY else name for name in ZOO]
)
def test_a_network_within_its_budgets(name: str) -> None:
    """At every share that is feasible, and at the least budget: peak, prediction, FLOPs, and every bit."""
    torch._dynamo.reset()
    network = ZOO[name]
    model, batch = network.build(), network.batch()
    reference = copy.deepcopy(model)
    plain = step_peak(reference, batch)
    assert all(p.grad is not None and p.grad.any() for p in reference.parameters()), "it does not train"
    fitted = elbowroom.fit(model, *batch, budget="1TiB", strict=True)
    (entry,) = fitted.elbowroom.entries.values()
    resident = entry.plan.resident_bytes
    least = least_budget(fitted)
    budgets = [b for share in SHARES if (b := resident + int(plain * share)) >= least]
    assert len(budgets) >= (1 if name == "vgg" else 2), "the network leaves nothing to choose"
    for budget in [*budgets, least]:
        fitted.elbowroom.set_budget(budget)
        flops = CountFlops()
        for region in entry.regions:
            region.watch = lambda flops=flops: flops
        measured = step_peak(fitted, batch)
        for region in entry.regions:
            region.watch = nullcontext
        assert resident + measured <= budget
        assert entry.plan.peak_bytes - resident == pytest.approx(measured, rel=0.01)
        assert flops.total == planned_flops(entry)
        against = verify_step(fitted.elbowroom, batch, {}).against
        assert against == ("aot_eager" if name in DIFFERS_FROM_EAGER else "eager")
    assert entry.plan.time_s > entry.plan.plain_time_s  # at the least budget something is recomputed


def test_a_network_whose_gradients_are_kept_in_parts(monkeypatch):
    """As above, where a part of a gradient need not outlive the rest by much, nor be large, to be copied."""
    monkeypatch.setattr(rewrite, "_LARGE", 1)
    monkeypatch.setattr(rewrite, "_LONG", {False: 10})
    test_a_network_within_its_budgets("unet")


class CountFlops(TorchDispatchMode):
    """Counts below autograd, inside the programs: entered around a compiled model it would stop it from running."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if (packet := getattr(func, "_overloadpacket", None)) in flop_registry:
            self.total += int(flop_registry[packet](*args, **(kwargs or {}), out_val=out))
        return out


def planned_flops(entry) -> int:
    total = 0
    for region in entry.regions:
        runs = (*region.program.forward_runs, *region.program.backward_runs)
        total += sum(flops_of(region.traced.nodes[run.op]) for run in runs)
    return total
