"""What people do with a model besides one plain step: it trains like the original, bit for bit."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.errors import BudgetTooSmall, InputError, Unplanned  # noqa: E402
from elbowroom.execute.verification import verify_step  # noqa: E402

fit = partial(elbowroom.fit, times="estimate")  # faster, and what is computed does not depend on it


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(F.relu(self.norm(self.conv(x)), inplace=True))


class Net(nn.Module):
    """Convolutions, BatchNorm, dropout, an in-place ReLU at the border of every block."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(16, 5)

    def forward(self, x, y=None):
        x = self.stem(x)
        for block in self.blocks:
            x = F.relu_(block(x))
        logits = self.head(x.mean((2, 3)))
        return logits if y is None else F.cross_entropy(logits, y)


def batch(size: int = 4, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, 12, 12, generator=generator), torch.randint(5, (size,), generator=generator)


def tight(model, *example, share: float = 0.5, **options):
    """A fitted model whose activations get a share of what they would like, or the least they can do with."""
    fitted = fit(model, *example, budget="1TiB", **options)
    (entry,) = fitted.elbowroom.entries.values()
    resident = entry.plan.resident_bytes
    budget = resident + int(share * (entry.plan.plain_peak_bytes - resident))
    try:
        fitted.elbowroom.set_budget(budget)
    except BudgetTooSmall as too_small:
        fitted.elbowroom.set_budget(too_small.least_budget)
    return fitted


def recomputes(fitted) -> bool:
    return any(region.program.reruns for entry in fitted.elbowroom.entries.values() for region in entry.regions)


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), f"gradient of {name}"
        assert torch.equal(p, q), name
    for (name, p), q in zip(a.named_buffers(), b.buffers(), strict=True):
        assert torch.equal(p, q), name


def both(model, run, *example, **options):
    """Run the same thing on the original and on a fitted copy, from the same seed, and compare everything."""
    ours = copy.deepcopy(model)
    fitted = tight(ours, *example, **options)
    assert recomputes(fitted)
    torch.manual_seed(7)
    expected = run(model)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    got = run(fitted)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_state(model, ours)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(expected, got)
    return fitted


