"""Random programs of PyTorch's operators, with copies and views of one another: at every budget the same bits."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.execute.verification import verify_step  # noqa: E402
from fitted import least_budget, step_peak  # noqa: E402
from steps import zero  # noqa: E402

BATCH, ROWS, WIDTH = 2, 4, 8


def written_over(model, a, b):
    c = a * 1.5
    c.add_(b)
    c[:, 1].mul_(0.5)
    return c


def put_together(model, a, b):
    c = torch.zeros_like(a)
    c[:, :2] = b[:, 2:]
    c[:, 2:] += a[:, :2]
    return c


def counted(model, a, b):
    with torch.no_grad():
        model.mean.add_(a.detach().mean((0, 1)))
    return b + model.mean


OPERATORS = {
    "linear": lambda m, a, b: m.layers[0](a),
    "linear on rows": lambda m, a, b: m.layers[1](a.reshape(-1, WIDTH)).view(BATCH, ROWS, WIDTH),
    "norm": lambda m, a, b: m.norm(a),
    "batch norm": lambda m, a, b: m.batch_norm(a),
    "convolution": lambda m, a, b: m.convolution(a),
    "parameter": lambda m, a, b: a + m.parameter,
    "add": lambda m, a, b: a + b,
    "multiply": lambda m, a, b: a * b,
    "relu": lambda m, a, b: F.relu_(a + b),
    "tanh": lambda m, a, b: torch.tanh(a),
    "gelu": lambda m, a, b: F.gelu(a),
    "softmax": lambda m, a, b: a.softmax(-1),
    "center": lambda m, a, b: a - a.mean(-1, keepdim=True),
    "drop": lambda m, a, b: F.dropout(a, 0.3),
    "drop nothing": lambda m, a, b: F.dropout(a, 0.0),
    "copy": lambda m, a, b: a.clone(),
    "lay out": lambda m, a, b: a.transpose(0, 1).contiguous().transpose(0, 1),
    "other shape": lambda m, a, b: a.reshape(BATCH, WIDTH, ROWS).tanh().reshape(BATCH, ROWS, WIDTH),
    "flat": lambda m, a, b: a.flatten().view(ROWS, BATCH, WIDTH).transpose(0, 1).sin(),
    "halves": lambda m, a, b: torch.cat([a[:, :2], b[:, 2:]], 1),
    "columns": lambda m, a, b: torch.cat(a.split(4, -1)[::-1], -1),
    "rows": lambda m, a, b: torch.stack([row * (i + 1) for i, row in enumerate(a.unbind(1))], 1),
    "first row": lambda m, a, b: a[:, :1].expand(BATCH, ROWS, WIDTH) * b,
    "permuted": lambda m, a, b: a[:, torch.tensor([3, 0, 2, 1])],
    "attention": lambda m, a, b: F.scaled_dot_product_attention(a[:, None], b[:, None], a[:, None])[:, 0],
    "constant": lambda m, a, b: a * b.detach(),
    "twice": lambda m, a, b: torch.exp(-a * a) + torch.exp(-a * a).transpose(0, 1).transpose(0, 1) * b,
    "other precision": lambda m, a, b: a.double().mul(b.double()).float(),
    "either": lambda m, a, b: torch.where(a > 0, a, b),
    "written over": written_over,
    "put together": put_together,
    "counted": counted,
}


class Straight(nn.Module):
    """A program whose steps each read two earlier values, named by how long ago they were computed."""

    def __init__(self, steps) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=bias) for bias in (True, False))
        self.norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(ROWS)
        self.convolution = nn.Conv1d(ROWS, ROWS, 3, padding=1)
        self.parameter = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        values = [torch.sin(x), self.layers[0](x)]
        for name, first, second in self.steps:
            values.append(OPERATORS[name](self, values[-1 - first % len(values)], values[-1 - second % len(values)]))
        return sum(value.square().mean() for value in (*values[-2:], self.layers[1](values[-1])))


STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATORS)), st.integers(0, 3), st.integers(0, 6)), min_size=4, max_size=16
)


@settings(max_examples=6, phases=[Phase.explicit, Phase.generate])  # making one smaller takes minutes
@given(steps=STEPS, mixed=st.booleans(), share=st.floats(0, 1))
def test_a_random_program_within_its_budgets(steps, mixed, share):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Straight(steps), torch.randn(BATCH, ROWS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        fitted = elbowroom.fit(model, x, budget="1GiB", kernels="torch", strict=True)
        session = fitted.elbowroom
        (entry,) = session.entries.values()
        least, most = least_budget(fitted), entry.plan.peak_bytes
        for budget in (2**30, least + int(share * max(0, most - least)), least):
            session.set_budget(budget)
            assert entry.plan.resident_bytes + step_peak(fitted, (x,)) <= budget
            zero(fitted)  # gradients that are kept would count as resident when another budget is set
            verify_step(session, (x,), {})
