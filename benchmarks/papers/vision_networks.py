"""The networks of 001 ch. 2–4 as chains of modules: ResNets, DenseNets and Inception v3, with the loss.

What torchvision has is built as there: the tests compare the numbers of parameters. A stage is a residual block, a
dense layer with the concatenation that follows it, an Inception block, or a transition; the layers before the first
block and those after the last one are stages, too. Nothing here needs torchvision.

ResNet-200 has the blocks (3, 24, 36, 3). ResNet-1001 has three groups of 111 bottleneck blocks. Its first group keeps
the full resolution and is 256 wide: that is the network whose batch of 8 at 224² takes the 225 GiB that the thesis
tells, while the one for CIFAR, a quarter as wide, would take 60.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 1000


class Loss(nn.Module):
    """Cross entropy against labels that never change: a chain's stages take one value each."""

    def forward(self, scores: Tensor) -> Tensor:
        labels = torch.zeros(scores.shape[0], dtype=torch.int64, device=scores.device)
        return F.cross_entropy(scores, labels)


def convolution(a: int, b: int, size: int | tuple[int, int] = 1, stride: int = 1, eps: float = 1e-5) -> nn.Sequential:
    """A convolution that keeps the image's side unless it is strided, with its batch normalization."""
    height, width = size if isinstance(size, tuple) else (size, size)
    layer = nn.Conv2d(a, b, (height, width), stride, (height // 2, width // 2), bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(b, eps=eps))


# --- residual networks ---------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions 3×3, or a bottleneck of 1×1, 3×3 and 1×1, beside a shortcut."""

    def __init__(self, a: int, width: int, b: int, stride: int) -> None:
        super().__init__()
        if b == width:
            parts = [convolution(a, b, 3, stride), nn.ReLU(inplace=True), convolution(b, b, 3)]
        else:
            parts = [convolution(a, width), nn.ReLU(inplace=True), convolution(width, width, 3, stride)]
            parts += [nn.ReLU(inplace=True), convolution(width, b)]
        self.inside = nn.Sequential(*parts)
        self.beside = convolution(a, b, 1, stride) if a != b or stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(self.inside(x) + self.beside(x))


def residual(
    counts: Sequence[int], wider: int, small_stem: bool = False, width: int = 64, classes: int = CLASSES
) -> list[nn.Module]:
    """A ResNet; `wider` is how much wider than the 3×3 convolutions a block's output is. A small stem keeps the
    side of the images."""
    if small_stem:
        stages: list[nn.Module] = [nn.Sequential(convolution(3, width, 3), nn.ReLU(inplace=True))]
    else:
        stages = [nn.Sequential(convolution(3, width, 7, 2), nn.ReLU(inplace=True)), nn.MaxPool2d(3, 2, 1)]
    a = width
    for group, count in enumerate(counts):
        for n in range(count):
            inner = width << group
            stages.append(Residual(a, inner, wider * inner, 2 if group and n == 0 else 1))
            a = wider * inner
    return [*stages, classifier(a, classes), Loss()]


def classifier(a: int, classes: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(a, classes))


# --- dense networks ------------------------------------------------------------------------------------------


class DenseLayer(nn.Module):
    """Hands on its input together with what it adds: what is between two layers is one tensor."""

    def __init__(self, a: int, growth: int) -> None:
        super().__init__()
        narrow, wide = nn.Conv2d(a, 4 * growth, 1, bias=False), nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False)
        before, between = nn.BatchNorm2d(a), nn.BatchNorm2d(4 * growth)
        self.inside = nn.Sequential(before, nn.ReLU(inplace=True), narrow, between, nn.ReLU(inplace=True), wide)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.inside(x)], 1)


