"""The models that the GPU benchmarks train, each with a batch and the blocks a person would checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy


@dataclass(frozen=True)
class Case:
    """A model with a batch, and where a person would place checkpoints in it."""

    model: nn.Module
    inputs: tuple[torch.Tensor, ...]
    target: torch.Tensor
    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    blocks: Mapping[str, Sequence[nn.Module]]  # by what one is called
    chain: Sequence[nn.Module] = ()  # the whole model as a sequence, if it is one


def image_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.float(), target)


def token_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Of each next token."""
    logits = output.logits
    return cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)).float(), target[:, 1:].reshape(-1))


def images(
    model: nn.Module,
    batch: int,
    side: int,
    blocks: Mapping[str, Sequence[nn.Module]],
    chain: Sequence[nn.Module] = (),
) -> Case:
    return Case(model, (torch.randn(batch, 3, side, side),), torch.randint(1000, (batch,)), image_loss, blocks, chain)


def resnet(name: str, batch: int, side: int = 224) -> Case:
    import torchvision

    model = getattr(torchvision.models, name)(weights=None)
    blocks = [block for layer in (model.layer1, model.layer2, model.layer3, model.layer4) for block in layer]
    stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
    head = nn.Sequential(model.avgpool, nn.Flatten(), model.fc)
    return images(model, batch, side, {"block": blocks}, [stem, *blocks, head])


def densenet(name: str, batch: int, side: int = 224) -> Case:
    import torchvision

    model = getattr(torchvision.models, name)(weights=None)
    parts = dict(model.features.named_children())
    stem = nn.Sequential(*(parts.pop(part) for part in ("conv0", "norm0", "relu0", "pool0")))
    pooled = nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    head = nn.Sequential(parts.pop("norm5"), *pooled, model.classifier)
    dense = [part for name, part in parts.items() if name.startswith("denseblock")]
    layers = [layer for block in dense for layer in block.children()]
    return images(model, batch, side, {"dense layer": layers, "dense block": dense}, [stem, *parts.values(), head])


def inception(batch: int, side: int = 299) -> Case:
    import torchvision

    model = torchvision.models.inception_v3(weights=None, aux_logits=False, init_weights=False)
    parts = [part for part in model.children() if part not in (model.avgpool, model.dropout, model.fc)]
    blocks = [part for part in parts if not isinstance(part, nn.MaxPool2d)]
    head = nn.Sequential(model.avgpool, model.dropout, nn.Flatten(), model.fc)
    return images(model, batch, side, {"block": blocks}, [*parts, head])


def vgg(name: str, batch: int, side: int = 224) -> Case:
    """The features regrouped: a unit is a convolution and what it is rectified by, a group ends with pooling."""
    import torchvision

    model = getattr(torchvision.models, name)(weights=None)
    groups: list[list[nn.Module]] = [[]]
    for part in model.features:
        if isinstance(part, nn.Conv2d):
            groups[-1].append(nn.Sequential(part))
        elif isinstance(part, nn.MaxPool2d):
            groups[-1].append(part)
            groups.append([])
        else:
            groups[-1][-1].append(part)
    model.features = nn.Sequential(*(nn.Sequential(*group) for group in groups if group))
    units = [unit for group in model.features for unit in group]
    head = nn.Sequential(model.avgpool, nn.Flatten(), model.classifier)
    return images(model, batch, side, {"conv group": list(model.features)}, [*units, head])


def vit(name: str, batch: int) -> Case:
    import timm

    model = timm.create_model(name, pretrained=False)
    return images(model, batch, 224, {"block": list(model.blocks)})


def unet(batch: int, side: int = 256, widths: Sequence[int] = (64, 128, 256, 512, 1024), classes: int = 21) -> Case:
    model = UNet(widths, classes)
    pictures, labels = torch.randn(batch, 3, side, side), torch.randint(classes, (batch, side, side))
    return Case(model, (pictures,), labels, image_loss, {"level": [*model.downs, model.bottom, *model.ups]})


