"""What runs again, counted: a fitted step does the arithmetic of the plain one, and that of its program's reruns.

FLOPs do not depend on the machine. PyTorch's own counter counts them, in plain execution around the whole step, in a
fitted one around each program: around a compiled model, the counter would stop it from running.
"""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from elbowroom.measure.estimate import flops_of  # noqa: E402
from fusible import cnn, transformer  # noqa: E402
from steps import zero  # noqa: E402
from trained import Net, batch, only_entry, tight  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")

MODELS = {"transformer": transformer, "cnn": cnn, "residual blocks": lambda: (Net(), batch())}


def plain_flops(model, example) -> int:
    with FlopCounterMode(display=False) as counted:
        model(*example).backward()
    return counted.get_total_flops()


def fitted_flops(fitted, example) -> int:
    counters = []

    def counter():
        counters.append(FlopCounterMode(display=False))
        return counters[-1]

    (region,) = only_entry(fitted).regions
    region.watch = counter
    zero(fitted)
    fitted(*example).backward()
    assert len(counters) == 2  # a forward and a backward
    return sum(counted.get_total_flops() for counted in counters)


def rerun_flops(fitted) -> int:
    (region,) = only_entry(fitted).regions
    return sum(times * flops_of(region.traced.nodes[op]) for op, times in region.program.reruns.items())


@pytest.mark.parametrize("name", MODELS)
def test_more_arithmetic_than_plainly_is_that_of_the_reruns(name):
    model, example = MODELS[name]()
    plain = plain_flops(copy.deepcopy(model), example)
    fitted = tight(model, *example, kernels="torch", share=0.0)
    assert rerun_flops(fitted) > 0
    assert fitted_flops(fitted, example) - plain == rerun_flops(fitted)
    fitted.elbowroom.set_budget("1TiB")
    assert rerun_flops(fitted) == 0
    assert fitted_flops(fitted, example) == plain > 0