def dense(counts: Sequence[int], growth: int, first: int) -> list[nn.Module]:
    stem = nn.Sequential(convolution(3, first, 7, 2), nn.ReLU(inplace=True))
    stages: list[nn.Module] = [stem, nn.MaxPool2d(3, 2, 1)]
    a = first
    for group, count in enumerate(counts):
        if group:
            halved = nn.Conv2d(a, a // 2, 1, bias=False)
            stages.append(nn.Sequential(nn.BatchNorm2d(a), nn.ReLU(inplace=True), halved, nn.AvgPool2d(2)))
            a //= 2
        for _ in range(count):
            stages.append(DenseLayer(a, growth))
            a += growth
    head = nn.Sequential(nn.BatchNorm2d(a), nn.ReLU(inplace=True), *classifier(a))
    return [*stages, head, Loss()]


# --- Inception v3, without its additional loss ---------------------------------------------------------------


class Branches(nn.Module):
    """Ways beside each other whose outputs are concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def unit(a: int, b: int, size: int | tuple[int, int] = 1, stride: int = 1, padded: bool = True) -> nn.Sequential:
    made = convolution(a, b, size, stride, eps=1e-3)
    if not padded:
        made[0] = nn.Conv2d(a, b, size, stride, bias=False)
    return nn.Sequential(*made, nn.ReLU(inplace=True))


def row(a: int, *steps: tuple[int, int | tuple[int, int]]) -> nn.Sequential:
    """Units one after the other, each given by its channels and the size of its window."""
    units = []
    for b, size in steps:
        units.append(unit(a, b, size))
        a = b
    return nn.Sequential(*units)


def pooled(a: int, b: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), unit(a, b))


def inception_a(a: int, b: int) -> Branches:
    return Branches(unit(a, 64), row(a, (48, 1), (64, 5)), row(a, (64, 1), (96, 3), (96, 3)), pooled(a, b))


def inception_b(a: int) -> Branches:
    wide = nn.Sequential(row(a, (64, 1), (96, 3)), unit(96, 96, 3, 2, padded=False))
    return Branches(unit(a, 384, 3, 2, padded=False), wide, nn.MaxPool2d(3, 2))


def inception_c(c: int) -> Branches:
    flat, high = (1, 7), (7, 1)
    once = row(768, (c, 1), (c, flat), (192, high))
    twice = row(768, (c, 1), (c, high), (c, flat), (c, high), (192, flat))
    return Branches(unit(768, 192), once, twice, pooled(768, 192))


def inception_d() -> Branches:
    narrow = nn.Sequential(unit(768, 192), unit(192, 320, 3, 2, padded=False))
    wide = nn.Sequential(row(768, (192, 1), (192, (1, 7)), (192, (7, 1))), unit(192, 192, 3, 2, padded=False))
    return Branches(narrow, wide, nn.MaxPool2d(3, 2))


def inception_e(a: int) -> Branches:
    def fork() -> Branches:
        return Branches(unit(384, 384, (1, 3)), unit(384, 384, (3, 1)))

    once = nn.Sequential(unit(a, 384), fork())
    twice = nn.Sequential(row(a, (448, 1), (384, 3)), fork())
    return Branches(unit(a, 320), once, twice, pooled(a, 192))


def inception_v3() -> list[nn.Module]:
    stem: list[nn.Module] = [unit(3, 32, 3, 2, padded=False), unit(32, 32, 3, padded=False), unit(32, 64, 3)]
    stem += [nn.MaxPool2d(3, 2), unit(64, 80), unit(80, 192, 3, padded=False), nn.MaxPool2d(3, 2)]
    blocks = [inception_a(192, 32), inception_a(256, 64), inception_a(288, 64), inception_b(288)]
    blocks += [*(inception_c(c) for c in (128, 160, 160, 192)), inception_d(), inception_e(1280), inception_e(2048)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Dropout(), nn.Flatten(), nn.Linear(2048, CLASSES))
    return [*stem, *blocks, head, Loss()]


# --- which there are -----------------------------------------------------------------------------------------

BUILDERS: dict[str, Callable[[], list[nn.Module]]] = {
    "resnet18": partial(residual, (2, 2, 2, 2), 1),
    "resnet34": partial(residual, (3, 4, 6, 3), 1),
    "resnet50": partial(residual, (3, 4, 6, 3), 4),
    "resnet101": partial(residual, (3, 4, 23, 3), 4),
    "resnet152": partial(residual, (3, 8, 36, 3), 4),
    "resnet200": partial(residual, (3, 24, 36, 3), 4),
    "resnet1001": partial(residual, (111, 111, 111), 4, small_stem=True),
    "densenet121": partial(dense, (6, 12, 24, 16), 32, 64),
    "densenet161": partial(dense, (6, 12, 36, 24), 48, 96),
    "densenet169": partial(dense, (6, 12, 32, 32), 32, 64),
    "densenet201": partial(dense, (6, 12, 48, 32), 32, 64),
    "inception_v3": inception_v3,
    "tiny": partial(residual, (2, 2), 1, small_stem=True, width=8, classes=10),
}
