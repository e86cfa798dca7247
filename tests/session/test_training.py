"""What people do with a model besides one plain step: it trains like the original, bit for bit."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from elbowroom.errors import BudgetTooSmall  # noqa: E402
from trained import Embeds, Net, assert_same_state, batch, both, fit, tight  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


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
            mean = x.detach().mean(0)
            self.mean.mul_(0.9).add_(mean, alpha=0.1)
            self.mean.addcmul_(mean, mean, value=0.1).addcdiv_(mean, 3 + mean, value=0.1)
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
    both(Embeds(max_norm=0.5), lambda m: m(example).backward(), example, strict=True)


def test_finite_differences_with_dropout_at_every_budget():
    """The dropped elements are the same in every rerun: the gradient is that of the function really computed."""
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
    (graph,) = entry.graphs
    resident = entry.plan.resident_bytes
    torch.manual_seed(1)
    plain(x).backward()
    for share in (0.9, 0.7, 0.5, 0.0):
        budget = resident + int(share * (entry.plan.plain_peak_bytes - resident))
        try:
            session.set_budget(budget)
        except BudgetTooSmall as too_small:
            session.set_budget(too_small.least_budget)
        assert all(graph.planner.graph.ops[op].storable for op in graph.region.program.saved)
        for p in session.model.parameters():
            p.grad = None
        session(x).backward()
        for p, q in zip(plain.parameters(), session.model.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
