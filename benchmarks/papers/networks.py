"""The seven networks of paper 002, as its framework draws them: with the loss, and without operators in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Network:
    """A network with its loss, and the batch and side of its images in the paper's Table 1.

    `labels` gives the shape of the labels for a batch.
    """

    build: Callable[[], nn.Module]
    batch: int
    side: int
    labels: Callable[[int], tuple[int, ...]] = lambda batch: (batch,)

    def example(self) -> tuple[nn.Module, Tensor, Tensor]:
        """The network, images and labels, none of which takes memory: there is nothing in their tensors."""
        with torch.device("meta"):
            images = torch.empty(self.batch, 3, self.side, self.side)
            return self.build().train(), images, torch.empty(self.labels(self.batch), dtype=torch.int64)


class Trained(nn.Module):
    """Parts in a row, and the loss."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.parts(x), y)


def convolution(
    a: int, b: int, size: int = 3, stride: int = 1, dilation: int = 1, relu: bool = True
) -> nn.Sequential:
    """A convolution with batch normalization and, if wanted, a ReLU."""
    pad = dilation * (size // 2)
    parts = [nn.Conv2d(a, b, size, stride, pad, dilation, bias=False), nn.BatchNorm2d(b)]
    return nn.Sequential(*parts, *([nn.ReLU()] if relu else []))


# --- residual and dense networks -----------------------------------------------------------------------------


class Bottleneck(nn.Module):
    def __init__(self, a: int, width: int, stride: int, dilation: int) -> None:
        super().__init__()
        b = 4 * width
        self.inside = nn.Sequential(
            convolution(a, width, 1, stride),
            convolution(width, width, 3, 1, dilation),
            convolution(width, b, 1, relu=False),
        )
        self.beside = convolution(a, b, 1, stride, relu=False) if a != b or stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inside(x) + self.beside(x))


def bottlenecks(counts: Sequence[int], a: int, dilated: bool = False) -> list[nn.Module]:
    blocks = []
    for level, count in enumerate(counts):
        for n in range(count):
            stride = 2 if n == 0 and level and not (dilated and level > 1) else 1
            dilation = 2 ** (level - 1) if dilated and level > 1 else 1
            blocks.append(Bottleneck(a, 64 << level, stride, dilation))
            a = 256 << level
    return blocks


def resnet(*counts: int) -> nn.Module:
    stem = convolution(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)
    return Trained(*stem, *bottlenecks(counts, 64), nn.AvgPool2d(7), nn.Flatten(), nn.Linear(2048, 1000))


class DenseLayer(nn.Module):
    def __init__(self, a: int, growth: int) -> None:
        super().__init__()
        narrow, wide = nn.Conv2d(a, 4 * growth, 1, bias=False), nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False)
        self.inside = nn.Sequential(nn.BatchNorm2d(a), nn.ReLU(), narrow, nn.BatchNorm2d(4 * growth), nn.ReLU(), wide)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.inside(x)], 1)


def densenet161() -> nn.Module:
    a, growth = 96, 48
    parts: list[nn.Module] = [convolution(3, a, 7, 2), nn.MaxPool2d(3, 2, 1)]
    for count in (6, 12, 36, 24):
        if len(parts) > 2:
            parts += [nn.BatchNorm2d(a), nn.ReLU(), nn.Conv2d(a, a // 2, 1, bias=False), nn.AvgPool2d(2)]
            a //= 2
        for _ in range(count):
            parts.append(DenseLayer(a, growth))
            a += growth
    return Trained(*parts, nn.BatchNorm2d(a), nn.ReLU(), nn.AvgPool2d(7), nn.Flatten(), nn.Linear(a, 1000))


def vgg19() -> nn.Module:
    parts: list[nn.Module] = []
    a = 3
    for count, b in ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512)):
        for _ in range(count):
            parts += [nn.Conv2d(a, b, 3, 1, 1), nn.ReLU()]
            a = b
        parts.append(nn.MaxPool2d(2))
    wide = [nn.Linear(25088, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()]
    return Trained(*parts, nn.Flatten(), *wide, nn.Linear(4096, 1000))


# --- networks with branches ----------------------------------------------------------------------------------


class Inception(nn.Module):
    """Four branches; one ReLU comes after they are joined, instead of one at the end of each."""

    def __init__(self, a: int, one: int, before3: int, three: int, before5: int, five: int, pooled: int) -> None:
        super().__init__()
        self.one, self.pooled = nn.Conv2d(a, one, 1), nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(a, pooled, 1))
        self.three = nn.Sequential(nn.Conv2d(a, before3, 1), nn.ReLU(), nn.Conv2d(before3, three, 3, 1, 1))
        self.five = nn.Sequential(nn.Conv2d(a, before5, 1), nn.ReLU(), nn.Conv2d(before5, five, 5, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1))