def test_training_for_several_steps_is_the_same():
    def run(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss = model(*batch(seed=step))
            loss.backward()
            optimizer.step()
        return loss.detach()

    both(Net(), run, *batch())


def test_gradients_accumulate_over_micro_batches():
    def run(model):
        for seed in range(3):
            (model(*batch(seed=seed)) / 3).backward()

    both(Net(), run, *batch())


def test_several_forwards_before_a_backward():
    def run(model):
        losses = [model(*batch(seed=seed)) for seed in range(3)]
        (losses[0] + 2 * losses[2] + losses[1]).backward()

    both(Net(), run, *batch())


def test_a_forward_whose_backward_never_comes():
    def run(model):
        model(*batch(seed=5))
        model(*batch(seed=6)).backward()

    both(Net(), run, *batch())


def test_evaluation_in_between():
    def run(model):
        model(*batch()).backward()
        model.eval()
        with torch.no_grad():
            answer = model(batch()[0])
        model.train()
        model(*batch(seed=2)).backward()
        return answer

    both(Net(), run, *batch())


def test_evaluation_mode_with_gradients():
    def run(model):
        model.eval()
        model(*batch()).backward()

    model = Net()
    both(model, run, *batch())


def test_a_second_backward_through_a_retained_graph():
    def run(model):
        loss = model(*batch())
        loss.backward(retain_graph=True)
        loss.backward()

    both(Net(), run, *batch())


def test_autograd_grad_writes_no_gradients():
    def run(model):
        loss = model(*batch())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        assert all(p.grad is None for p in model.parameters())
        return torch.cat([g.flatten() for g in gradients])

    both(Net(), run, *batch())


def test_backward_for_some_inputs_only():
    def run(model):
        some = [model.head.weight, model.stem.bias]
        model(*batch()).backward(inputs=some)

    both(Net(), run, *batch())


def test_hooks_on_parameters_see_their_gradients():
    def run(model):
        seen = {}
        model.head.weight.register_hook(lambda g: seen.update(head=g.clone()) or 2 * g)
        model.stem.weight.register_post_accumulate_grad_hook(lambda p: seen.update(stem=p.grad.clone()))
        model(*batch()).backward()
        return torch.cat([seen["head"].flatten(), seen["stem"].flatten()])

    both(Net(), run, *batch())


def test_gradients_of_inputs():
    def run(model):
        x, y = batch()
        x.requires_grad_()
        model(x, y).backward()
        return x.grad

    x, y = batch()
    both(Net(), run, x.requires_grad_(), y)


def test_frozen_layers_and_a_frozen_start():
    model = Net()
    for module in (model.stem, model.blocks[0], model.blocks[2]):
        module.requires_grad_(False)
    both(model, lambda m: m(*batch()).backward(), *batch())


class Adapted(nn.Module):
    """A frozen layer with a low-rank correction, as in LoRA."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x):
        return torch.tanh(self.frozen(x) + self.up(self.down(x)))


def test_low_rank_adapters_on_a_frozen_model():
    model = nn.Sequential(*(Adapted(32) for _ in range(6)))
    example = torch.randn(64, 32)
    both(model, lambda m: m(example).square().mean().backward(), example)


class Tied(nn.Module):
    """The embedding is also the output layer, and one layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for _ in range(3):
            x = self.layer(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def test_tied_weights_and_a_module_used_several_times():
    tokens = torch.randint(50, (4, 24))
    fitted = both(Tied(), lambda m: m(tokens).backward(), tokens)
    assert fitted.head.weight is fitted.embedding.weight


def test_autocast():
    def run(model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(*batch())
        loss.backward()
        return loss.detach()

    model = Net()
    with torch.autocast("cpu", torch.bfloat16):
        fitted = both(model, run, *batch())
    assert len(fitted.elbowroom.entries) == 1


def test_channels_last():
    model = Net().to(memory_format=torch.channels_last)
    x, y = batch()
    x = x.contiguous(memory_format=torch.channels_last)
    both(model, lambda m: m(x, y).backward(), x, y)


class Counts(nn.Module):
    """Overwrites a buffer and an input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(5))
        self.register_buffer("mean", torch.zeros(24))

    def forward(self, x, log):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * (1 + self.mean)
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        log.add_(1)
        return x.square().mean()


def test_mutated_buffers_and_inputs():
    def run(model):
        log = torch.zeros(3)
        for seed in range(2):
            x = torch.randn(40, 24, generator=torch.Generator().manual_seed(seed))
            model(x, log).backward()
        return log

    both(Counts(), run, torch.randn(40, 24), torch.zeros(3), accumulates=True)


def test_changing_batch_sizes_are_planned_one_by_one():
    def run(model):
        for size in (4, 6, 4, 3):
            model(*batch(size)).backward()

    fitted = both(Net(), run, *batch(6))
    assert len(fitted.elbowroom.entries) == 3


def test_more_shapes_than_allowed_are_said_once():
    fitted = fit(Net(), *batch(4), budget="1GiB", max_shapes=1)
    with pytest.warns(UserWarning, match="max_shapes") as said:
        fitted(*batch(5)).backward()
    assert "Net" in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted(*batch(6)).backward()
    strict = fit(Net(), *batch(4), budget="1GiB", max_shapes=1, strict=True)
    with pytest.raises(Unplanned, match="max_shapes"):
        strict(*batch(5))


class Breaks(Net):
    def forward(self, x, y):
        x = self.blocks[1](self.blocks[0](self.stem(x)))
        torch._dynamo.graph_break()
        x = self.blocks[3](self.blocks[2](x))
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


def test_a_graph_break_is_planned_as_two_graphs():
    fitted = both(Breaks(), lambda m: m(*batch()).backward(), *batch(), strict=True, times="measure")
    (entry,) = fitted.elbowroom.entries.values()
    assert len(entry.regions) == 2
    assert step_peak(fitted, batch()) <= entry.plan.budget_bytes - entry.plan.resident_bytes


class BreaksInALoop(Net):
    """PyTorch does not trace the loop, only what it calls: one graph that runs four times."""

    def forward(self, x, y):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


def test_a_graph_that_runs_several_times_is_counted_as_often():
    with pytest.warns(UserWarning, match="outside the traced graphs"):
        fitted = both(BreaksInALoop(), lambda m: m(*batch()).backward(), *batch())
    (entry,) = fitted.elbowroom.entries.values()
    assert len(entry.regions) == 4
    assert len(set(entry.regions)) == 1


def step_peak(model, example) -> int:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with elbowroom.measure("cpu", timeline=False) as measured:
        model(*example).backward()
    return measured.peak_bytes


class Reads(nn.Module):
    """Leaves the graph for a custom autograd function that PyTorch is told not to trace."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.second(outside(torch.tanh(self.first(x)))).square().mean()


@torch._dynamo.disable
def outside(x):
    return torch.exp(-x * x)


def test_what_runs_outside_the_graphs_is_said():
    example = torch.randn(16, 32)
    with pytest.warns(UserWarning, match="outside the traced graphs"):
        fitted = fit(Reads(), example, budget="1GiB")
    fitted(example).backward()
    with pytest.raises(Unplanned, match="not kept"):
        fit(Reads(), example, budget="1GiB", strict=True)


class Inverts(nn.Module):
    """Checks, as an effect, that there is an inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return torch.linalg.inv(self.layer(x) + 3 * torch.eye(6)).square().mean()


class Looks(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(10, 8, **options), nn.Linear(8, 8)

    def forward(self, tokens):
        return torch.tanh(self.layer(torch.tanh(self.table(tokens)))).square().mean()


@pytest.mark.parametrize(
    ("make", "example", "why"),
    [
        (Inverts, torch.randn(6, 6), "_linalg_check_errors.default has effects"),
        (lambda: Looks(sparse=True), torch.randint(10, (4, 5)), "sparse tensors"),
    ],
)
def test_a_graph_that_cannot_be_planned_runs_as_it_is_and_that_is_said(make, example, why):
    model = make()
    with pytest.warns(UserWarning, match=why):
        fitted = fit(model, example, budget="1GiB")
    assert verify_step(fitted.elbowroom, (example,), {}).against == "eager"
    with pytest.raises(Unplanned, match=why):
        fit(make(), example, budget="1GiB", strict=True)


class LooksAgain(nn.Module):
    """A layer's input is a view of something that tracing copies or computes a second time, and the plan does not."""

    def __init__(self, twice) -> None:
        super().__init__()
        self.twice = twice
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            a, b = self.twice(norm(x))
            x = a + layer(b)  # may be written where a is, unless the layer's backward wants that
        return x.square().mean()


def dropped(x):
    y = F.dropout(x, 0.0, training=True)  # a copy
    return y, y


@pytest.mark.parametrize("twice", [dropped, lambda x: (torch.sin(x), torch.sin(x))])
def test_what_a_view_shows_is_not_written_over(twice):
    example = torch.randn(3, 5, 8)
    both(LooksAgain(twice), lambda m: m(example).backward(), example, strict=True)
    model = LooksAgain(twice)
    fitted = fit(copy.deepcopy(model), example, budget="1GiB", strict=True)
    model(example).backward()
    fitted(example).backward()
    assert_same_state(model, fitted.elbowroom.model)


def test_a_parameter_that_the_step_overwrites():
    example = torch.randint(10, (4, 5))
    both(Looks(max_norm=0.5), lambda m: m(example).backward(), example, strict=True)


def test_state_copies_and_pickles():
    model = Net()
    keys = list(model.state_dict())
    fitted = fit(model, *batch(), budget="1GiB")
    assert list(fitted.state_dict()) == keys
    assert isinstance(fitted, Net)
    assert type(model) is Net
    fitted.load_state_dict(Net().state_dict())
    plain = copy.deepcopy(model)
    assert type(plain) is Net
    for copied in (pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps(fitted)), plain):
        assert type(copied) is Net
        assert torch.equal(copied.head.weight, model.head.weight)
    other = copy.deepcopy(fitted)
    assert other.head.weight is not model.head.weight
    other(*batch()).backward()
    assert model.head.weight.grad is None
    assert other.head.weight.grad is not None


def test_the_loss_inside():
    model, reference = Net(), Net()
    reference.load_state_dict(model.state_dict())
    x, y = batch()
    fitted = fit(model, x, y, budget="1GiB", loss=F.cross_entropy)
    torch.manual_seed(3)
    fitted(x, y).backward()
    torch.manual_seed(3)
    F.cross_entropy(reference(x), y).backward()
    assert_same_state(reference, model)
    with torch.no_grad():
        assert fitted(x).shape == (4, 5)
    alone = fit(Net(), x, budget="1GiB", loss=lambda logits: logits.square().mean())
    alone(x).backward()


def test_keyword_arguments_and_structured_outputs():
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, *, x, scale):
            y = self.layer(x) * scale
            return {"loss": y.square().mean(), "y": y}

    x = torch.randn(4, 8)
    fitted = fit(Keyword(), {"x": x, "scale": 2.0}, budget="1GiB")
    fitted(x=x, scale=2.0)["loss"].backward()
    assert fitted.layer.weight.grad is not None


def test_optimizer_state_is_counted():
    model = Net()
    size = sum(p.numel() * 4 for p in model.parameters())
    plan = elbowroom.plan(model, *batch(), budget="1GiB", times="estimate")
    for make, copies in ((torch.optim.Adam, 2), (partial(torch.optim.SGD, lr=0.1), 0)):
        optimizer = make(model.parameters())
        counted = elbowroom.plan(model, *batch(), budget="1GiB", optimizer=optimizer, times="estimate")
        counters = 4 * len(list(model.parameters())) if copies else 0
        assert counted.resident["optimizer"] == copies * size + counters
        assert counted.peak_bytes == plan.peak_bytes + copies * size + counters
    assert plan.resident["parameters"] == plan.resident["gradients"] == size


def test_a_budget_too_small_says_what_to_do():
    with pytest.raises(BudgetTooSmall, match="the least found") as too_small:
        fit(Net(), *batch(), budget="100KiB")
    error = too_small.value
    assert error.largest
    assert fit(Net(), *batch(), budget=error.least_budget)
    with pytest.raises(BudgetTooSmall):
        fit(Net(), *batch(), budget=error.least_budget - 2048)


def test_requests_that_make_no_sense():
    for options, culprit in (
        ({"budget": "lots"}, "budget"),
        ({"budget": "50%"}, "budget"),
        ({"budget": "1GiB", "times": "guess"}, "times"),
        ({"budget": "1GiB", "max_shapes": 0}, "max_shapes"),
    ):
        with pytest.raises(InputError, match=culprit):
            elbowroom.fit(Net(), *batch(), **options)
    with pytest.raises(InputError, match="model"):
        fit(lambda x: x, budget="1GiB")
    with pytest.raises(InputError, match="fitted already"):
        fit(fit(Net(), *batch(), budget="1GiB"), *batch(), budget="1GiB")


def test_finite_differences_with_dropout_at_every_budget():
    """The dropped elements are the same in every replay: the gradient is that of the function really computed."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Dropout(0.3)) for _ in range(6))).double()
    x = torch.randn(8, 12, dtype=torch.float64)
    direction = torch.randn_like(model[0][0].weight)
    for share in (1.0, 0.6, 0.3):
        fitted = tight(copy.deepcopy(model), x, share=share, accumulates=True)  # forwards begin with gradients
        weight = fitted[0][0].weight

        def value(step, fitted=fitted, weight=weight):
            with torch.no_grad():
                weight.add_(direction, alpha=step)
            torch.manual_seed(1)
            return fitted(x).square().sum()

        value(0.0).backward()
        slope = (value(1e-6).item() - value(-2e-6).item()) / 2e-6
        assert (weight.grad * direction).sum().item() == pytest.approx(slope, rel=1e-5)


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


def test_plans_are_saved_loaded_and_refused(tmp_path):
    model = Net()
    plan = elbowroom.plan(model, *batch(), budget="1GiB", times="estimate")
    least = tight(copy.deepcopy(model), *batch())
    (entry,) = least.elbowroom.entries.values()
    path = tmp_path / "plan.json"
    entry.plan.save(path)
    loaded = elbowroom.Plan.load(path)
    assert loaded == entry.plan
    fitted = fit(model, *batch(), budget=loaded.budget_bytes, plan=loaded)
    assert recomputes(fitted)
    fitted(*batch()).backward()
    fitted.elbowroom.set_budget("1GiB")
    assert not recomputes(fitted)
    with pytest.raises(InputError, match="plan"):
        fit(Net(blocks=3), *batch(), budget="1GiB", plan=loaded)
    with pytest.raises(InputError, match="plan: it needs"):
        fit(Net(), *batch(), budget=loaded.peak_bytes - 1, plan=loaded)
    path.write_text("{}")
    with pytest.raises(InputError, match="plan"):
        elbowroom.Plan.load(path)
    assert plan.peak_bytes > loaded.peak_bytes


def test_verify_finds_a_wrong_gradient():
    from elbowroom.errors import Mismatch

    fitted = fit(Net(), *batch(), budget="1GiB", verify=True)
    session = fitted.elbowroom
    assert verify_step(session, batch(), {}).against == "eager"
    (entry,) = session.entries.values()
    (region,) = entry.regions
    program, emitted = region.programs[-1]
    region.programs[-1] = (program, type(emitted)(emitted.forward, _after(emitted.backward, fitted), ""))
    with pytest.raises(Mismatch, match=r"the gradient of head\.weight"):
        verify_step(session, batch(), {})


def _after(backward, fitted):
    def run(arguments):
        outputs = backward(arguments)
        with torch.no_grad():
            fitted.head.weight.grad[0, 0] += 1
        return outputs

    return run


def test_forwards_in_flight_are_counted_and_said():
    fitted = tight(Net(), *batch())
    first = fitted(*batch(seed=1))
    with pytest.warns(UserWarning, match="forwards="):
        second = fitted(*batch(seed=2))
    (first + second).backward()
    two = tight(Net(), *batch(), forwards=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):  # what the first round saved is gone by then
            sum(two(*batch(seed=seed)) for seed in range(2)).backward()
    (entry,) = two.elbowroom.entries.values()
    assert len(entry.regions) == 2
    assert not entry.regions[0].tickets.waiting


def test_a_model_with_backward_hooks_runs_stage_by_stage():
    def layers():
        torch.manual_seed(2)
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(8)))

    x = torch.randn(256, 64)
    seen = []
    ours, plain = layers(), layers()
    for model in (ours, plain):
        model[3][0].register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].clone()))
    roomy = elbowroom.fit(ours, x, budget="1GiB")
    (entry,) = roomy.elbowroom.entries.values()
    resident = entry.plan.resident_bytes
    budget = resident + (entry.plan.plain_peak_bytes - resident) * 2 // 3
    fitted = elbowroom.fit(ours, x, budget=budget, loss=lambda y: y.square().mean())
    torch.manual_seed(5)
    fitted(x).backward()
    torch.manual_seed(5)
    plain(x).square().mean().backward()
    assert_same_state(plain, ours)
    assert torch.equal(seen[0], seen[1])
    (entry,) = fitted.elbowroom.entries.values()
    assert entry.plan.time_s > entry.plan.plain_time_s
    assert step_peak(fitted, (x,)) <= budget - resident
    for fresh in (copy.deepcopy(fitted), pickle.loads(pickle.dumps(layers()))):
        fresh(x)


def test_stages_given_by_hand():
    model = Net()
    reference = copy.deepcopy(model)
    x, y = batch()
    stages = [model.stem, *model.blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.head]
    with pytest.raises(InputError, match=r"stages\[1\]"):
        fit(model, x, y, budget="1GiB", stages=[model.stem, torch.relu], loss=F.cross_entropy)
    fitted = elbowroom.fit(model, x, y, budget="1GiB", stages=stages, loss=F.cross_entropy)

    class Plain(nn.Module):
        def forward(self, x):
            x = reference.stem(x)
            for block in reference.blocks:
                x = block(x)
            return reference.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))

    torch.manual_seed(3)
    fitted(x, y).backward()
    torch.manual_seed(3)
    F.cross_entropy(Plain()(x), y).backward()
    assert_same_state(reference, model)
    with pytest.raises(BudgetTooSmall, match="the least for these stages") as too_small:
        fitted.elbowroom.set_budget("100KiB")
    fitted.elbowroom.set_budget(too_small.value.least_budget)
    fitted(x, y).backward()
    with pytest.raises(InputError, match="forwards"):
        fit(model, x, y, budget="1GiB", stages=stages, forwards=2, loss=F.cross_entropy)
    strict = fit(model, x, y, budget="1GiB", stages=stages, max_shapes=1, strict=True, loss=F.cross_entropy)
    with pytest.raises(Unplanned, match="max_shapes"):
        strict(*batch(5))


def test_a_hooked_model_that_is_no_row_of_stages_says_so():
    model = Net()
    model.head.register_full_backward_hook(lambda module, inputs, outputs: None)
    with pytest.warns(UserWarning, match=r"'head' has a backward hook.*stages="):
        fit(model, *batch(), budget="1GiB")


class Splits(nn.Module):
    """Takes its activations apart and puts them together again, with little else in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(12, 12, 1) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(12) for _ in range(6))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            a, b, c = norm(layer(x)).chunk(3, dim=1)
            x = torch.cat([a * torch.sigmoid(b), b, c.tanh()], dim=1)
        return x.square().mean()


