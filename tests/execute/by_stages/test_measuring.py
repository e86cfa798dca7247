"""Taking models apart into stages, and measuring what each costs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from elbowroom import simulate, solve
from elbowroom.errors import InputError
from elbowroom.execute.by_stages.measuring import fuse_stages, measure_stages, stages_of

FLOAT = 4
RANDOM = torch.get_rng_state().nbytes  # what is looked at around a first forward: before it, and after it


def names(stages):
    return [type(stage).__name__ for stage in stages]


class Double(nn.Module):
    def forward(self, x):
        return x * 2


# --- which stages there are ----------------------------------------------------------------------------------


def test_nested_sequences_are_taken_apart():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Sequential(shared)), nn.Sequential(), shared)
    stages = stages_of(model)
    assert names(stages) == ["Linear", "Tanh", "Linear", "Linear"]
    assert stages[2] is stages[3] is shared
    assert stages_of(shared) == [shared]


def test_a_sequence_that_does_more_stays_whole():
    class Own(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + 1

    class Renamed(nn.Sequential):
        pass

    hooks = ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
    hooked = [nn.Sequential(nn.Tanh(), nn.Tanh()) for _ in hooks]
    for name, container in zip(hooks, hooked, strict=True):
        getattr(container, f"register_{name}")(lambda *_: None)
    patched = nn.Sequential(nn.Tanh(), nn.Tanh())
    patched.forward = lambda x: x
    whole = [Own(nn.Tanh(), nn.Tanh()), *hooked, patched]
    assert stages_of(nn.Sequential(*whole)) == whole
    assert names(stages_of(Renamed(nn.Tanh(), nn.Tanh()))) == ["Tanh", "Tanh"]


def test_stages_that_write_into_their_input_join_the_one_before():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True))
    example = torch.randn(2, 3, 8, 8)
    stages = fuse_stages(stages_of(model), example)
    assert [names(stage) if isinstance(stage, nn.Sequential) else stage for stage in stages] == [
        model[0],
        ["BatchNorm2d", "ReLU", "Dropout"],
    ]
    assert torch.equal(nn.Sequential(*stages)(example).isnan(), model(example).isnan())
    assert names(fuse_stages(stages, example)) == names(stages)


def test_views_join_the_one_before_or_at_the_input_the_one_after():
    model = nn.Sequential(
        nn.Flatten(), nn.Identity(), nn.Linear(12, 4), nn.Unflatten(1, (2, 2)), Double(), nn.Flatten()
    )
    stages = fuse_stages(stages_of(model), torch.randn(2, 3, 4))
    assert [names(stage) for stage in stages] == [
        ["Flatten", "Identity", "Linear", "Unflatten"],
        ["Double", "Flatten"],
    ]


def test_writing_into_the_input_of_the_model_is_refused():
    for model in ([nn.ReLU(inplace=True)], [nn.Flatten(), nn.ReLU(inplace=True)]):
        example = -torch.ones(2, 3)
        with pytest.raises(InputError, match=f"stages\\[{len(model) - 1}\\]: ReLU writes into the model's input"):
            fuse_stages(model, example)
        assert (example == -1).all()


# --- what they cost ------------------------------------------------------------------------------------------


def test_bytes_of_known_stages():
    rows, inputs, outputs = 64, 100, 50
    stages = [nn.Linear(inputs, outputs), nn.Tanh(), nn.Sigmoid()]
    chain = measure_stages(stages, torch.randn(rows, inputs, requires_grad=True))
    linear, tanh, sigmoid, outside = chain.stages
    activation = rows * outputs * FLOAT
    assert [stage.name for stage in chain.stages] == ["Linear", "Tanh", "Sigmoid", "outside"]
    assert {stage.output_bytes for stage in (linear, tanh, sigmoid)} == {activation}
    assert {stage.saved_bytes for stage in (linear, tanh, sigmoid)} == {activation}
    assert chain.gradient_bytes == (rows * inputs * FLOAT, activation, activation, activation, 0)
    # The weight's gradient, before it is added to what is there, but the output has gone by then.
    assert linear.backward_overhead_bytes == max(0, (inputs + 1) * outputs * FLOAT - activation)
    assert tanh.backward_overhead_bytes == 0
    assert {stage.forward_overhead_bytes for stage in (linear, tanh, sigmoid)} == {2 * RANDOM}
    assert rows * inputs * FLOAT <= chain.input_bytes <= rows * inputs * FLOAT + 16
    assert all(stage.forward_time > 0 and stage.backward_time > 0 for stage in (linear, tanh, sigmoid))
    assert (outside.forward_time, outside.backward_time, outside.saved_bytes) == (0, 0, 0)


def test_what_the_caller_adds():
    stages, example = [nn.Linear(8, 8)], torch.randn(16, 8)
    chain = measure_stages(stages, example)
    more = measure_stages(stages, example, outside_bytes=1000, keeps_output=True)
    assert more.stages[-1].forward_overhead_bytes == more.stages[-1].backward_overhead_bytes == 1000
    assert more.input_bytes - chain.input_bytes == chain.stages[0].output_bytes


def test_saving_has_its_own_overhead():
    """What a forward that saves nothing frees on the way, one that saves keeps: no solver should count it twice."""
    sizes = (32, 128, 128, 128)
    inner = nn.Sequential(*(part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())))
    inner.append(nn.Linear(128, 32))
    chain = measure_stages([inner, inner], torch.randn(1024, 32, requires_grad=True))
    stage = chain.stages[0]
    assert stage.output_bytes + stage.forward_overhead_bytes < stage.saved_bytes
    (saving,) = stage.alternatives
    assert saving.saved_bytes == stage.saved_bytes
    assert saving.forward_overhead_bytes < stage.forward_overhead_bytes
    assert solve(chain, 2**40, solver="persistent").peak_bytes <= solve(chain, 2**40, solver="store-all").peak_bytes


def test_integers_and_frozen_stages_take_no_gradient():
    stages = [nn.Embedding(20, 8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)]
    stages[0].requires_grad_(False)
    chain = measure_stages(stages, torch.randint(0, 20, (16,)))
    assert chain.gradient_bytes == (0, 0, 0, 16 * 8 * FLOAT, 0)
    assert [stage.backward_overhead_bytes for stage in chain.stages[:2]] == [0, 0]
    assert all(stage.saved_bytes == stage.output_bytes for stage in chain.stages[:2])


def test_what_stages_share_and_what_reruns_need_is_held():
    linear, norm = nn.Linear(64, 64), nn.BatchNorm1d(64)
    example = torch.randn(16, 64)
    held = {
        name: measure_stages(stages, example).input_bytes - example.nbytes
        for name, stages in {
            "nothing": [linear, nn.Tanh()],
            "shared": [linear, nn.Tanh(), linear],
            "random": [linear, nn.Dropout(0.5)],
            "buffers": [linear, norm],
        }.items()
    }
    base = held["nothing"]
    assert held["shared"] - base == 2 * (64 * 64 + 64) * FLOAT
    assert held["random"] - base == RANDOM
    assert held["buffers"] - base == sum(buffer.nbytes for buffer in norm.buffers())


def test_a_gradient_that_is_a_view_keeps_all_of_its_storage():
    class Pad(nn.Module):
        def forward(self, x):
            return torch.cat([x, torch.zeros_like(x)])

    chain = measure_stages([Double(), Pad(), Pad()], torch.randn(16, 8, requires_grad=True))
    assert chain.gradient_bytes[3] == 4 * 16 * 8 * FLOAT
    assert chain.gradient_bytes[1] == chain.gradient_bytes[2] == chain.gradient_bytes[3]


def test_nothing_is_disturbed():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.LSTM(8, 8))
    calls = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: calls.append(gradient))
        parameter.register_post_accumulate_grad_hook(calls.append)
    model[0].weight.grad = kept = torch.ones(8, 8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objects = dict(model.named_parameters()) | dict(model.named_buffers())
    random = torch.get_rng_state()
    example = torch.randn(4, 8, requires_grad=True)
    torch.set_rng_state(random)
    measure_stages(fuse_stages(stages_of(model), example), example)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(tensor is objects[name] for name, tensor in model.named_parameters())
    assert all(tensor is objects[name] for name, tensor in model.named_buffers())
    assert model[0].weight.grad is kept
    assert (kept == 1).all()
    assert [p.grad for p in model.parameters()][1:] == [None] * (len(list(model.parameters())) - 1)
    assert example.grad is None
    assert not calls
    model(example)[0].sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_autocast_is_measured():
    stages, example = [nn.Linear(64, 64), nn.Linear(64, 64)], torch.randn(128, 64)
    full = measure_stages(stages, example)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = measure_stages(stages, example)
    assert half.stages[1].output_bytes == full.stages[1].output_bytes // 2


def test_progress_and_refusals():
    parts = []
    chain = measure_stages([nn.Tanh(), nn.Tanh()], torch.randn(4), progress=parts.append)
    assert parts == [0.25, 0.5, 0.75, 1.0]
    assert simulate(chain, solve(chain, 2**40, solver="store-all").schedule).peak_bytes > 0
    with pytest.raises(InputError, match="stages: is empty"):
        measure_stages([], torch.randn(4))
    with pytest.raises(InputError, match="writes into its input"):
        measure_stages([nn.Tanh(), nn.ReLU(inplace=True)], torch.randn(4))