class UNet(nn.Module):
    """Ronneberger et al. 2015, with padding and batch normalization."""

    def __init__(self, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        self.downs = nn.ModuleList(twice(a, b) for a, b in pairwise((3, *widths[:-1])))
        self.pool = nn.MaxPool2d(2)
        self.bottom = twice(*widths[-2:])
        self.ups = nn.ModuleList(Up(b, a) for a, b in reversed(list(pairwise(widths))))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = []
        for down in self.downs:
            skipped.append(down(x))
            x = self.pool(skipped[-1])
        x = self.bottom(x)
        for up in self.ups:
            x = up(x, skipped.pop())
        return self.head(x)


class Up(nn.Module):
    """A level on the way up: twice the size, and what was skipped joins in."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.larger = nn.ConvTranspose2d(wide, narrow, 2, 2)
        self.twice = twice(wide, narrow)

    def forward(self, x: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
        return self.twice(torch.cat([skipped, self.larger(x)], 1))


def twice(a: int, b: int) -> nn.Sequential:
    return nn.Sequential(*convolution(a, b), *convolution(b, b))


def convolution(a: int, b: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))


def gpt2(layers: int, width: int, heads: int, batch: int, length: int, vocabulary: int = 50257) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": vocabulary, "n_positions": length}
    dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    ends = {"bos_token_id": vocabulary - 1, "eos_token_id": vocabulary - 1}
    model = GPT2LMHeadModel(GPT2Config(**shape, **dropout, **ends, use_cache=False, attn_implementation="sdpa"))
    tokens = torch.randint(vocabulary, (batch, length))
    return Case(model, (tokens,), tokens.clone(), token_loss, {"block": list(model.transformer.h)})


def llama(layers: int, width: int, heads: int, groups: int, inner: int, batch: int, length: int) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner, "vocab_size": 32_000}
    attention = {"num_attention_heads": heads, "num_key_value_heads": groups, "max_position_embeddings": length}
    config = LlamaConfig(**shape, **attention, use_cache=False, attn_implementation="sdpa")
    model = LlamaForCausalLM(config)
    tokens = torch.randint(32_000, (batch, length))
    return Case(model, (tokens,), tokens.clone(), token_loss, {"block": list(model.model.layers)})


def bert(layers: int, width: int, heads: int, batch: int, length: int) -> Case:
    """With dropout, as it is trained."""
    from transformers import BertConfig, BertForMaskedLM

    shape = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 4 * width}
    model = BertForMaskedLM(BertConfig(**shape, num_attention_heads=heads, attn_implementation="sdpa"))
    tokens = torch.randint(30_000, (batch, length))
    return Case(model, (tokens,), tokens.clone(), token_loss, {"block": list(model.bert.encoder.layer)})


def tiny_cnn() -> Case:
    widths = 3, 16, 16, 16, 32, 32, 32, 64, 64
    units = [convolution(a, b, 1 + (b > a > 3)) for a, b in pairwise(widths)]
    chain = [*units, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 1000))]
    return images(nn.Sequential(*chain), 8, 32, {"unit": units}, chain)


MODELS: dict[str, Callable[[], Case]] = {
    "resnet50": partial(resnet, "resnet50", 128),
    "resnet101": partial(resnet, "resnet101", 128),
    "resnet152": partial(resnet, "resnet152", 96),
    "densenet161": partial(densenet, "densenet161", 64),
    "inception_v3": partial(inception, 128),
    "vgg19": partial(vgg, "vgg19", 128),
    "unet": partial(unet, 16),
    "gpt2-medium": partial(gpt2, 24, 1024, 16, 16, 1024),
    "vit_b16": partial(vit, "vit_base_patch16_224", 128),
    "llama-1b": partial(llama, 16, 2048, 32, 8, 8192, 4, 1024),
    "bert-large": partial(bert, 24, 1024, 16, 32, 512),
}
TINY_MODELS: dict[str, Callable[[], Case]] = {
    "tiny-cnn": tiny_cnn,
    "tiny-gpt2": partial(gpt2, 4, 64, 2, 4, 64, 256),
}
