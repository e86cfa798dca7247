"""Real networks at small sizes: the architectures people train, cut to run a step in a blink on two cores.

Every `network.build()(*network.batch())` is a scalar loss in training mode. `build` seeds torch with 0 and leaves
it there; `batch` draws from a generator of its own. Both give the same every time. Dropout draws from torch's
generator: seed it before each of two steps that are to be compared.

Widths are small and batches large, so that activations outweigh parameters many times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10
VOCABULARY = 256
END = VOCABULARY - 1  # the token that ends a text


@dataclass(frozen=True)
class Network:
    """A module that returns its loss, and a batch for it."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]


# ---- modules that return a loss ----


class Classifier(nn.Module):
    """Cross entropy of a network's logits, class scores along dimension 1; labels are those of images or pixels."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.network(inputs), labels)


class HuggingFace(nn.Module):
    """A transformers model, made from settings of its configuration, that takes tensors under the given names."""

    options: ClassVar[dict[str, object]] = {}  # what else its forward gets

    def __init__(self, model: str, inputs: tuple[str, ...], **settings: object) -> None:
        super().__init__()
        import transformers  # takes seconds: only the networks that need it pay

        kind = getattr(transformers, model)
        self.inputs = inputs
        self.model = kind(kind.config_class(**settings))

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.model(**dict(zip(self.inputs, tensors, strict=True)), **self.options).loss


# ---- convolutional networks ----


class ConvNorm(nn.Sequential):
    """Convolution, batch norm, in-place ReLU: keeps the image's size unless strided. `kernel` may be (1, 7)."""

    def __init__(self, inputs: int, outputs: int, kernel: int | tuple[int, int] = 3, stride: int = 1) -> None:
        height, width = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        super().__init__(
            nn.Conv2d(inputs, outputs, (height, width), stride, (height // 2, width // 2), bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class Residual(nn.Module):
    """A bottleneck block (He et al. 2016, figure 5): 1×1, 3×3, 1×1 convolutions around a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            ConvNorm(inputs, width, 1),
            ConvNorm(width, width, 3, stride),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out += self.shortcut(x)
        return self.relu(out)


def residual_tower(outputs: int, widths: tuple[int, ...]) -> nn.Sequential:
    """A ResNet of one bottleneck block for each width; a wider one is at half the resolution."""
    layers: list[nn.Module] = [ConvNorm(3, 16), nn.MaxPool2d(2)]
    channels = 16
    for previous, width in pairwise((widths[0], *widths)):
        layers.append(Residual(channels, width, stride=2 if width > previous else 1))
        channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, outputs))


def resnet() -> nn.Module:
    return Classifier(residual_tower(CLASSES, widths=(8, 8, 16, 16)))


class Siamese(nn.Module):
    """One tower on three images: its weights get three gradients, its running statistics three updates."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = residual_tower(16, widths=(4, 8))

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        return F.triplet_margin_loss(self.tower(anchor), self.tower(positive), self.tower(negative))


class Dense(nn.Module):
    """A layer of DenseNet-BC (Huang et al. 2017): its output is appended to its input."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.ReLU(inplace=True),
            ConvNorm(inputs, 4 * growth, 1),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layer(x)], dim=1)


def densenet(growth: int = 8) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False)]
    channels = 16
    for last in (False, True):
        for _ in range(3):
            layers.append(Dense(channels, growth))
            channels += growth
        layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        if not last:
            layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]
    return Classifier(nn.Sequential(*layers))


class Branches(nn.Module):
    """Modules on the same input, their outputs concatenated; branches may be nested."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class Inception(nn.Module):
    """Inception v3 (Szegedy et al. 2016) with one block of each kind and the auxiliary head."""

    def __init__(self) -> None:
        super().__init__()
        pool = nn.AvgPool2d(3, stride=1, padding=1)
        self.stem = nn.Sequential(ConvNorm(3, 16, 3, stride=2), ConvNorm(16, 32))
        self.blocks = nn.Sequential(
            Branches(  # figure 5: a 5×5 as it is, and one as two 3×3
                ConvNorm(32, 16, 1),
                nn.Sequential(ConvNorm(32, 12, 1), ConvNorm(12, 16, 5)),
                nn.Sequential(ConvNorm(32, 16, 1), ConvNorm(16, 24), ConvNorm(24, 24)),
                nn.Sequential(pool, ConvNorm(32, 8, 1)),
            ),
            Branches(  # figure 10: to half the resolution
                ConvNorm(64, 32, 3, stride=2),
                nn.Sequential(ConvNorm(64, 16, 1), ConvNorm(16, 32, 3, stride=2)),
                nn.MaxPool2d(3, stride=2, padding=1),
            ),
            Branches(  # figure 6: 7×7 as 1×7 and 7×1
                ConvNorm(128, 32, 1),
                nn.Sequential(ConvNorm(128, 16, 1), ConvNorm(16, 16, (1, 7)), ConvNorm(16, 32, (7, 1))),
                nn.Sequential(pool, ConvNorm(128, 32, 1)),
            ),
        )
        self.auxiliary = nn.Sequential(
            nn.AvgPool2d(4), ConvNorm(96, 32, 1), nn.Flatten(), nn.Linear(32 * 4 * 4, CLASSES)
        )
        self.top = nn.Sequential(
            Branches(  # figure 7: branches that branch
                ConvNorm(96, 64, 1),
                nn.Sequential(ConvNorm(96, 32, 1), Branches(ConvNorm(32, 32, (1, 3)), ConvNorm(32, 32, (3, 1)))),
            ),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, CLASSES),
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        trunk = self.blocks(self.stem(images))
        auxiliary = F.cross_entropy(self.auxiliary(trunk), labels)
        return F.cross_entropy(self.top(trunk), labels) + 0.4 * auxiliary


class UNet(nn.Module):
    """A U-Net (Ronneberger et al. 2015): what goes down is kept until it is concatenated on the way up."""

    def __init__(self, widths: tuple[int, ...] = (8, 16, 32, 64)) -> None:
        super().__init__()
        inputs = (3, *widths)
        self.down = nn.ModuleList(_two_convolutions(a, b) for a, b in zip(inputs, widths, strict=False))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[:-1])
        self.up = nn.ModuleList(_two_convolutions(2 * w, w) for w in widths[:-1])
        self.head = nn.Conv2d(widths[0], CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down[:-1]:
            skips.append(down(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.down[-1](x)
        for skip, grow, up in zip(reversed(skips), reversed(self.grow), reversed(self.up), strict=True):
            x = up(torch.cat([skip, grow(x)], dim=1))
        return self.head(x)


def _two_convolutions(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(ConvNorm(inputs, outputs), ConvNorm(outputs, outputs))


def unet() -> nn.Module:
    return Classifier(UNet())


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, 32, 64):
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    layers += [nn.Linear(4 * channels, 128), nn.ReLU(inplace=True), nn.Dropout(0.5)]
    layers += [nn.Linear(128, 128), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(128, CLASSES)]
    return Classifier(nn.Sequential(*layers))


# ---- recurrent ----


class Lstm(nn.Module):
    """A language model of two LSTM layers. torch.compile needs `torch._dynamo.config.allow_rnn = True` for it.

    Its gradients are those of eager to the bit with `torch.backends.mkldnn.flags(enabled=False)`: oneDNN has an LSTM
    of its own, which eager uses and a traced graph does not.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return F.cross_entropy(self.head(hidden).transpose(1, 2), labels)


# ---- transformers and their relatives, from Hugging Face ----

WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
LANGUAGE = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": END, "use_cache": False}
VISION = {"num_labels": CLASSES, "problem_type": "single_label_classification", "image_size": 32}
SDPA = {"attn_implementation": "sdpa"}


def gpt2() -> nn.Module:
    size = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128}
    dropout = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    network = HuggingFace("GPT2LMHeadModel", ("input_ids", "labels"), **size, **dropout, **LANGUAGE, **SDPA)
    network.model.loss_type = "ForCausalLM"  # as it would guess, but a guess is logged, and that breaks the graph
    return network


def llama() -> nn.Module:
    size = {**WIDTHS, "num_key_value_heads": 2, "num_hidden_layers": 3}
    # A mask that hides something makes eager and compiled attention take the same path; without one, eager lets
    # the kernel group the heads, and compiled code repeats the keys.
    inputs = ("input_ids", "labels", "attention_mask")
    return HuggingFace("LlamaForCausalLM", inputs, **size, **LANGUAGE, **SDPA)


def bert() -> nn.Module:
    size = {**WIDTHS, "num_hidden_layers": 3, "max_position_embeddings": 128}
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    inputs = ("input_ids", "labels", "attention_mask")
    return HuggingFace("BertForMaskedLM", inputs, **size, **dropout, **LANGUAGE, **SDPA)


def t5(decoder_layers: int = 1) -> nn.Module:
    layers = {"num_layers": 2, "num_decoder_layers": decoder_layers}
    size = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, **layers}
    settings = {**size, "dropout_rate": 0.1, "decoder_start_token_id": 0}
    return HuggingFace("T5ForConditionalGeneration", ("input_ids", "labels"), **settings, **LANGUAGE, **SDPA)


def vit() -> nn.Module:
    size = {**WIDTHS, "num_hidden_layers": 4, "patch_size": 4}
    return HuggingFace("ViTForImageClassification", ("pixel_values", "labels"), **size, **VISION, **SDPA)


def swin() -> nn.Module:
    size = {"image_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 32}
    settings = {**VISION, **size, "depths": [2, 2], "num_heads": [2, 4], "drop_path_rate": 0.1}
    return HuggingFace("SwinForImageClassification", ("pixel_values", "labels"), **settings, **SDPA)


def convnext() -> nn.Module:
    size = {"patch_size": 2, "num_stages": 3, "hidden_sizes": [16, 32, 64], "depths": [2, 2, 2]}
    settings = {**size, **VISION, "drop_path_rate": 0.1}
    return HuggingFace("ConvNextForImageClassification", ("pixel_values", "labels"), **settings)


def mamba() -> nn.Module:
    size = {"hidden_size": 32, "num_hidden_layers": 3}
    # The associative scan is for compiled code only: with it, eager and compiled steps would compute differently.
    return HuggingFace("MambaForCausalLM", ("input_ids", "labels"), **size, **LANGUAGE, use_associative_scan=False)


class Clip(HuggingFace):
    """CLIP's contrastive loss: every text against every image of the batch."""

    options: ClassVar[dict[str, object]] = {"return_loss": True}

    def __init__(self) -> None:
        tower = {**WIDTHS, "num_hidden_layers": 2}
        text = {**tower, **LANGUAGE, "max_position_embeddings": 64}
        vision = {**tower, "image_size": 32, "patch_size": 4}
        towers = {"text_config": text, "vision_config": vision, "projection_dim": 32}
        super().__init__("CLIPModel", ("input_ids", "pixel_values"), **towers, **SDPA)


# ---- batches: each call gives the same tensors ----


def _images(count: int, size: int, labels: tuple[int, ...] | None = None) -> Callable[[], tuple[Tensor, ...]]:
    """Images, and labels of the shape given: one for each image if none is."""

    def batch() -> tuple[Tensor, ...]:
        rng = torch.Generator().manual_seed(1)
        images = torch.randn(count, 3, size, size, generator=rng)
        return images, torch.randint(CLASSES, labels or (count,), generator=rng)

    return batch


def _triplets(count: int, size: int) -> Callable[[], tuple[Tensor, ...]]:
    def batch() -> tuple[Tensor, ...]:
        rng = torch.Generator().manual_seed(1)
        return tuple(torch.randn(count, 3, size, size, generator=rng) for _ in range(3))

    return batch


def _tokens(count: int, length: int, *, padded: bool = False) -> Callable[[], tuple[Tensor, ...]]:
    """Tokens and labels; if padded, also a mask that hides the end of every second sequence."""

    def batch() -> tuple[Tensor, ...]:
        rng = torch.Generator().manual_seed(1)
        tokens = torch.randint(1, VOCABULARY, (count, length), generator=rng)
        labels = torch.randint(1, VOCABULARY, (count, length), generator=rng)
        if not padded:
            return tokens, labels
        mask = torch.ones_like(tokens)
        mask[::2, length // 2 :] = 0
        return tokens, labels, mask

    return batch


def _captions(count: int, length: int, size: int) -> Callable[[], tuple[Tensor, ...]]:
    def batch() -> tuple[Tensor, ...]:
        rng = torch.Generator().manual_seed(1)
        tokens = torch.randint(1, END, (count, length), generator=rng)
        tokens[:, -1] = END  # where CLIP reads the text's embedding
        return tokens, torch.randn(count, 3, size, size, generator=rng)

    return batch


# ---- the zoo ----


def _seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return build().train()

    return seeded


_NETWORKS = (
    ("resnet", resnet, _images(8, 64)),
    ("densenet", densenet, _images(8, 64)),
    ("inception", Inception, _images(8, 64)),
    ("unet", unet, _images(4, 64, labels=(4, 64, 64))),
    ("vgg", vgg, _images(32, 32)),
    ("siamese", Siamese, _triplets(8, 64)),
    ("lstm", Lstm, _tokens(128, 8)),
    ("gpt2", gpt2, _tokens(8, 64)),
    ("llama", llama, _tokens(8, 64, padded=True)),
    ("bert", bert, _tokens(8, 64, padded=True)),
    ("t5", t5, _tokens(8, 64)),
    ("vit", vit, _images(16, 32)),
    ("swin", swin, _images(32, 16)),
    ("convnext", convnext, _images(16, 32)),
    ("mamba", mamba, _tokens(32, 4)),
    ("clip", Clip, _captions(16, 32, 32)),
)
ZOO: dict[str, Network] = {name: Network(name, _seeded(build), batch) for name, build, batch in _NETWORKS}
