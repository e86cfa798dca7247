"""The models that the benchmarks train, each with a batch, a loss, and the blocks that a person would checkpoint.

A model is made on PyTorch's default device. `MODELS` and `GRAPH_MODELS` are real ones; the tiny ones are for trying
the scripts on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, interpolate


@dataclass(frozen=True)
class Case:
    """A model with a batch, and where a person would place checkpoints in it.

    `blocks` are modules to checkpoint, under the word for one of them ("block", "dense layer"). `chain` is the whole
    model as a sequence of modules, if it is one. It trains under bf16 autocast, or as it is if it `keeps_float32`.
    """

    model: nn.Module
    inputs: tuple[torch.Tensor, ...]
    target: torch.Tensor
    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    blocks: Mapping[str, Sequence[nn.Module]]
    chain: Sequence[nn.Module] = ()
    keeps_float32: bool = False


def in_float32(make: Callable[..., Case], *args: Any) -> Case:
    return replace(make(*args), keeps_float32=True)


def image_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.float(), target)


def token_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Each token is predicted from those before it."""
    logits = output.logits
    return cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)).float(), target[:, 1:].reshape(-1))


def sequence_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Each token is predicted; the decoder's inputs are shifted already."""
    return cross_entropy(output.logits.flatten(0, 1).float(), target.flatten())


def two_losses(outputs: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    """The loss of Zhao et al. 2017: the auxiliary head counts 0.4."""
    main, auxiliary = outputs
    return image_loss(main, target) + 0.4 * image_loss(auxiliary, target)


def contrastive_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Every text is to find its image among all images of the batch, and every image its text."""
    logits = output.logits_per_text.float()
    return (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2


def triplet_loss(outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], margin: torch.Tensor) -> torch.Tensor:
    anchor, positive, negative = (output.float() for output in outputs)
    return ((anchor - positive).norm(dim=1) - (anchor - negative).norm(dim=1) + margin).relu().mean()


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
    blocks = residual_blocks(model)
    stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
    head = nn.Sequential(model.avgpool, nn.Flatten(), model.fc)
    return images(model, batch, side, {"block": blocks}, [stem, *blocks, head])


def residual_blocks(body: nn.Module) -> list[nn.Module]:
    return [block for layer in (body.layer1, body.layer2, body.layer3, body.layer4) for block in layer]


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
    """VGG with its features regrouped: a unit is a convolution with its ReLU, a group ends with a pooling."""
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
    """A level on the way up: twice the size, then together with the output of the same level on the way down."""

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


def pspnet(batch: int, side: int = 480, classes: int = 21) -> Case:
    """PSPNet on a ResNet-50 whose last two groups keep an eighth of the resolution."""
    import torchvision

    dilation = {"replace_stride_with_dilation": [False, True, True]}
    body = torchvision.models.resnet50(weights=None, **dilation)
    stem = nn.Sequential(body.conv1, body.bn1, body.relu, body.maxpool)
    early, late = [stem, body.layer1, body.layer2, body.layer3], body.layer4
    model = PSPNet(nn.Sequential(*early), late, 1024, 2048, classes)
    return segments(model, batch, side, classes, residual_blocks(body))


def tiny_pspnet() -> Case:
    early, late = nn.Sequential(twice(3, 16), nn.MaxPool2d(2), twice(16, 32), twice(32, 32)), twice(32, 64)
    return segments(PSPNet(early, late, 32, 64, 10), 4, 48, 10, [*early, late])


def segments(model: nn.Module, batch: int, side: int, classes: int, blocks: Sequence[nn.Module]) -> Case:
    pictures, labels = torch.randn(batch, 3, side, side), torch.randint(classes, (batch, side, side))
    return Case(model, (pictures,), labels, two_losses, {"block": blocks})


class PSPNet(nn.Module):
    """Zhao et al. 2017: the main head reads features and their averages over 1, 4, 9 and 36 parts of the image.

    An auxiliary head reads features from further below.
    """

    def __init__(self, early: nn.Module, late: nn.Module, middle: int, width: int, classes: int) -> None:
        super().__init__()
        self.early, self.late = early, late
        self.pooled = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(parts), nn.Conv2d(width, width // 4, 1), nn.ReLU(inplace=True))
            for parts in (1, 2, 3, 6)
        )
        self.head = nn.Sequential(convolution(2 * width, width // 4), nn.Conv2d(width // 4, classes, 1))
        self.auxiliary = nn.Sequential(convolution(middle, middle // 4), nn.Conv2d(middle // 4, classes, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        middle = self.early(x)
        features = self.late(middle)
        averages = [larger(pool(features), features) for pool in self.pooled]
        main = self.head(torch.cat([features, *averages], 1))
        return larger(main, x), larger(self.auxiliary(middle), x)


def larger(image: torch.Tensor, as_large_as: torch.Tensor) -> torch.Tensor:
    return interpolate(image, as_large_as.shape[2:], mode="bilinear", align_corners=False)


def triplet(batch: int, side: int = 224) -> Case:
    import torchvision

    body = torchvision.models.resnet50(weights=None, num_classes=128)
    return triplets(body, batch, side, residual_blocks(body))


def tiny_triplet() -> Case:
    units = [convolution(a, b) for a, b in pairwise((3, 16, 16, 32, 32))]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 16)]
    return triplets(nn.Sequential(*units, *head), 4, 32, units)


def triplets(tower: nn.Module, batch: int, side: int, blocks: Sequence[nn.Module]) -> Case:
    pictures = tuple(torch.randn(batch, 3, side, side) for _ in range(3))
    return Case(Siamese(tower), pictures, torch.full((batch,), 0.2), triplet_loss, {"block": blocks})


class Siamese(nn.Module):
    """One tower that several images go through, with the same weights."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, *pictures: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.tower(picture) for picture in pictures)


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
    """BERT with dropout, as it is trained; the other language models have none."""
    from transformers import BertConfig, BertForMaskedLM

    shape = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 4 * width}
    model = BertForMaskedLM(BertConfig(**shape, num_attention_heads=heads, attn_implementation="sdpa"))
    tokens = torch.randint(30_000, (batch, length))
    return Case(model, (tokens,), tokens.clone(), token_loss, {"block": list(model.bert.encoder.layer)})


