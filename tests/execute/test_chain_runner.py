"""The chain executor gives what plain execution gives, bit for bit, in the memory that the referee predicts."""

from __future__ import annotations

import copy
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from elbowroom import solve
from elbowroom.errors import ElbowroomError, InputError, InvalidSchedule
from elbowroom.execute.by_stages.runner import ChainRunner
from elbowroom.execute.by_stages.measuring import _observe, fuse_stages, measure_stages, stages_of
from elbowroom.schedule import Backward, Discard, Forward

CPU = torch.device("cpu")
SOLVERS = ("persistent", "floating", "sequential")


# --- models --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 4 * size), nn.GELU(), nn.Dropout(0.1))
        self.last = nn.Linear(4 * size, size)

    def forward(self, x):
        return x + self.last(self.body(x))


class Lstm(nn.Module):
    """Hands on what nn.LSTM returns, a tensor and a pair of tensors, and takes either that or a tensor."""

    def __init__(self, inputs, size):
        super().__init__()
        self.cell = nn.LSTM(inputs, size, batch_first=True)

    def forward(self, x):
        return self.cell(x) if isinstance(x, torch.Tensor) else self.cell(x[0], x[1])


class Masked(nn.Module):
    """A stage with a dictionary of tensors, numbers and None for input and output."""

    def __init__(self, size):
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, value):
        x = torch.tanh(self.layer(value["x"])) * value["mask"] + value["depth"]
        return {"x": x, "mask": value["mask"], "depth": value["depth"] + 1, "nothing": None}


def conv(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


def build(name):
    """A model and its input."""
    torch.manual_seed(0)
    if name == "conv":
        body = [conv(3, 8), conv(8, 16), nn.MaxPool2d(2), conv(16, 16), nn.Sequential(conv(16, 32), conv(32, 32))]
        model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))
        return model, torch.randn(16, 3, 32, 32)
    if name == "mlp":
        layers = [nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)]
        return nn.Sequential(*layers), torch.randn(512, 128, requires_grad=True)
    if name == "blocks":
        return nn.Sequential(*(Block(48) for _ in range(7))), torch.randn(512, 48, requires_grad=True)
    if name == "lstm":
        cells = [Lstm(24, 32), Lstm(32, 32), Lstm(32, 32)]
        return nn.Sequential(nn.Embedding(50, 24), *cells), torch.randint(0, 50, (32, 30))
    if name == "dictionary":
        mask = torch.rand(256, 1)
        value = {"x": torch.randn(256, 64, requires_grad=True), "mask": mask, "depth": 0, "nothing": None}
        return nn.Sequential(*(Masked(64) for _ in range(6))), value
    raise ValueError(name)


@cache
def measured(name):
    model, value = build(name)
    stages = fuse_stages(stages_of(model), value)
    chain = measure_stages(stages, value)
    return SimpleNamespace(chain=chain, most=solve(chain, 2**50, solver="store-all").peak_bytes)


@cache
def planned(name, solver, part):
    """A schedule: part 0 is the least budget of the solver, part 1 the one that needs no recomputation."""
    problem = measured(name)
    least = solve(problem.chain, 0, solver=solver).least_budget
    return solve(problem.chain, int(least + part * (problem.most - least)), solver=solver)


def runner_for(model, value, part=0.0):
    """Some model's runner within a budget."""
    stages = fuse_stages(stages_of(model), value)
    chain = measure_stages(stages, value)
    most = solve(chain, 2**50, solver="store-all").peak_bytes
    least = solve(chain, 0, solver="persistent").least_budget
    return ChainRunner(stages, solve(chain, int(least + part * (most - least)), solver="persistent").schedule)


# --- what to compare -----------------------------------------------------------------------------------------


def loss_of(output):
    return sum(leaf.square().mean() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))


