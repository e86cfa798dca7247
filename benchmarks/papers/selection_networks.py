"""VGG-19 and AlexNet as paper 003 has them: lists of layers, with sizes from shapes and times from estimates.

Sizes are those of float32 values. Times are estimated for the paper's card from operations and bytes moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from elbowroom.devices import Machine
from elbowroom.problem import Chain, Graph, Node, Stage

if TYPE_CHECKING:
    from torch import nn

VALUE_BYTES, INDEX_BYTES, MASK_BYTES = 4, 8, 1  # of one value, of a max-pool's index, of a dropout's mask
SIDE = 224  # of the images
CARD = Machine(35.6e12, 936e9, "RTX 3090")  # the paper's card: float32 operations and bytes a second, by its maker


@dataclass(frozen=True)
class Layer:
    """One layer. `channels` is how many it makes, where 0 means as many as it gets. `relu`: it ends with a ReLU.

    `pool` is the window of a max-pool that belongs to the layer and comes last; 0 means that there is none.
    """

    kind: str
    channels: int = 0
    window: int = 1
    stride: int = 1
    padding: int = 0
    relu: bool = False
    pool: int = 0

    def output(self, channels: int, side: int) -> tuple[int, int]:
        """Channels and side of its output, given those of its input."""
        if self.kind in ("linear", "flatten"):
            return self.channels or channels * side * side, 1
        inner = self.inner_side(side)
        return self.channels or channels, (inner - self.pool) // 2 + 1 if self.pool else inner

    def inner_side(self, side: int) -> int:
        """The side of what it computes before its own max-pool."""
        if self.kind in ("linear", "flatten"):
            return 1
        return (side + 2 * self.padding - self.window) // self.stride + 1

    @property
    def reads_input(self) -> bool:
        """Whether its backward needs its input."""
        return self.kind in ("convolution", "max-pool", "average-pool", "linear")

    def weights(self, channels: int, side: int) -> int:
        """How many weights it has, biases included, given channels and side of its input."""
        if self.kind not in ("convolution", "linear"):
            return 0
        into = channels * (side * side if self.kind == "linear" else self.window**2)
        return (into + 1) * self.channels

    def module(self, channels: int, side: int) -> nn.Module:
        """The layer in PyTorch, given channels and side of its input."""
        from torch import nn

        if self.kind == "max-pool":
            return nn.MaxPool2d(self.window, self.stride)
        if self.kind == "average-pool":
            return nn.AdaptiveAvgPool2d(side)
        if self.kind in ("flatten", "dropout"):
            return nn.Flatten() if self.kind == "flatten" else nn.Dropout()
        if self.kind == "convolution":
            product: nn.Module = nn.Conv2d(channels, self.channels, self.window, self.stride, self.padding)
        else:
            product = nn.Linear(channels * side * side, self.channels)
        flat = [nn.Flatten()] if self.kind == "linear" and side > 1 else []  # a view, which takes no memory
        last = [nn.MaxPool2d(self.pool, 2)] if self.pool else []
        return nn.Sequential(*flat, product, *([nn.ReLU(inplace=True)] if self.relu else []), *last)


@dataclass(frozen=True)
class Network:
    """A chain of layers, numbered from 1. Value i is the output of layer i; value 0 is the images."""

    name: str
    layers: tuple[Layer, ...]

    def shapes(self) -> list[tuple[int, int]]:
        """Channels and side of each value."""
        shapes = [(3, SIDE)]
        for layer in self.layers:
            shapes.append(layer.output(*shapes[-1]))
        return shapes

    def sizes(self, batch: int) -> list[int]:
        return [batch * VALUE_BYTES * channels * side * side for channels, side in self.shapes()]

    def saved(self, batch: int) -> list[tuple[int, int]]:
        """For each value two sizes: what the layer that makes it keeps of it for its backward, and what is kept of it
        once the next layer, which reads it, has run as well."""
        besides = {"max-pool": INDEX_BYTES, "dropout": MASK_BYTES}  # kept for each value of such a layer's output
        saved = []
        for size, layer, reader in zip(self.sizes(batch), (None, *self.layers), (*self.layers, None), strict=True):
            is_kept, is_read = layer is not None and layer.relu, reader is not None and reader.reads_input
            more = size // VALUE_BYTES * besides.get(layer.kind, 0) if layer else 0
            if layer is not None and layer.pool:  # what its own max-pool reads is kept instead of what it makes
                inside = self._before_pool(batch, layer) + size // VALUE_BYTES * INDEX_BYTES
                saved.append((inside, inside + is_read * size))
            else:
                saved.append((is_kept * size + more, (is_kept or is_read) * size + more))
        return saved

    def _before_pool(self, batch: int, layer: Layer) -> int:
        _, side = self.shapes()[self.layers.index(layer)]
        return batch * VALUE_BYTES * layer.channels * layer.inner_side(side) ** 2

    def weight_bytes(self) -> int:
        return VALUE_BYTES * sum(self._weights())

    def _weights(self) -> list[int]:
        return [layer.weights(*shape) for layer, shape in zip(self.layers, self.shapes(), strict=False)]

    def chain(self, batch: int) -> Chain:
        """As a chain problem: sizes as in the paper, times estimated for its card. The images need no gradient."""
        sizes, stages = self.sizes(batch), []
        for i, (layer, weights) in enumerate(zip(self.layers, self._weights(), strict=True), start=1):
            side = layer.inner_side(self.shapes()[i - 1][1])
            flops = 2 * batch * weights * side * side
            forward = CARD.seconds(flops, sizes[i - 1] + sizes[i] + VALUE_BYTES * weights)
            backward = 2 * forward if weights and i > 1 else forward
            stages.append(Stage(f"{i} {layer.kind}", forward, backward, sizes[i], sizes[i], sizes[i]))
        return Chain(sizes[0], sizes[0], tuple(stages))

    def graph(self, batch: int) -> Graph:
        """As a graph problem, where layer i is node i - 1. The images are no node, because they are kept anyway."""
        stages = self.chain(batch).stages
        nodes = tuple(Node(stage.name, stage.forward_time, stage.output_bytes) for stage in stages)
        return Graph(nodes, tuple(pairwise(range(len(nodes)))))


def conv(channels: int, window: int = 3, stride: int = 1, padding: int = 1, pool: int = 0) -> Layer:
    return Layer("convolution", channels, window, stride, padding, relu=True, pool=pool)


def pool(window: int) -> Layer:
    return Layer("max-pool", window=window, stride=2)


def linear(channels: int, relu: bool = True) -> Layer:
    return Layer("linear", channels, relu=relu)


LEVELS = ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))
VGG = Network(
    "VGG-19",
    (
        *(layer for count, channels in LEVELS for layer in (*(conv(channels),) * count, pool(2))),
        *(linear(4096), linear(4096), linear(1000, relu=False)),
    ),
)
ALEXNET = Network(  # with the widths of torchvision; max-pools are layers of their own, as in section 5.6.2
    "AlexNet",
    (
        *(conv(64, 11, 4, 2), pool(3), conv(192, 5, 1, 2), pool(3), conv(384), conv(256), conv(256), pool(3)),
        *(Layer("average-pool"), Layer("flatten"), Layer("dropout"), linear(4096), Layer("dropout"), linear(4096)),
        linear(1000, relu=False),
    ),
)
PLAIN_ALEXNET = Network(  # as in section 5.6.1, where max-pools belong to the convolutions before them
    "plain AlexNet",
    (
        *(conv(64, 11, 4, 2, pool=3), conv(192, 5, 1, 2, pool=3), conv(384), conv(256), conv(256, pool=3)),
        *ALEXNET.layers[8:],
    ),
)
