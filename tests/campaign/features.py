"""What random models are made of: pieces of networks, and the Python that people write between them.

A feature is the lines that it adds to `__init__` and to `forward`. `@` in a name stands for the block's number, so
that one feature can come several times in one class. The lines know `h`, the value so far, of shape (batch, LENGTH,
WIDTH), which they leave in that shape; `x`, the input; `scale`, a float argument of the call; and the constants.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """`helpers` is text that stands before the class. `draws`: it takes numbers from torch's generator."""

    name: str
    init: tuple[str, ...] = ()
    forward: tuple[str, ...] = ()
    helpers: str = ""
    draws: bool = False
    layer: str = ""  # an attribute that holds a layer from WIDTH to WIDTH, which may be replaced


TRACEABLE_FUNCTION = """
class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value * value * value * 0.1

    @staticmethod
    def backward(ctx, gradient):
        (value,) = ctx.saved_tensors
        return gradient * value * value * 0.3
"""

NUMPY_FUNCTION = """
class NumpyTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        # Copied, so that the result is in memory of torch's and not of numpy's, which no allocator reports.
        result = torch.from_numpy(numpy.tanh(value.detach().float().cpu().numpy())).to(value, copy=True)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        (result,) = ctx.saved_tensors
        slope = 1.0 - numpy.square(result.detach().float().cpu().numpy())
        return gradient * torch.from_numpy(slope).to(gradient)
"""

_LAYERS = (
    Feature(
        "linear",
        ("self.up@, self.down@ = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)",),
        ("h = self.down@(F.gelu(self.up@(h)))",),
    ),
    Feature("tanh", ("self.plain@ = nn.Linear(WIDTH, WIDTH)",), ("h = torch.tanh(self.plain@(h))",), layer="plain@"),
    Feature(
        "convolution",
        ("self.conv@, self.norm@ = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH)",),
        ("h = F.relu(self.norm@(self.conv@(h.transpose(1, 2)))).transpose(1, 2)",),
    ),
    Feature("layer norm", ("self.norm@ = nn.LayerNorm(WIDTH)",), ("h = self.norm@(h)",)),
    Feature("dropout", ("self.drop@ = nn.Dropout(0.2)",), ("h = self.drop@(h)",), draws=True),
    Feature(
        "attention",
        ("self.qkv@ = nn.Linear(WIDTH, 3 * WIDTH)",),
        (
            "q, k, v = (part.unsqueeze(1) for part in self.qkv@(h).chunk(3, -1))",
            "h = h + F.scaled_dot_product_attention(q, k, v).squeeze(1)",
        ),
    ),
    Feature(
        "embedding",
        ("self.table@ = nn.Embedding(16, WIDTH)",),
        ("h = h + self.table@((x[..., 0] * 7).long().abs() % 16)",),
    ),
    Feature(
        "skip",
        ("self.skip@ = nn.Linear(WIDTH, WIDTH)",),
        ("h = h + F.silu(self.skip@(torch.sin(h)))",),
        layer="skip@",
    ),
    Feature(
        "called twice",
        ("self.twice@ = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())",),
        ("h = self.twice@(self.twice@(h))",),
        layer="twice@",
    ),
    Feature(
        "tied weights",
        (
            "self.one@, self.other@ = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)",
            "self.other@.weight = self.one@.weight",
        ),
        ("h = self.other@(torch.tanh(self.one@(h)))",),
    ),
    Feature(
        "frozen layer",
        ("self.frozen@ = nn.Linear(WIDTH, WIDTH).requires_grad_(False)",),
        ("h = torch.tanh(self.frozen@(h))",),
    ),
    Feature("unused parameters", ("self.unused@ = nn.Linear(WIDTH, WIDTH)",)),
    Feature(
        "result not used by the loss",
        ("self.aside@ = nn.Linear(WIDTH, WIDTH)",),
        ("aside = self.aside@(h)", "h = h + 0 * aside.detach()"),
    ),
    Feature(
        "complex parameters",
        ("self.turn@ = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))",),
        ("h = 0.5 * h + (h * self.turn@).real.to(h.dtype) * 0.5",),
    ),
    Feature(
        "checkpoint inside",
        ("self.inner@ = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))",),
        ("h = h + torch.utils.checkpoint.checkpoint(self.inner@, h, use_reentrant=False)",),
        layer="inner@",
    ),
    Feature("function", (), ("h = Cube.apply(torch.tanh(h))",), TRACEABLE_FUNCTION),
    Feature("function in numpy", (), ("h = NumpyTanh.apply(h)",), NUMPY_FUNCTION),
)

