"""Stages whose saved sets and inputs move to the host and back: as plain execution, in the memory predicted, whatever
copies take."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from functools import cache
from random import Random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from delayed import delay_copies
from elbowroom import solve
from elbowroom.errors import CopyFailed, ElbowroomError
from elbowroom.execute.by_stages import moving_values
from elbowroom.execute.by_stages.measuring import fuse_stages, measure_stages, stages_of
from elbowroom.execute.by_stages.runner import ChainRunner, HostSide
from elbowroom.execute.by_stages.staying import measure_staying
from elbowroom.execute.by_stages.waiting import Release, with_waits
from elbowroom.execute.to_host.host_room import HostRoom
from elbowroom.measure.host_memory import held_bytes
from elbowroom.problem import Platform
from elbowroom.schedule import Backward, Forward, Offload, Prefetch, simulate
from offloaded import scrambled
from staged import CPU, Block, assert_same, build, inputs, layers, state_after, step_bytes, twice

LINK = Platform(to_host=2e9, from_host=2e9, seconds_per_copy=1e-6)
NAMES = ("conv", "mlp", "blocks", "lstm", "dictionary", "handed on")


class First(nn.Module):
    """Makes a mask, and hands it on with the values."""

    def forward(self, x):
        return x * 2, torch.sigmoid(x)


class Handing(nn.Module):
    """Takes values and a mask, and hands the same mask on."""

    def __init__(self, size):
        super().__init__()
        self.block = Block(size)

    def forward(self, pair):
        return self.block(pair[0] * pair[1]), pair[1]


def built(name):
    if name != "handed on":
        return build(name)
    torch.manual_seed(0)
    return nn.Sequential(First(), *(Handing(24) for _ in range(4))), torch.randn(256, 24)


@cache
def measured(name):
    """A chain without its input, and what is there during the whole step besides it."""
    model, value = built(name)
    stages = fuse_stages(stages_of(model), value)
    chain = measure_stages(stages, value)
    staying = measure_staying(stages, value, chain, CPU)
    moving = replace(chain, input_bytes=0)
    most = solve(moving, solver="store-all").peak_bytes
    return SimpleNamespace(chain=moving, fixed_bytes=chain.input_bytes + staying.bytes, most=most, staying=staying)


def moving_runner(stages, waiting, **side):
    room = HostRoom()
    room.reserve(waiting.host_bytes, CPU)
    return ChainRunner(stages, waiting, HostSide(room, CPU, **side))


def compared(name, simulation):
    """A runner of some schedule, after a few steps like those of plain execution, and its model and input."""
    model, value = built(name)
    stages, plain = fuse_stages(stages_of(model), value), copy.deepcopy(model)
    run = moving_runner(stages, with_waits(measured(name).chain, simulation))
    assert_same(state_after(run, model, value), state_after(plain, plain, value))
    return run, model, value


@pytest.mark.parametrize("part", [0.0, 0.5])
@pytest.mark.parametrize("solver", ["combined", "offload-best"])
@pytest.mark.parametrize("name", NAMES)
def test_planned_steps(name, solver, part, monkeypatch):
    problem = measured(name)
    assert problem.staying.bytes == 0
    least = solve(problem.chain, 0, solver, platform=LINK).least_budget
    result = solve(problem.chain, int(least + part * (problem.most - least)), solver, platform=LINK)
    run, model, value = compared(name, result.simulation)
    assert part or any(isinstance(operation, Release) for operation in run.schedule)
    predicted_bytes = result.peak_bytes + problem.fixed_bytes
    assert step_bytes(run, model, value) <= predicted_bytes
    delay_copies(monkeypatch)
    assert step_bytes(run, model, value) <= predicted_bytes


@pytest.mark.parametrize("seed", range(24))
def test_schedules_at_random_with_copies_that_come_late(seed, monkeypatch):
    rng = Random(seed)
    name = rng.choice(NAMES)
    chain = measured(name).chain
    platform = Platform(to_host=rng.choice([1e8, 1e9, 1e10]), from_host=rng.choice([1e8, 1e9, 1e10]))
    least = solve(chain, 0, "persistent").least_budget
    budget = int(least + rng.choice([0, 0.2, 0.5]) * (measured(name).most - least))
    simulation = scrambled(rng, chain, solve(chain, budget, "persistent").schedule, platform)
    delay_copies(monkeypatch)
    run, model, value = compared(name, simulation)
    assert step_bytes(run, model, value) <= simulation.peak_bytes + measured(name).fixed_bytes


# --- what moves, and what stays ------------------------------------------------------------------------------


def all_moved(count):
    """Everything is saved, and every saved set but the last moves."""
    forwards = [op for at in range(1, count + 1) for op in (Forward(at, "all"), Offload(at, "all"))][:-1]
    backwards = [op for at in range(count, 0, -1) for op in (Prefetch(at - 1, "all"), Backward(at))]
    last = [Forward(count + 1, "all"), Backward(count + 1)]
    return [*forwards, *last, *(op for op in backwards if op.at)]


def run_all_moved(stages, value):
    """A runner for which every saved set but the last really leaves, and the referee's peak."""
    chain = measure_stages(stages, value)
    staying = measure_staying(stages, value, chain, CPU)
    moving = replace(chain, input_bytes=0)
    simulation = simulate(moving, all_moved(len(stages)), platform=Platform(to_host=1e15, from_host=1e15))
    peak_bytes = simulation.peak_bytes + chain.input_bytes + staying.bytes
    run = moving_runner(stages, with_waits(moving, simulation), sealed=staying.sealed)
    return run, peak_bytes, staying


