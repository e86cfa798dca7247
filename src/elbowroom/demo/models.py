"""The two models of the demonstration, and batches for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS = 5
SEED = 7

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Subject:
    """A model that returns its loss, and batches for it."""

    title: str
    model: nn.Module
    batches: Sequence[tuple[Tensor, ...]]
    precision: Callable[[], AbstractContextManager[Any]]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)


def transformer_subject(device: torch.device) -> Subject:
    large = device.type == "cuda"
    width, heads, length, count = (1024, 16, 1024, 16) if large else (64, 4, 128, 8)
    layers, vocabulary = 6, 512

    def batch(rng: torch.Generator) -> tuple[Tensor, ...]:
        tokens = torch.randint(vocabulary, (count, length + 1), generator=rng)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    # Dropout draws from the generator: here it is proof that recomputation draws the same.
    model = _seeded(lambda: Transformer(vocabulary, length, width, heads, layers, dropout=0.1))
    return _subject(f"transformer, {layers} layers of {width}", model, batch, device)


def cnn_subject(device: torch.device) -> Subject:
    large = device.type == "cuda"
    width, size, count = (64, 112, 64) if large else (16, 32, 16)

    def batch(rng: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randn(count, 3, size, size, generator=rng), torch.randint(10, (count,), generator=rng)

    model = _seeded(lambda: Cnn(width))
    return _subject(f"CNN, {len(model.blocks)} residual blocks", model, batch, device)


class Transformer(nn.Module):
    """A language model of pre-norm blocks; called with tokens and the tokens that follow, it returns its loss."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) / math.sqrt(width))
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Block(nn.Module):
    """Attention and a perceptron, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.norm1(x)))
        wide: Tensor = F.gelu(self.up(self.norm2(x)))
        narrow: Tensor = self.dropout(self.down(wide))
        return x + narrow

    def attend(self, x: Tensor) -> Tensor:
        heads = self.mix(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Cnn(nn.Module):
    """A small ResNet (He et al. 2016) with batch norm; called with images and labels, it returns its loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        widths = [width] * 5 + [2 * width] * 5
        pairs = pairwise([width, *widths])
        self.blocks = nn.Sequential(*(Residual(a, b, stride=1 if a == b else 2) for a, b in pairs))
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.stem(images)).mean((2, 3))), labels)


class Residual(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.shortcut(x))


def _subject(
    title: str, model: nn.Module, batch: Callable[[torch.Generator], tuple[Tensor, ...]], device: torch.device
) -> Subject:
    rng = torch.Generator().manual_seed(SEED)
    batches = [tuple(part.to(device) for part in batch(rng)) for _ in range(STEPS)]
    low = device.type == "cuda"
    precision: Any = (lambda: torch.autocast("cuda", torch.bfloat16)) if low else nullcontext
    return Subject(f"{title}, bfloat16" if low else title, model.to(device), batches, precision)


def _seeded(build: Callable[[], Model]) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return build()