def fresh(value):
    """The same input in new tensors."""
    if isinstance(value, dict):
        return {key: fresh(each) for key, each in value.items()}
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def state_after(call, model, value, backward=lambda loss: loss.backward(), steps=2):
    """Everything that training steps leave behind; the second adds to gradients that are there."""
    torch.manual_seed(1)
    model.zero_grad()
    value = fresh(value)
    losses = []
    for _ in range(steps):
        loss = loss_of(call(value))
        backward(loss)
        losses.append(loss.detach())
    return {
        "loss": losses,
        "gradients": [p.grad for p in model.parameters()],
        "input gradients": [leaf.grad for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)],
        "buffers": [b.clone() for b in model.buffers()],
        "random": [torch.get_rng_state()],
    }


def twice(call):
    """Two forwards before the backward."""
    return lambda value: (call(value), call(2 * value))


def assert_same(ours, plain):
    for what, tensors in plain.items():
        for mine, theirs in zip(ours[what], tensors, strict=True):
            assert (mine is None) == (theirs is None), what
            assert mine is None or torch.equal(mine, theirs), what


def assert_same_as_plain(model, value, part=0.0, **options):
    """A runner for the model, after comparing it."""
    other = copy.deepcopy(model)
    run = runner_for(model, value, part)
    assert_same(state_after(run, model, value, **options), state_after(other, other, value, **options))
    return run


class Outside(torch.autograd.Function):
    """A loss that takes nothing but its own bytes and the gradient it makes."""

    @staticmethod
    def forward(ctx, output):
        ctx.like = output.shape
        return output.new_zeros(())

    @staticmethod
    def backward(ctx, gradient):
        return gradient.new_ones(ctx.like)