class GoogLeNet(nn.Module):
    """GoogLeNet with both of its additional losses."""

    def __init__(self) -> None:
        super().__init__()
        pool, norm = partial(nn.MaxPool2d, 3, 2, ceil_mode=True), partial(nn.LocalResponseNorm, 5)
        stem = [nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), pool(), norm(), nn.Conv2d(64, 64, 1), nn.ReLU()]
        stem += [nn.Conv2d(64, 192, 3, 1, 1), nn.ReLU(), norm(), pool()]
        self.first = nn.Sequential(
            *stem,
            Inception(192, 64, 96, 128, 16, 32, 32),
            Inception(256, 128, 128, 192, 32, 96, 64),
            pool(),
            Inception(480, 192, 96, 208, 16, 48, 64),
        )
        self.second = nn.Sequential(
            Inception(512, 160, 112, 224, 24, 64, 64),
            Inception(512, 128, 128, 256, 24, 64, 64),
            Inception(512, 112, 144, 288, 32, 64, 64),
        )
        self.third = nn.Sequential(
            Inception(528, 256, 160, 320, 32, 128, 128),
            pool(),
            Inception(832, 256, 160, 320, 32, 128, 128),
            Inception(832, 384, 192, 384, 48, 128, 128),
            nn.AvgPool2d(7),
            nn.Dropout(0.4),
            nn.Flatten(),
            nn.Linear(1024, 1000),
        )
        self.aside = nn.ModuleList(_aside(a) for a in (512, 528))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        early = F.cross_entropy(self.aside[0](x), y)
        x = self.second(x)
        later = F.cross_entropy(self.aside[1](x), y)
        return 0.3 * (early + later) + F.cross_entropy(self.third(x), y)


def _aside(a: int) -> nn.Sequential:
    wide = nn.Linear(2048, 1024)
    return nn.Sequential(
        nn.AvgPool2d(5, 3), nn.Conv2d(a, 128, 1), nn.ReLU(), nn.Flatten(), wide, nn.ReLU(), nn.Linear(1024, 1000)
    )


class UNet(nn.Module):
    """U-Net without padding: what goes down is cropped to the size of what comes up before they are joined."""

    def __init__(self, widths: Sequence[int] = (64, 128, 256, 512, 1024), classes: int = 2) -> None:
        super().__init__()
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.larger = nn.ModuleList(nn.ConvTranspose2d(2 * b, b, 2, 2) for b in reversed(widths[:-1]))
        self.up = nn.ModuleList(_twice(2 * b, b) for b in reversed(widths[:-1]))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        skipped = []
        for level in self.down[:-1]:
            skipped.append(level(x))
            x = F.max_pool2d(skipped[-1], 2)
        x = self.down[-1](x)
        for larger, twice in zip(self.larger, self.up, strict=True):
            x, beside = F.relu(larger(x)), skipped.pop()
            edge = (beside.shape[-1] - x.shape[-1]) // 2
            x = twice(torch.cat([beside[..., edge : edge + x.shape[-2], edge : edge + x.shape[-1]], x], 1))
        return F.cross_entropy(self.head(x), y)


def _twice(a: int, b: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(a, b, 3), nn.ReLU(), nn.Conv2d(b, b, 3), nn.ReLU())


class PSPNet(nn.Module):
    """PSPNet on a dilated ResNet-101."""

    def __init__(self, classes: int = 19) -> None:
        super().__init__()
        stem = convolution(3, 64, 3, 2), convolution(64, 64), convolution(64, 128), nn.MaxPool2d(3, 2, 1)
        self.features = nn.Sequential(*stem, *bottlenecks((3, 4, 23, 3), 128, dilated=True))
        self.pyramid = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(size), convolution(2048, 512, 1)) for size in (1, 2, 3, 6)
        )
        self.head = nn.Sequential(convolution(4096, 512), nn.Dropout(0.1), nn.Conv2d(512, classes, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        side, x = x.shape[-2:], self.features(x)
        pooled = [F.interpolate(level(x), x.shape[-2:], mode="bilinear") for level in self.pyramid]
        x = self.head(torch.cat([x, *pooled], 1))
        return F.cross_entropy(F.interpolate(x, side, mode="bilinear"), y)


NETWORKS = {
    "PSPNet": Network(PSPNet, 2, 713, lambda batch: (batch, 713, 713)),
    "U-Net": Network(UNet, 8, 572, lambda batch: (batch, 388, 388)),
    "ResNet50": Network(partial(resnet, 3, 4, 6, 3), 96, 224),
    "ResNet152": Network(partial(resnet, 3, 8, 36, 3), 48, 224),
    "VGG19": Network(vgg19, 64, 224),
    "DenseNet161": Network(densenet161, 32, 224),
    "GoogLeNet": Network(GoogLeNet, 256, 224),
}
