"""Random models as text: a recipe is a list of features, and its source is a class that runs and can be printed."""

from __future__ import annotations

import linecache
import random
import sys
from dataclasses import dataclass
from itertools import count
from types import ModuleType

from campaign.features import FEATURES, LAYERS, LOSSES, OUTPUTS, PICKS, PYTHON, Feature

IMPORTS = """import collections
import dataclasses
import random

import numpy
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F
"""

GATE = """
class Gate(nn.Module):
    # Raises when told to: somewhere in the middle of the forward.
    def __init__(self):
        super().__init__()
        self.broken = False

    def forward(self, h):
        if self.broken:
            raise ArithmeticError("planted in the model")
        return h * 1.5
"""

CRITERION = """
class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.broken = False

    def forward(self, output, target):
        out = {pick}
        if self.broken:
            raise ArithmeticError("planted in the loss")
        return {loss}
"""

_NUMBERS = count()


@dataclass(frozen=True)
class Block:
    """One feature of a model. `nested`: in a module of its own."""

    feature: str
    nested: bool = False


@dataclass(frozen=True)
class Recipe:
    """A model. `output` and `loss` name an entry of `features.OUTPUTS` and `features.LOSSES`."""

    blocks: tuple[Block, ...]
    output: str = "tensor"
    loss: str = "mean square"
    width: int = 16
    length: int = 16
    classes: int = 4

    @property
    def features(self) -> list[Feature]:
        return [FEATURES[block.feature] for block in self.blocks]

    @property
    def draws(self) -> bool:
        """Whether it takes numbers from torch's generator, which threads share."""
        return any(feature.draws for feature in self.features)

    @property
    def takes_scale(self) -> bool:
        return any(block.feature == "float argument" for block in self.blocks)

    @property
    def replaceable(self) -> str:
        """The path of a layer from WIDTH to WIDTH that another may take the place of; empty if there is none."""
        for number, (block, feature) in enumerate(zip(self.blocks, self.features, strict=True)):
            if feature.layer:
                return f"block{number}." + _at(feature.layer, "") if block.nested else _at(feature.layer, str(number))
        return ""


def random_recipe(chance: random.Random) -> Recipe:
    """Two to six layers with some Python between them."""
    layers = [chance.choice(list(LAYERS)) for _ in range(chance.randint(2, 6))]
    python = [chance.choice(list(PYTHON)) for _ in range(chance.choice([0, 1, 1, 2, 2, 3]))]
    names = layers + python
    chance.shuffle(names)
    return Recipe(
        blocks=tuple(Block(name, chance.random() < 0.4) for name in names),
        output=chance.choice([*OUTPUTS, "tensor", "tensor"]),
        loss=chance.choice(list(LOSSES)),
        width=chance.choice([8, 16, 24]),
        length=chance.choice([8, 16]),
        classes=chance.choice([4, 16]),
    )


def source(recipe: Recipe) -> str:
    """The text of a module with `Model` and `Criterion`, both without arguments."""
    answer, output_helpers = OUTPUTS[recipe.output]
    helpers = dict.fromkeys([output_helpers, *(feature.helpers for feature in recipe.features)])
    constants = f"WIDTH, LENGTH, CLASSES = {recipe.width}, {recipe.length}, {recipe.classes}\n"
    parts = [IMPORTS, constants, *(text for text in helpers if text), GATE]
    init, forward = [], []
    for number, (block, feature) in enumerate(zip(recipe.blocks, recipe.features, strict=True)):
        if number == len(recipe.blocks) // 2:
            forward.append("h = self.gate(h)")
        if block.nested:
            parts.append(_nested(number, feature))
            init.append(f"self.block{number} = Block{number}()")
            forward.append(f"h = self.block{number}(h, x, scale)")
        else:
            init += [_at(line, str(number)) for line in feature.init]
            forward += [_at(line, str(number)) for line in feature.forward]
    if not recipe.blocks:
        forward.append("h = self.gate(h)")
    init += ["self.gate = Gate()", "self.head = nn.Linear(WIDTH, CLASSES)"]
    forward = ["h = x", *forward, "out = self.head(h)", answer]
    parts.append(_class("Model", init, "x, scale=1.0", forward))
    parts.append(CRITERION.format(pick=PICKS[recipe.output], loss=LOSSES[recipe.loss]))
    return "\n".join(part.strip("\n") + "\n" if part else "" for part in _spaced(parts))


def load(text: str) -> ModuleType:
    """The text as a module that pickle and tracebacks find."""
    name = f"campaign_model_{next(_NUMBERS)}"
    module = ModuleType(name)
    module.__file__ = f"<{name}>"
    linecache.cache[module.__file__] = (len(text), None, text.splitlines(keepends=True), module.__file__)
    sys.modules[name] = module
    exec(compile(text, module.__file__, "exec"), module.__dict__)
    return module


def forget(module: ModuleType) -> None:
    sys.modules.pop(module.__name__, None)
    linecache.cache.pop(module.__file__ or "", None)


def _nested(number: int, feature: Feature) -> str:
    init = [_at(line, "") for line in feature.init]
    forward = [_at(line, "") for line in feature.forward]
    return _class(f"Block{number}", init, "h, x, scale", [*forward, "return h"])


def _class(name: str, init: list[str], arguments: str, forward: list[str]) -> str:
    lines = [f"class {name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += [f"        {line}" for line in init]
    lines += ["", f"    def forward(self, {arguments}):"]
    lines += [f"        {line}" for line in forward]
    return "\n".join(lines)


def _at(line: str, number: str) -> str:
    """The line with the block's number, but matrix products, which are written ` @ `, as they are."""
    return line.replace(" @ ", " \0 ").replace("@", number).replace(" \0 ", " @ ")


def _spaced(parts: list[str]) -> list[str]:
    spaced: list[str] = []
    for part in parts:
        spaced += [part, ""]
    return spaced