def step_bytes(run, model, value):
    """The peak of one step above its parameters and gradients, the input included."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]

    def step(_):
        Outside.apply(tree_leaves(run(value))[0]).backward()

    step(None)
    for leaf in leaves:
        leaf.grad = None
    _, [level] = _observe(CPU, step)
    return level.peak + sum(leaf.untyped_storage().nbytes() for leaf in leaves)


# --- against plain execution ---------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", ["conv", "mlp", "blocks", "lstm", "dictionary"])
def test_planned_steps(name, solver, part):
    result = planned(name, solver, part)
    model, value = build(name)
    plain = copy.deepcopy(model)
    stages = fuse_stages(stages_of(model), value)
    run = ChainRunner(stages, result.schedule)
    counts = [0] * len(stages)
    for i, stage in enumerate(stages):
        stage.register_forward_hook(lambda *_, i=i: counts.__setitem__(i, counts[i] + 1))

    assert_same(state_after(run, model, value), state_after(plain, plain, value))
    planned_counts = result.simulation.forwards
    assert counts == [2 * planned_counts[i + 1] for i in range(len(stages))]

    peak_bytes = step_bytes(run, model, value)
    assert peak_bytes <= result.peak_bytes
    # Stages of a single operation may not need their output in their backward: one activation less is held.
    slack = 0.01 * result.peak_bytes
    if name in ("mlp", "dictionary"):
        slack += 2 * max(measured(name).chain.output_bytes)
    if solver != "sequential":  # which does not use alternatives
        assert peak_bytes >= result.peak_bytes - slack


def test_more_memory_means_fewer_forwards():
    counts = [planned("blocks", "persistent", part).simulation.recomputed_forwards for part in (0.0, 0.4, 1.0)]
    assert counts[0] > counts[1] > counts[2] == 0


# --- models of all kinds -------------------------------------------------------------------------------------


def layers(count=6, size=8, dropout=0.0):
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Dropout(dropout)) for _ in range(count)]
    for part in parts:
        part.register_forward_hook(lambda *_: None)  # keeps it one stage
    return nn.Sequential(*parts)


def inputs(size=8, requires_grad=False):
    torch.manual_seed(2)
    return torch.randn(16, size, requires_grad=requires_grad)


def all_replayed(count):
    """Each stage is run from the input for its own backward: every forward but the last is a replay."""
    operations = [
        Forward(1, "input"),
        *(Forward(at, "nothing") for at in range(2, count + 1)),
        Forward(count + 1, "all"),
    ]
    for at in range(count + 1, 0, -1):
        if at <= count:
            operations += [Forward(1, "input"), *(Forward(k, "nothing") for k in range(2, at))][: at - 1]
            operations.append(Forward(at, "all"))
        operations.append(Backward(at))
    return operations


@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_input_with_and_without_gradient(requires_grad):
    assert_same_as_plain(layers(dropout=0.3), inputs(requires_grad=requires_grad))


@pytest.mark.parametrize("frozen", [(0, 1, 2), (2, 3), (5,), (0, 2, 4)])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_frozen_stages(frozen, requires_grad):
    model = layers(dropout=0.3)
    for i in frozen:
        model[i].requires_grad_(False)
    assert_same_as_plain(model, inputs(requires_grad=requires_grad))


def test_frozen_first_stages_are_not_replayed_for_nothing():
    model = layers(4)
    model[:2].requires_grad_(False)
    run = ChainRunner(list(model), all_replayed(4))
    counts = [0] * 4
    for i, stage in enumerate(model):
        stage.register_forward_hook(lambda *_, i=i: counts.__setitem__(i, counts[i] + 1))
    run(inputs()).sum().backward()
    assert counts == [3, 3, 3, 2]  # one forward, and what the backwards of stages 4 and 3 need


def test_everything_frozen():
    model = layers().requires_grad_(False)
    run = assert_same_as_plain(model, inputs(requires_grad=True))
    assert not run(inputs()).requires_grad


def test_a_stage_used_twice():
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
    one.register_forward_hook(lambda *_: None)
    assert_same_as_plain(nn.Sequential(one, nn.Linear(8, 8), one, nn.Tanh(), one), inputs())


@pytest.mark.parametrize(
    "module", [lambda: nn.LSTM(8, 8), lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))]
)
def test_shared_modules_that_keep_their_parameters_elsewhere(module):
    class First(nn.Module):
        def forward(self, x):
            return x[0] if isinstance(x, tuple) else x

    torch.manual_seed(0)
    one = module()
    assert_same_as_plain(nn.Sequential(one, nn.Sequential(First(), nn.Tanh()), one, First()), inputs())


def test_tied_weights_are_added_to_once():
    class Head(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return F.linear(x, self.weight)

    torch.manual_seed(0)
    embedding = nn.Embedding(30, 8)
    model = nn.Sequential(embedding, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), Head(embedding.weight))
    run = assert_same_as_plain(model, torch.randint(0, 30, (16, 4)))
    seen = []
    embedding.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    embedding.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    model.zero_grad()
    run(torch.randint(0, 30, (16, 4))).sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])


def test_hooks_on_stages_and_parameters():
    def watched():
        model, seen = layers(4), []
        for stage in model:
            stage.register_full_backward_hook(lambda _, inner, outer: seen.extend([*inner, *outer]))
            stage.register_full_backward_pre_hook(lambda _, outer: tuple(2 * g for g in outer))
            stage[0].weight.register_hook(lambda g: 3 * g)
            stage[0].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        return model, seen

    (model, ours), (other, plain) = watched(), watched()
    run = ChainRunner(list(model), all_replayed(4))
    value = inputs(requires_grad=True)
    assert_same(state_after(run, model, value), state_after(other, other, value))
    assert len(ours) == len(plain) > 0
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, plain, strict=True))


class Counting(nn.Module):
    """Changes buffers in every way there is, and its output depends on them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.spectral_norm(nn.Linear(8, 8))  # changes buffers that it then uses
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.ones(8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.calls += 1
        self.replaced = self.replaced * 0.5
        x = F.batch_norm(self.layer(x), self.mean, self.variance, training=True)
        return torch.tanh(x + self.replaced * self.calls)


@pytest.mark.parametrize("norm", [Counting, lambda: nn.BatchNorm1d(8), lambda: nn.BatchNorm1d(8, momentum=None)])
def test_buffers_that_a_forward_changes(norm):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), norm()) for _ in range(4)))

    ours, plain = model(), model()
    run = ChainRunner(list(ours), all_replayed(4))
    for training in (True, False, True):
        ours.train(training), plain.train(training)
        assert_same(state_after(run, ours, inputs()), state_after(plain, plain, inputs()))