def assert_moves_as_plain(model, value):
    plain = copy.deepcopy(model)
    run, peak_bytes, staying = run_all_moved(list(model), value)
    assert_same(state_after(run, model, value), state_after(plain, plain, value))
    assert step_bytes(run, model, value) <= peak_bytes
    return staying


class OnContext(torch.autograd.Function):
    """Keeps what it needs where hooks of saved tensors do not see it."""

    @staticmethod
    def forward(ctx, x):
        ctx.factor = torch.cos(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor


class Sine(nn.Module):
    def forward(self, x):
        return OnContext.apply(x)


def test_what_hooks_do_not_see_stays_and_is_counted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Sine(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    assert assert_moves_as_plain(model, torch.randn(256, 64)).bytes == 256 * 64 * 4


class Differentiated(nn.Module):
    """Uses torch.func, which refuses hooks of saved tensors."""

    def __init__(self, size):
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, x):
        return self.layer(torch.func.grad(lambda y: y.tanh().sum())(x))


def test_a_stage_whose_graph_cannot_be_packed_stays():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Differentiated(8), nn.Tanh(), nn.Linear(8, 8))
    assert assert_moves_as_plain(model, torch.randn(64, 8)).sealed == {2}


def test_what_is_too_small_to_move_stays_and_is_counted(monkeypatch):
    monkeypatch.setitem(moving_values._LEAST_BYTES, "cpu", 1000)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.Sequential(nn.BatchNorm1d(64), nn.Tanh()), nn.Linear(64, 64), nn.Tanh()
    )
    assert assert_moves_as_plain(model, torch.randn(256, 64)).bytes == 2 * 64 * 4  # of the batch: mean, deviation


def test_shared_and_frozen_parameters_and_buffers():
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.3))
    frozen = nn.Linear(8, 8).requires_grad_(False)
    assert_moves_as_plain(nn.Sequential(one, nn.Linear(8, 8), one, frozen, nn.Tanh(), one), inputs())


def test_views_strides_and_odd_types():
    class Odd(nn.Module):
        def forward(self, x):
            wide = torch.complex(x, x * 2)[:, ::2].conj()
            return (wide * wide.abs()).real.t().contiguous().t() + x[:, ::2].double().float()

    class Wide(nn.Module):
        def forward(self, x):
            return torch.cat([x, x.to(torch.bfloat16).float()], 1).unfold(1, 8, 8).flatten(1)

    torch.manual_seed(0)
    stages = [nn.Linear(16, 16), Odd(), Wide(), nn.Tanh(), nn.Linear(16, 16)]
    assert_moves_as_plain(nn.Sequential(*stages), torch.randn(32, 16))


def test_hooks_of_modules_and_parameters():
    def watched():
        model, seen = layers(4), []
        for stage in model:
            stage.register_full_backward_hook(lambda _, inner, outer: seen.extend([*inner, *outer]))
            stage.register_full_backward_pre_hook(lambda _, outer: tuple(2 * g for g in outer))
            stage[0].weight.register_hook(lambda g: 3 * g)
        return model, seen

    (model, ours), (other, plain) = watched(), watched()
    value = inputs(requires_grad=True)
    run, _, _ = run_all_moved(list(model), value)
    ours.clear()  # of measuring
    assert_same(state_after(run, model, value), state_after(other, other, value))
    assert len(ours) == len(plain) > 0
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, plain, strict=True))


