"""Models that nobody chose: drawn by a number from all that transformers, and timm where it is there, can build.

A model is built from a configuration that a rule makes small: sizes, layers, heads and words are set by the names of
their fields, and everything else stays as its authors left it. Its inputs follow from the names of what its forward
takes. What the rule cannot build, or cannot run, says why, and another is drawn in its place.
"""

from __future__ import annotations

import importlib
import inspect
import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

BATCH, LENGTH, SIDE, FRAMES, SAMPLES = 2, 32, 64, 128, 4000
MOST_PARAMETERS = 40_000_000
_WIDTH, _INNER, _HEADS, _LAYERS, _WORDS = 64, 128, 4, 2, 384
# What a field means, by the end of its name, and the size that the rule gives it.
_SMALL: tuple[tuple[tuple[str, ...], int], ...] = (
    (("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_experts_per_tok", "moe_topk"), 2),
    (("attention_heads", "num_heads", "n_head", "n_heads", "num_head", "heads"), _HEADS),
    (("head_dim", "d_kv", "d_head", "head_size", "kv_channels"), _WIDTH // _HEADS),
    (("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), _LAYERS),
    (("num_encoder_layers", "num_decoder_layers", "num_blocks", "depth", "num_hidden_groups"), _LAYERS),
    (("intermediate_size", "ffn_dim", "d_ff", "n_inner", "inner_dim", "ffn_hidden_size", "d_inner"), _INNER),
    (("hidden_size", "d_model", "n_embd", "embed_dim", "hidden_dim", "embedding_size", "emb_dim"), _WIDTH),
    (("vocab_size",), _WORDS),
    (("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    (("max_source_positions",), FRAMES // 2),
    (("image_size",), SIDE),
    (("num_frames",), 4),
)
_WORD_NUMBERS = ("token_id", "token_index", "token_ids")
_LEFT_OUT = (
    "ForPreTraining",
    "ForMaskGeneration",
    "ForObjectDetection",
    "ForTextToWaveform",
    "ForUniversalSegmentation",
)


@dataclass(frozen=True)
class Drawn:
    """A model, and what to call it with."""

    name: str
    model: nn.Module
    inputs: Mapping[str, torch.Tensor]


class CannotBuild(Exception):
    """The rule makes no model of this configuration, or none that runs."""


def names(seed: int, source: str = "all") -> Iterator[str]:
    """All names in an order that a number tells: `transformers:gpt2:GPT2LMHeadModel`, `timm:resnet18`."""
    known = [*(_of_transformers() if source != "timm" else ()), *(_of_timm() if source != "transformers" else ())]
    random.Random(seed).shuffle(known)
    yield from known


def build(name: str, device: torch.device) -> Drawn:
    """The model of a name, in training, and a batch. Both are the same every time."""
    source, *where = name.split(":")
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, inputs = _from_transformers(*where) if source == "transformers" else _from_timm(*where)
    except Exception as failure:
        raise CannotBuild(_said(failure)) from failure
    model = model.train().to(device)
    return Drawn(name, model, {name: value.to(device) for name, value in inputs.items()})


def first_numbers(output: Any) -> torch.Tensor:
    """Where a loss begins: the first floating tensor of an output that a gradient reaches."""
    if isinstance(output, torch.Tensor):
        values = [output]
    else:
        values = list(output.values()) if isinstance(output, Mapping) else list(output)
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad:
            return value
        if isinstance(value, list | tuple) and value:
            return first_numbers(value)
    raise CannotBuild("its output has no floating tensor that a gradient reaches")


# --- transformers --------------------------------------------------------------------------------------------


@cache
def _of_transformers() -> tuple[str, ...]:
    """Every kind of model with every head that the library lists for it."""
    from transformers.models.auto import modeling_auto

    found: set[str] = set()
    for mapping in vars(modeling_auto):
        if mapping.endswith("MAPPING_NAMES") and mapping != "CONFIG_MAPPING_NAMES":
            for kind, heads in getattr(modeling_auto, mapping).items():
                for head in (heads,) if isinstance(heads, str) else heads:
                    if head is not None and not head.endswith(_LEFT_OUT):
                        found.add(f"transformers:{kind}:{head}")
    return tuple(sorted(found))


def _from_transformers(kind: str, head: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = getattr(transformers, head, None)
    if cls is None or cls.__name__.startswith("Dummy"):
        raise CannotBuild(f"the library has no {head} here")
    plain = CONFIG_MAPPING[kind]()
    config = type(plain).from_dict(_made_small(plain.to_dict()))
    with torch.device("meta"):
        count = sum(p.numel() for p in cls(config).parameters())
    if count > MOST_PARAMETERS:
        raise CannotBuild(f"it has {count / 1e6:.0f} million parameters")
    model = cls(config)
    return model, _inputs_of(model, config)


def _made_small(fields: dict[str, Any]) -> dict[str, Any]:
    small = {name: _small(name, value) for name, value in fields.items()}
    layers, left = (each.get("num_hidden_layers") for each in (fields, small))
    for (
        name,
        value,
    ) in small.items():  # what is said of each layer, as what kind it is: of the first and the last ones
        if isinstance(value, list) and isinstance(layers, int) and len(value) == layers > left:
            small[name] = [*value[: left - 1], value[-1]]
    return small


def _small(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return _made_small(value) if not name.startswith(("id2label", "label2id", "rope")) else value
    if isinstance(value, bool) or not isinstance(value, int | list | tuple):
        return value
    if name.endswith(_WORD_NUMBERS):
        return _word(value)
    if not isinstance(value, int):
        return type(value)(min(each, 2) for each in value) if name == "depths" else value
    for ends, size in _SMALL:
        if any(name == end or name.endswith(f"_{end}") for end in ends):
            return min(value, size) if value > 0 else value
    return value


def _word(value: Any) -> Any:
    """A special word has to be among the words that are left; two that differ stay different as a rule."""
    if isinstance(value, int):
        return value if value < _WORDS else _WORDS - 1 - value % 64
    return type(value)(_word(each) if isinstance(each, int) else each for each in value)


def _inputs_of(model: nn.Module, config: Any) -> dict[str, torch.Tensor]:
    wanted = inspect.signature(model.forward).parameters
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    needed = {n for n, p in wanted.items() if p.default is p.empty and p.kind not in kinds}
    needed |= {getattr(model, "main_input_name", "input_ids")} & set(wanted)
    if "decoder_input_ids" in wanted and getattr(config, "is_encoder_decoder", False):
        needed.add("decoder_input_ids")
    needed -= {"labels", "return_dict", "use_cache"}
    inputs = {name: _input(name, config) for name in sorted(needed)}
    if not _runs(model, inputs) and "input_ids" in wanted:  # a model of images that wants words, too
        inputs["input_ids"] = _input("input_ids", config)
    return inputs


def _runs(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> bool:
    with torch.no_grad():
        try:
            model(**inputs)
        except Exception:
            return False
    return True


def _field(config: Any, name: str, otherwise: int) -> int:
    """Of a configuration or of the first part of it that has the field."""
    parts = [config, *(part for part in vars(config).values() if hasattr(part, "to_dict"))]
    found = next((getattr(part, name) for part in parts if getattr(part, name, None)), otherwise)
    return int(found[0] if isinstance(found, list | tuple) else found)


def _input(name: str, config: Any) -> torch.Tensor:
    side, channels = _field(config, "image_size", SIDE), _field(config, "num_channels", 3)
    if name.endswith("input_ids"):
        return torch.randint(3, min(300, _field(config, "vocab_size", _WORDS)) - 1, (BATCH, LENGTH))
    if name == "pixel_values":
        return torch.randn(BATCH, channels, side, side)
    if name == "pixel_values_videos":
        return torch.randn(BATCH, _field(config, "num_frames", 4), channels, side, side)
    if name == "input_values":
        bins = _field(config, "num_mel_bins", 0)
        return torch.randn(BATCH, _field(config, "max_length", FRAMES), bins) if bins else torch.randn(BATCH, SAMPLES)
    if name == "input_features":
        bins = _field(config, "num_mel_bins", 0) or _field(config, "input_feat_per_channel", 80)
        is_wide = hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins")
        return torch.randn(BATCH, bins, FRAMES) if is_wide else torch.randn(BATCH, FRAMES, bins)
    if name == "attention_mask":
        return torch.ones(BATCH, LENGTH, dtype=torch.long)
    if name == "bbox":
        return torch.tensor([10, 20, 30, 40]).expand(BATCH, LENGTH, 4).contiguous()
    raise CannotBuild(f"nothing is known of its input {name!r}")


# --- timm ----------------------------------------------------------------------------------------------------


@cache
def _of_timm() -> tuple[str, ...]:
    try:
        timm = importlib.import_module("timm")
    except ImportError:
        return ()
    return tuple(f"timm:{name}" for name in sorted(timm.list_models()))


def _from_timm(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    timm = importlib.import_module("timm")
    with torch.device("meta"):
        count = sum(p.numel() for p in timm.create_model(name, pretrained=False).parameters())
    if count > MOST_PARAMETERS:
        raise CannotBuild(f"it has {count / 1e6:.0f} million parameters")
    model = timm.create_model(name, pretrained=False)
    size = model.default_cfg.get("input_size", (3, 224, 224))
    return model, {"x": torch.randn(BATCH, *size)}


def _said(failure: BaseException) -> str:
    text = " ".join(str(failure).split())
    return f"{type(failure).__name__}: {text}"[:160]