@pytest.mark.parametrize("how", ["autograd", "func"])
@pytest.mark.parametrize("first", ["input", "all"])
def test_a_stage_that_computes_gradients_in_its_forward(how, first):
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("scale", torch.ones(()))

        def energy(self, x):
            return torch.tanh(self.layer(x)).square().sum()

        def forward(self, x):
            self.scale *= 1.5
            x = F.dropout(x, 0.2, self.training) * self.scale.clone()
            if how == "func":
                return torch.func.grad(self.energy)(x)
            return torch.autograd.grad(self.energy(x), x, create_graph=True)[0]

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), Force(), nn.Linear(8, 8))

    schedule = all_replayed(3)
    if first == "all":  # and only later without saving
        schedule = [
            *[Forward(1, "input"), Forward(2, "all"), Forward(3, "input"), Discard(2, "all"), Forward(4, "all")],
            *[Backward(4), Forward(2, "input"), Forward(3, "all"), Backward(3)],
            *[Forward(2, "all"), Backward(2), Forward(1, "all"), Backward(1)],
        ]

    ours, plain = model(), model()
    run = ChainRunner(list(ours), schedule)

    def with_another(call):
        def two(value):  # the backward of the first finds what the second has left
            first, second = twice(call)(value)
            loss_of(first).backward()
            return second

        return two

    assert_same(state_after(with_another(run), ours, inputs()), state_after(with_another(plain), plain, inputs()))
    measure_stages(list(ours), inputs())


def test_a_buffer_that_changes_now_and_then():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(8))
            self.step = 0

        def forward(self, x):
            if self.step == 1:
                self.scale += x.detach().mean(0)
            return x * self.scale

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), Sometimes(), nn.Linear(8, 8))

    ours, plain = model(), model()
    run = ChainRunner(list(ours), all_replayed(3))
    for step in range(3):
        ours[1].step = plain[1].step = step
        assert_same(state_after(run, ours, inputs(), steps=1), state_after(plain, plain, inputs(), steps=1))


@pytest.mark.parametrize("within", [False, True])
def test_autocast(within):
    class Island(nn.Module):
        """Full precision inside autocast: its backward must not be cast either."""

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return torch.tanh(x.float() @ torch.ones(8, 8))

    def model():
        torch.manual_seed(0)
        body = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), Island(), nn.Dropout(0.1)) for _ in range(4)]
        body[1].append(body[1][0])  # a weight that one stage uses twice is cast once
        return nn.Sequential(*body)

    ours, plain = model(), model()
    run = ChainRunner(list(ours), all_replayed(4))

    def under(call, backward):
        def step(value):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(call(value))
                if backward:
                    loss.backward()
            if not backward:
                loss.backward()
            return loss.detach()

        return step

    value = inputs(requires_grad=True)
    skip = {"backward": lambda loss: None}
    mine = state_after(under(run, within), ours, value, **skip)
    assert_same(mine, state_after(under(plain, within), plain, value, **skip))
    assert all(gradient is not None for gradient in mine["gradients"])


def test_casts_of_autocast_are_not_kept():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)))
    stages, value = list(model), torch.randn(32, 256)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chain = measure_stages(stages, value)
    result = solve(chain, solve(chain, 0, solver="persistent").least_budget, solver="persistent")
    run = ChainRunner(stages, result.schedule)

    def call(value):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return run(value)

    assert 0.95 * result.peak_bytes < step_bytes(call, model, value) <= result.peak_bytes


# --- autograd ------------------------------------------------------------------------------------------------


def test_several_forwards_before_a_backward():
    ours, plain = layers(dropout=0.3), layers(dropout=0.3)
    run = ChainRunner(list(ours), all_replayed(6))
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
        _, [level] = _observe(CPU, each)
        assert level.end == 0


