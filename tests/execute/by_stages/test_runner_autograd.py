"""What autograd may ask of a model that runs stage by stage, and what it may not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elbowroom.errors import ElbowroomError
from elbowroom.execute.by_stages.measuring import observe
from elbowroom.execute.by_stages.runner import ChainRunner
from elbowroom.schedule import Backward, Forward
from staged import CPU, Lstm, all_rerun, assert_same, inputs, layers, runner_for, state_after, twice


def test_several_forwards_before_a_backward():
    ours, plain = layers(dropout=0.3), layers(dropout=0.3)
    run = ChainRunner(list(ours), all_rerun(6))
    assert_same(
        state_after(twice(run), ours, inputs(requires_grad=True), steps=1),
        state_after(twice(plain), plain, inputs(requires_grad=True), steps=1),
    )


def test_nothing_is_left_behind():
    model, value = layers(dropout=0.3), inputs(requires_grad=True)
    run = runner_for(model, value, 0.5)
    run(value).sum().backward()

    def forward_only(_):
        run(value)

    def step(_):
        run(value).sum().backward()

    for each in (forward_only, step):
        _, [level] = observe(CPU, each)
        assert level.end == 0


def test_a_second_backward_is_refused():
    run = ChainRunner(list(layers(3)), all_rerun(3))
    loss = run(inputs()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ElbowroomError, match="retain_graph"):
        loss.backward()


def test_gradients_by_name_are_refused():
    model, value = layers(3), inputs(requires_grad=True)
    run = ChainRunner(list(model), all_rerun(3))
    for ask in (
        lambda loss: torch.autograd.grad(loss, value),
        lambda loss: torch.autograd.grad(loss, [value, *model.parameters()]),
        lambda loss: loss.backward(inputs=[value]),
    ):
        with pytest.raises(ElbowroomError, match="call backward"):
            ask(run(value).sum())
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(run(value).sum(), list(model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    output = run(value)
    torch.autograd.grad(output.sum(), output)  # this does not reach the chain
    model.requires_grad_(False)
    (gradient,) = torch.autograd.grad(run(value).sum(), value)
    assert torch.equal(gradient, torch.autograd.grad(model(value).sum(), value)[0])


@pytest.mark.filterwarnings("ignore:Using backward")
def test_double_backward_is_refused():
    run = ChainRunner(list(layers(3)), all_rerun(3))
    with pytest.raises(ElbowroomError, match="create_graph"):
        run(inputs(requires_grad=True)).square().sum().backward(create_graph=True)


def test_without_gradients_stages_run_once():
    model = layers(dropout=0.3)
    run = ChainRunner(list(model), all_rerun(6))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.manual_seed(3)
            ours = run(inputs())
            torch.manual_seed(3)
            assert torch.equal(ours, model(inputs()))
    model.eval()
    assert_same(state_after(run, model, inputs()), state_after(model, model, inputs()))


def test_only_a_part_of_the_output_is_used():
    def model():
        torch.manual_seed(0)
        return nn.Sequential(Lstm(8, 8), Lstm(8, 8), nn.Identity())

    def last_state(call):
        return lambda value: call(value)[1][0]

    ours, plain = model(), model()
    run = ChainRunner(list(ours), all_rerun(3))
    value = torch.randn(4, 5, 8, requires_grad=True)
    assert_same(state_after(last_state(run), ours, value), state_after(last_state(plain), plain, value))


def test_a_stage_that_detaches_stops_the_gradient():
    class Detach(nn.Module):
        def forward(self, x):
            return x.detach() + 0

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), Detach(), nn.Linear(8, 8))

    ours, plain = model(), model()
    run = ChainRunner(list(ours), all_rerun(3))
    assert_same(state_after(run, ours, inputs()), state_after(plain, plain, inputs()))


def test_the_output_may_be_changed_in_place_unless_it_is_needed():
    ours, plain = nn.Sequential(*layers(2), nn.Linear(8, 8)), nn.Sequential(*layers(2), nn.Linear(8, 8))
    plain.load_state_dict(ours.state_dict())
    run = ChainRunner(list(ours), all_rerun(3))
    assert_same(
        state_after(lambda value: run(value).mul_(2), ours, inputs()),
        state_after(lambda value: plain(value).mul_(2), plain, inputs()),
    )
    save_everything = [*(Forward(at, "all") for at in (1, 2, 3)), *(Backward(at) for at in (3, 2, 1))]
    run = ChainRunner([nn.Linear(8, 8), nn.Tanh()], save_everything)
    with pytest.raises(RuntimeError, match="inplace"):
        run(inputs()).mul_(2).sum().backward()


def test_what_reruns_need_must_not_change_meanwhile():
    model, value = layers(3), inputs()
    run = ChainRunner(list(model), all_rerun(3))
    output = run(value)
    with torch.no_grad():
        model[1][0].weight.add_(1)
    with pytest.raises(ElbowroomError, match="parameter of stage 2"):
        output.sum().backward()
    output = run(value)
    value.add_(1)
    with pytest.raises(ElbowroomError, match="input has changed"):
        output.sum().backward()


def test_optimizers_that_step_during_the_backward():
    def model():
        model = layers(dropout=0.2)
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def step(_, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        return model

    ours, plain = model(), model()
    run = ChainRunner(list(ours), all_rerun(6))
    for call in (run, plain):
        torch.manual_seed(4)
        for _ in range(3):
            call(inputs()).square().mean().backward()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True))


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_distributed_data_parallel(process_group, static_graph, tied):
    class Model(nn.Module):
        def __init__(self, planned):
            super().__init__()
            self.layers = layers(dropout=0.2)
            if tied:
                self.layers[4][0].weight = self.layers[1][0].weight
            self.run = ChainRunner(list(self.layers), all_rerun(6)) if planned else self.layers.forward

        def forward(self, value):
            return self.run(value)

    def state(planned):
        model = Model(planned)
        wrapped = nn.parallel.DistributedDataParallel(model, static_graph=static_graph, bucket_cap_mb=0.0001)
        return state_after(wrapped, model, inputs(), steps=3)

    assert_same(state(planned=True), state(planned=False))