def clip(
    layers: int,
    widths: tuple[int, int],
    batch: int,
    side: int = 224,
    patch: int = 16,
    length: int = 77,
    vocabulary: int = 49_408,
) -> Case:
    """CLIP. `widths` are those of the tower for texts and of the tower for images; heads are 64 wide, as OpenAI's."""
    from transformers import CLIPConfig, CLIPModel

    depth = {"num_hidden_layers": layers}
    text, vision = (
        {**depth, "hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": width // 64}
        for width in widths
    )
    end = vocabulary - 1
    text |= {"vocab_size": vocabulary, "max_position_embeddings": length, "bos_token_id": 0, "eos_token_id": end}
    vision |= {"image_size": side, "patch_size": patch}
    config = CLIPConfig(text_config=text, vision_config=vision, attn_implementation="sdpa")
    model = CLIPModel(config)
    tokens = torch.randint(1, end, (batch, length))
    tokens[:, -1] = end  # CLIP reads a text's embedding at this token
    blocks = [*model.text_model.encoder.layers, *model.vision_model.encoder.layers]
    inputs = tokens, torch.randn(batch, 3, side, side)
    return Case(model, inputs, torch.arange(batch), contrastive_loss, {"block": blocks})


def t5(layers: int, width: int, heads: int, inner: int, batch: int, length: int, vocabulary: int = 32_128) -> Case:
    """T5 with as many tokens for the encoder as for the decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {"d_model": width, "d_kv": width // heads, "d_ff": inner, "num_heads": heads, "vocab_size": vocabulary}
    depth = {"num_layers": layers, "num_decoder_layers": layers, "dropout_rate": 0.0}
    model = T5ForConditionalGeneration(T5Config(**shape, **depth, use_cache=False, decoder_start_token_id=0))
    tokens, target = torch.randint(1, vocabulary, (2, batch, length))
    shifted = torch.cat([torch.zeros_like(target[:, :1]), target[:, :-1]], 1)
    inputs = tokens, torch.ones_like(tokens), shifted
    return Case(model, inputs, target.clone(), sequence_loss, {"block": [*model.encoder.block, *model.decoder.block]})


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
# Networks that are not chains: long skips, towers, several losses, an encoder that every layer of a decoder reads.
GRAPH_MODELS: dict[str, Callable[[], Case]] = {
    "unet": MODELS["unet"],
    "pspnet": partial(pspnet, 16),
    "clip_b16": partial(clip, 12, (512, 768), 128),
    "triplet": partial(triplet, 48),
    "t5-base": partial(t5, 12, 768, 12, 3072, 16, 384),
}
TINY_GRAPH_MODELS: dict[str, Callable[[], Case]] = {
    "tiny-unet": partial(unet, 4, 64, (8, 16, 32), 10),
    "tiny-pspnet": tiny_pspnet,
    "tiny-clip": partial(clip, 3, (64, 64), 16, 32, 4, 32, 256),
    "tiny-triplet": tiny_triplet,
    "tiny-t5": partial(t5, 2, 64, 4, 128, 4, 32, 256),
}