def test_a_second_backward_is_refused():
    run = ChainRunner(list(layers(3)), all_replayed(3))
    loss = run(inputs()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ElbowroomError, match="retain_graph"):
        loss.backward()


def test_gradients_by_name_are_refused():
    model, value = layers(3), inputs(requires_grad=True)
    run = ChainRunner(list(model), all_replayed(3))
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
    run = ChainRunner(list(layers(3)), all_replayed(3))
    with pytest.raises(ElbowroomError, match="create_graph"):
        run(inputs(requires_grad=True)).square().sum().backward(create_graph=True)


def test_without_gradients_stages_run_once():
    model = layers(dropout=0.3)
    run = ChainRunner(list(model), all_replayed(6))
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
    run = ChainRunner(list(ours), all_replayed(3))
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
    run = ChainRunner(list(ours), all_replayed(3))
    assert_same(state_after(run, ours, inputs()), state_after(plain, plain, inputs()))


def test_the_output_may_be_changed_in_place_unless_it_is_needed():
    ours, plain = nn.Sequential(*layers(2), nn.Linear(8, 8)), nn.Sequential(*layers(2), nn.Linear(8, 8))
    plain.load_state_dict(ours.state_dict())
    run = ChainRunner(list(ours), all_replayed(3))
    assert_same(
        state_after(lambda value: run(value).mul_(2), ours, inputs()),
        state_after(lambda value: plain(value).mul_(2), plain, inputs()),
    )
    save_everything = [*(Forward(at, "all") for at in (1, 2, 3)), *(Backward(at) for at in (3, 2, 1))]
    run = ChainRunner([nn.Linear(8, 8), nn.Tanh()], save_everything)
    with pytest.raises(RuntimeError, match="inplace"):
        run(inputs()).mul_(2).sum().backward()


def test_what_replays_need_must_not_change_meanwhile():
    model, value = layers(3), inputs()
    run = ChainRunner(list(model), all_replayed(3))
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
    run = ChainRunner(list(ours), all_replayed(6))
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
            self.run = ChainRunner(list(self.layers), all_replayed(6)) if planned else self.layers.forward

        def forward(self, value):
            return self.run(value)

    def state(planned):
        model = Model(planned)
        wrapped = nn.parallel.DistributedDataParallel(model, static_graph=static_graph, bucket_cap_mb=0.0001)
        return state_after(wrapped, model, inputs(), steps=3)

    assert_same(state(planned=True), state(planned=False))


# --- what is refused -----------------------------------------------------------------------------------------


def test_a_stage_that_writes_into_its_input():
    run = ChainRunner([nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)], all_replayed(3))
    with pytest.raises(InputError, match="ReLU writes into its input"):
        run(inputs())


def test_schedules_that_cannot_run():
    stages = [nn.Linear(8, 8), nn.Tanh()]
    good = [Forward(1, "all"), Forward(2, "all"), Forward(3, "all"), Backward(3), Backward(2), Backward(1)]
    ChainRunner(stages, good)
    with pytest.raises(InvalidSchedule):
        ChainRunner(stages, good[:-1])
    with pytest.raises(InvalidSchedule):
        ChainRunner(stages[:1], good)
    with pytest.raises(InputError, match="runs once"):
        ChainRunner(stages, [*good[:2], Forward(3, "input"), *good[2:]])
    with pytest.raises(InputError, match="empty"):
        ChainRunner([], [Forward(1, "all"), Backward(1)])


def test_discarding_and_saving_again():
    model, plain = layers(3), layers(3)
    schedule = [
        *[Forward(1, "input"), Forward(2, "all"), Discard(2, "all"), Forward(2, "input"), Forward(3, "all")],
        *[Forward(4, "all"), Backward(4), Backward(3), Discard(2, "input"), Forward(1, "all"), Forward(2, "all")],
        *[Backward(2), Backward(1)],
    ]
    run = ChainRunner(list(model), schedule)
    assert_same(state_after(run, model, inputs()), state_after(plain, plain, inputs()))
