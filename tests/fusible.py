"""Models for fused kernels, small and quickly compiled, and their gradients."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from elbowroom.demo.models import Transformer

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="Inductor needs a C++ compiler"
)


class Cnn(nn.Module):
    """Convolutions with batch norm, all alike: the kernels of one serve for all."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.head = nn.Linear(width, 10)

    def forward(self, images, labels):
        return F.cross_entropy(self.head(self.layers(images).mean((2, 3))), labels)


class Layer(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())


def transformer():
    tokens = torch.randint(32, (2, 16, 32))
    return Transformer(32, 32, 64, 2, layers=4, dropout=0.1), (tokens[0], tokens[1])


def cnn():
    """Channels last, as Inductor wants its images: else it copies every weight, and there are more kernels."""
    images = torch.randn(16, 8, 16, 16).contiguous(memory_format=torch.channels_last)
    return Cnn(8, layers=8).to(memory_format=torch.channels_last), (images, torch.randint(10, (16,)))


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))), torch.randn(32, 16)


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def set_gradients(model, value: float | None) -> None:
    for p in model.parameters():
        p.grad = None if value is None else torch.full_like(p, value)
