"""The built-in networks against what others say of them: a paper, published counts, a measurement."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from elbowroom.errors import InputError
from elbowroom.problem import Chain, problem_from_json
from elbowroom.problem.networks import ACCELERATOR, NOTE, Machine, gpt, resnet101, vgg19
from elbowroom.solve import solve
from exhaustive import dynamic_peak

MIB = 2**20
COUNTER = Machine(1, math.inf, "counter")  # on it, times are numbers of floating-point operations
NETWORKS = pytest.mark.parametrize("chain", [resnet101(), gpt(), vgg19()], ids=["resnet101", "gpt", "vgg19"])


def forward_time(chain: Chain) -> float:
    return sum(stage.forward_time for stage in chain.stages)


def backward_time(chain: Chain) -> float:
    return sum(stage.backward_time for stage in chain.stages)


# --- VGG-19 and paper 003 ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpoints", "peak_mib"),
    [
        ([2, 4, 6, 9, 11, 14, 16, 19, 21, 23, 24], 4777.5),  # the paper's optimum
        ([3, 6, 24], 5169.5),
        ([5, 10, 15, 20, 24], 6737.5),
    ],
)
def test_vgg19_peaks_are_those_of_the_paper(checkpoints: list[int], peak_mib: float) -> None:
    assert dynamic_peak(list(vgg19().output_bytes), [0, *checkpoints]) == peak_mib * MIB


def test_vgg19_least_peak_is_that_of_the_paper() -> None:
    assert solve(vgg19(), solver="least-peak").notes["model_peak_bytes"] == 4777.5 * MIB


def test_vgg19_counts_outputs_only() -> None:
    chain = vgg19()
    assert len(chain) == 24
    assert chain.input_bytes == chain.input_gradient_bytes == 128 * 3 * 224 * 224 * 4
    for stage in chain.stages:
        assert stage.output_bytes == stage.saved_bytes == stage.gradient_bytes
        assert stage.forward_overhead_bytes == stage.backward_overhead_bytes == 0


def test_vgg19_cannot_go_below_its_second_convolution() -> None:
    """Two outputs and two gradients of 1,568 MiB beside the images: no schedule avoids them."""
    result = solve(vgg19(), 4777 * MIB, solver="persistent")
    assert not result.feasible
    assert result.least_budget == (73.5 + 4 * 1568) * MIB


# --- operations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("network", "multiply_adds"), [(resnet101, 7.801e9), (vgg19, 19.632e9)])
def test_operations_per_image_are_the_published_ones(network, multiply_adds: float) -> None:
    """torchvision states these counts for its models at 224²."""
    chain = network(batch=1, machine=COUNTER)
    assert forward_time(chain) == pytest.approx(2 * multiply_adds, rel=1e-3)
    assert backward_time(chain) == pytest.approx(2 * forward_time(chain), rel=0.02)


def test_gpt_operations_are_two_per_parameter_and_token_besides_attention() -> None:
    batch, tokens, layers, width, vocabulary = 2, 256, 6, 512, 1000
    chain = gpt(batch, tokens, layers, width, 8, vocabulary, machine=COUNTER)
    parameters = 12 * layers * width**2 + width * vocabulary
    attention = 4 * batch * tokens**2 * width * layers / 2  # two products, causal
    assert forward_time(chain) == 2 * parameters * batch * tokens + attention
    assert backward_time(chain) == 4 * parameters * batch * tokens + 2.5 * attention


def test_time_is_that_of_the_slower_of_arithmetic_and_memory() -> None:
    chain = resnet101(batch=2)
    arithmetic = resnet101(batch=2, machine=replace(ACCELERATOR, bytes_per_second=math.inf))
    memory = resnet101(batch=2, machine=replace(ACCELERATOR, flops_per_second=math.inf))
    for both, one, other in zip(chain.stages, arithmetic.stages, memory.stages, strict=True):
        assert both.forward_time >= max(one.forward_time, other.forward_time)
        assert both.forward_time <= (one.forward_time + other.forward_time) * (1 + 1e-12)
    assert "not measurements" in NOTE


# --- sizes -------------------------------------------------------------------------------------------------


def test_resnet101_shapes() -> None:
    chain = resnet101()
    assert len(chain) == 1 + 1 + (3 + 4 + 23 + 3) + 1 + 1
    assert chain.stages[-3].output_bytes == 32 * 2048 * 7 * 7 * 4
    assert chain.stages[-1].output_bytes == 4
    # A block without a convolution in its shortcut: two values after each of the three convolutions.
    last = chain.stages[-3]
    narrow, statistics = 32 * 512 * 7 * 7 * 4, 2 * 4 * (512 + 512 + 2048)
    assert last.saved_bytes == 4 * narrow + 2 * last.output_bytes + statistics
    # Without saving, the third convolution's output is alive beside the block's; the rest is smaller.
    assert last.forward_overhead_bytes == last.output_bytes + 2 * 4 * 2048
    # The sum's gradient and the third norm's wait or are used while the second ReLU's is made.
    assert last.backward_overhead_bytes == last.output_bytes + narrow


def test_resnet101_store_all_peak_is_near_a_measured_one() -> None:
    """8,030 MiB over the resident state on an H200 (torch 2.11, eager, bf16 autocast, batch 128)."""
    peak = solve(resnet101(batch=128, bytes_per_value=2), solver="store-all").peak_bytes
    assert peak == pytest.approx(8030 * MIB, rel=0.05)


def test_gpt_shapes_and_ways_to_save() -> None:
    chain = gpt()
    assert len(chain) == 1 + 24 + 3
    assert (chain.input_bytes, chain.input_gradient_bytes) == (8 * 1024 * 8, 0)
    state = 8 * 1024 * 1024 * 2
    statistics = 8 * 1024 * 4 * (2 + 2 + 16)  # two norms and sixteen heads
    own, *leaner = chain.stages[1].ways
    assert own.saved_bytes == 16 * state + statistics
    assert [way.saved_bytes for way in leaner] == [12 * state + statistics, 6 * state + statistics]
    for way in leaner:
        assert way.backward_time > own.backward_time
        assert way.saved_bytes + way.backward_overhead_bytes == own.saved_bytes + own.backward_overhead_bytes
        assert way.forward_time >= own.forward_time
        assert way.forward_overhead_bytes >= own.forward_overhead_bytes
    # The wide layer before and after its activation function: values going forward, gradients going back.
    assert own.forward_overhead_bytes == (1 + 4 + 4 - 1) * state
    assert own.backward_overhead_bytes == (4 + 4 - 1) * state
    assert (chain.stages[0].forward_overhead_bytes, chain.stages[0].backward_overhead_bytes) == (state, 0)
    assert chain.stages[-2].output_bytes == 8 * 1024 * 50257 * 2
    assert chain.stages[-1].saved_bytes == chain.stages[-2].output_bytes + 4


@NETWORKS
def test_gradients_are_as_large_as_outputs(chain: Chain) -> None:
    assert all(stage.gradient_bytes == stage.output_bytes for stage in chain.stages)


@pytest.mark.parametrize("network", [resnet101, gpt, vgg19])
def test_outputs_grow_with_the_batch(network) -> None:
    one, three = network(batch=1).output_bytes, network(batch=3).output_bytes
    loss = () if network is vgg19 else (4,)
    assert three == (*(3 * size for size in (one[:-1] if loss else one)), *loss)


# --- use ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chain", "share"),
    [(resnet101(), 0.6), (gpt(), 0.6), (vgg19(), 0.8)],  # 0.6 is below what VGG-19's first layers need
    ids=["resnet101", "gpt", "vgg19"],
)
def test_a_part_of_the_memory_suffices(chain: Chain, share: float) -> None:
    everything = solve(chain, solver="store-all")
    budget = int(share * everything.peak_bytes)
    result = solve(chain, budget, solver="persistent")
    assert result.peak_bytes <= budget
    assert everything.time < result.time < 1.2 * everything.time


def test_leaner_ways_to_save_make_gpt_faster() -> None:
    chain = gpt()
    only_own = replace(chain, stages=tuple(replace(stage, alternatives=()) for stage in chain.stages))
    budget = solve(chain, solver="store-all").peak_bytes * 6 // 10
    with_ways, without = (solve(c, budget, solver="persistent").time for c in (chain, only_own))
    assert with_ways < without


@NETWORKS
def test_round_trip_through_json(chain: Chain) -> None:
    assert problem_from_json(json.loads(json.dumps(chain.to_json()))) == chain


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: resnet101(batch=0), "batch"),
        (lambda: vgg19(image=31), "image"),
        (lambda: gpt(vocabulary=-1), "vocabulary"),
    ],
)
def test_impossible_shapes_are_refused(make, field: str) -> None:
    with pytest.raises(InputError, match=f"^{field}: must be at least"):
        make()