_PYTHON = (
    Feature("counter", ("self.steps@ = 0",), ("self.steps@ += 1",)),
    Feature("counter in use", ("self.turns@ = 0",), ("self.turns@ += 1", "h = h * (1.0 + 0.5 / self.turns@)")),
    Feature("list that grows", ("self.log@ = []",), ("self.log@.append(len(self.log@))",)),
    Feature(
        "deque of tensors",
        ("self.recent@ = collections.deque(maxlen=3)",),
        ("self.recent@.append(h.detach().mean())",),
    ),
    Feature(
        "statistics",
        ('self.stats@ = {"calls": 0, "mean": 0.0}',),
        ('self.stats@["calls"] += 1', 'self.stats@["mean"] = h.detach().mean().item()'),
    ),
    Feature("print", (), ('print("block@ sees", tuple(h.shape))',)),
    Feature("print of a value", (), ('print("block@ has", h.detach().float().mean().item())',)),
    Feature("python's random factor", (), ("h = h * (0.5 + random.random())",)),
    Feature("numpy's random factor", (), ("h = h * (0.5 + float(numpy.random.rand()))",)),
    Feature("torch's random noise", (), ("h = h + 0.1 * torch.randn_like(h)",), draws=True),
    Feature(
        "stochastic depth",
        ("self.deep@ = nn.Linear(WIDTH, WIDTH)",),
        ("if random.random() < 0.7:", "    h = h + torch.tanh(self.deep@(h))"),
        layer="deep@",
    ),
    Feature(
        "queue",
        (
            'self.register_buffer("queue@", torch.randn(WIDTH, 32))',
            'self.register_buffer("place@", torch.zeros(1, dtype=torch.long))',
        ),
        (
            "with torch.no_grad():",
            "    n, p = h.shape[0], int(self.place@)",
            "    p = p if p + n <= 32 else 0",
            "    self.queue@[:, p : p + n] = h.detach().mean(1).t()",
            "    self.place@[0] = (p + n) % 32",
            "h = h + (h @ self.queue@.clone()).softmax(-1).mean(-1, keepdim=True)",
        ),
    ),
    Feature(
        "queue with a number",
        ('self.register_buffer("line@", torch.randn(WIDTH, 32))', "self.at@ = 0"),
        (
            "with torch.no_grad():",
            "    n, p = h.shape[0], self.at@",
            "    p = p if p + n <= 32 else 0",
            "    self.line@[:, p : p + n] = h.detach().mean(1).t()",
            "    self.at@ = (p + n) % 32",
            "h = h + (h @ self.line@.clone()).softmax(-1).mean(-1, keepdim=True)",
        ),
    ),
    Feature(
        "observer",
        ('self.register_buffer("ema@", torch.zeros(WIDTH))',),
        (
            "with torch.no_grad():",
            "    self.ema@.mul_(0.9).add_(0.1 * h.detach().mean((0, 1)))",
            "h = h - self.ema@.clone()",
        ),
    ),
    Feature(
        "buffer assigned anew",
        ('self.register_buffer("seen@", torch.zeros(()))',),
        ("self.seen@ = self.seen@ + 1", "h = h * (1.0 + 1.0 / self.seen@)"),
    ),
    Feature(
        "temperature",
        ("self.temperature@ = 1.0",),
        ("self.temperature@ *= 0.97", "h = h / self.temperature@"),
    ),
    Feature("float argument", (), ("h = h * scale",)),
    Feature("branch on data", (), ("if h.mean() > 0:", "    h = torch.sin(h)", "else:", "    h = torch.tanh(h)")),
    Feature("item in use", (), ("h = h / (1.0 + abs(h.detach().mean().item()))",)),
    Feature(
        "numpy in use",
        (),
        ("h = h + torch.from_numpy(numpy.tanh(h.detach().float().cpu().numpy())).to(h)",),
    ),
    Feature("graph break", (), ("torch._dynamo.graph_break()",)),
)

LAYERS = {feature.name: feature for feature in _LAYERS}
PYTHON = {feature.name: feature for feature in _PYTHON}
FEATURES = {**LAYERS, **PYTHON}

# How a model answers: the last lines of `forward`, where `out` and `h` are known, and helpers.
DATACLASS = """
@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor
"""

MODEL_OUTPUT = """
from transformers.utils import ModelOutput

@dataclasses.dataclass
class Output(ModelOutput):
    logits: torch.Tensor = None
    hidden: torch.Tensor = None
"""

OUTPUTS = {
    "tensor": ("return out", ""),
    "tuple": ("return out, h.mean()", ""),
    "dict": ('return {"logits": out, "mean": h.mean()}', ""),
    "dataclass": ("return Output(out, h)", DATACLASS),
    "model output": ("return Output(logits=out, hidden=h)", MODEL_OUTPUT),
}

# How the loss finds its tensor in what the model answers.
PICKS = {
    "tensor": "output",
    "tuple": "output[0]",
    "dict": 'output["logits"]',
    "dataclass": "output.logits",
    "model output": "output.logits",
}

LOSSES = {
    "mean square": "F.mse_loss(out, target)",
    "square": "(out - target).square().mean()",
    "cross entropy": "F.cross_entropy(out.flatten(0, 1), target.argmax(-1).flatten())",
    "sum": "(out * target).sum() * 0.01",
}