class Checkpointed(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.block = Block(size)

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def test_other_hooks_of_saved_tensors():
    """Inside a stage they keep what they hold; around the run they see what is not packed."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(16), Checkpointed(16), nn.Linear(16, 16), Checkpointed(16), Block(16))
    assert assert_moves_as_plain(model, torch.randn(64, 16)).bytes > 0
    plain = copy.deepcopy(model)
    run, _, _ = run_all_moved(list(model), torch.randn(64, 16))

    def around(value):
        with torch.autograd.graph.save_on_cpu():
            return run(value)

    value = torch.randn(64, 16)
    assert_same(state_after(around, model, value), state_after(plain, plain, value))


def test_autocast():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16) for _ in range(4)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_moves_as_plain(model, torch.randn(64, 16, requires_grad=True))


def test_what_is_written_to_after_it_was_saved_is_an_error_as_always():
    class Careless(nn.Module):
        def forward(self, x):
            y = torch.exp(x)
            z = y * 2
            y.add_(1)
            return z

    model = nn.Sequential(nn.Linear(8, 8), Careless(), nn.Tanh())
    run, _, _ = run_all_moved([model[0], nn.Tanh(), model[2]], inputs())
    run.stages = tuple(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(inputs()).sum().backward()
    run, _, _ = run_all_moved(list(layers(3)), inputs())
    output = run(inputs())
    with torch.no_grad():
        run.stages[1][0].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# --- faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize("at", [0, 2])
def test_a_copy_that_fails(direction, at, monkeypatch):
    model, plain = layers(5), layers(5)
    lane = delay_copies(monkeypatch)[direction]
    run, _, _ = run_all_moved(list(model), inputs())
    before = held_bytes()
    lane.fails_at = at
    with pytest.raises(CopyFailed, match="an error of the link"):
        run(inputs()).sum().backward()
    assert lane.copies > at
    assert held_bytes() == before
    assert_same(state_after(run, model, inputs()), state_after(plain, plain, inputs()))
    assert run.host.room.taken_bytes == 0


@pytest.mark.parametrize("at", [0, 2])
def test_an_interrupt_where_a_copy_begins(at, monkeypatch):
    model, plain = layers(5), layers(5)
    lanes = delay_copies(monkeypatch)
    run, _, _ = run_all_moved(list(model), inputs())
    for lane in lanes:
        begin, left = lane.copy, [at]

        def interrupted(target, source, begin=begin, left=left):
            begun = begin(target, source)
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt
            return begun

        with monkeypatch.context() as patch:
            patch.setattr(lane, "copy", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run(inputs()).sum().backward()
        assert run.host.room.taken_bytes == 0
    assert_same(state_after(run, model, inputs()), state_after(plain, plain, inputs()))


def test_an_exception_in_mid_step(monkeypatch):
    delay_copies(monkeypatch)
    model, plain = layers(5), layers(5)
    run, _, _ = run_all_moved(list(model), inputs())

    def fail(*_):
        raise ValueError("enough")

    handle = model[3].register_forward_hook(fail)
    with pytest.raises(ValueError, match="enough"):
        run(inputs())
    handle.remove()
    handle = model[1].register_full_backward_hook(fail)
    with pytest.raises(ValueError, match="enough"):
        run(inputs()).sum().backward()
    handle.remove()
    assert_same(state_after(run, model, inputs()), state_after(plain, plain, inputs()))


def test_a_second_backward_is_refused_and_outputs_may_be_dropped(monkeypatch):
    delay_copies(monkeypatch)
    run, _, _ = run_all_moved(list(layers(5)), inputs())
    before = held_bytes()
    output = run(inputs())
    output.sum().backward(retain_graph=True)
    with pytest.raises(ElbowroomError, match="the backward of this output has run"):
        output.sum().backward()
    for _ in range(3):
        run(inputs())  # and no backward
    assert held_bytes() == before
    assert run.host.room.taken_bytes == 0


def test_two_forwards_before_the_backward():
    """Their gradients are added one by one, as without moves."""
    model, other = layers(5), layers(5)
    run, _, _ = run_all_moved(list(model), inputs())
    still = ChainRunner(list(other), [op for op in all_moved(5) if isinstance(op, Forward | Backward)])
    assert_same(state_after(twice(run), model, inputs()), state_after(twice(still), other, inputs()))


def test_nothing_is_left_of_a_step():
    model = layers(5)
    run, _, _ = run_all_moved(list(model), inputs())
    seen = []
    for stage in model:
        stage.register_forward_hook(lambda _, __, output: seen.append(weakref.ref(output)))
    gc.collect()
    gc.disable()
    try:
        output = run(inputs())
        output.sum().backward()
        del output
        assert all(ref() is None for ref in seen)
    finally:
        gc.enable()