def test_values_in_tuples_at_every_budget():
    x = torch.randn(4, 12, 8, 8)
    plain = Splits()
    session = fit(copy.deepcopy(plain), x, budget="1GiB").elbowroom
    (entry,) = session.entries.values()
    (region,) = entry.regions
    resident = entry.plan.resident_bytes
    torch.manual_seed(1)
    plain(x).backward()
    for share in (0.9, 0.7, 0.5, 0.0):
        budget = resident + int(share * (entry.plan.plain_peak_bytes - resident))
        try:
            session.set_budget(budget)
        except BudgetTooSmall as too_small:
            session.set_budget(too_small.least_budget)
        assert all(region.captured.graph.ops[op].storable for op in region.program.saved)
        for p in session.model.parameters():
            p.grad = None
        session(x).backward()
        for p, q in zip(plain.parameters(), session.model.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


def test_a_model_that_changes_is_planned_again():
    """Freezing a layer makes PyTorch trace anew: that step gets a plan at once, the next one a plan of everything."""

    def run(model):
        for step in range(4):
            if step == 2:
                model.blocks[1].requires_grad_(False)
                model.blocks[2].drop.p = 0.5
            model(*batch(seed=step)).backward()

    fitted = both(Net(), run, *batch(), strict=True)
    (entry,) = fitted.elbowroom.entries.values()
    (region,) = entry.regions
    assert len(region.captured.graph.gradients) == len([p for p in fitted.parameters() if p.requires_grad])
