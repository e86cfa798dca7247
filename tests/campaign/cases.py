"""A case: a model, what to fit it with, and what happens. From a number, and judged in this process."""

from __future__ import annotations

import random
from dataclasses import dataclass

from campaign.bystander import Bystander
from campaign.events import EVENTS
from campaign.judging import Verdict, judge
from campaign.models import Recipe, forget, load, random_recipe, source
from campaign.pair import Trial


@dataclass(frozen=True)
class Case:
    """`seed` is for weights and batches; everything else that chance chose is written out."""

    seed: int
    recipe: Recipe
    events: tuple[str, ...] = ()
    share: float = 0.3
    batch: int = 8
    loss_inside: bool = False
    optimizer: str = ""
    strict: bool = False
    kernels: str = "torch"
    device: str = "cpu"
    checks: int = 2
    tolerated: tuple[str, ...] = ()

    @property
    def trial(self) -> Trial:
        recipe = self.recipe
        return Trial(
            seed=self.seed,
            width=recipe.width,
            length=recipe.length,
            classes=recipe.classes,
            share=self.share,
            batch=self.batch,
            loss_inside=self.loss_inside,
            optimizer=self.optimizer,
            strict=self.strict,
            kernels=self.kernels,
            device=self.device,
            checks=self.checks,
            takes_scale=recipe.takes_scale,
            replaceable=recipe.replaceable,
            draws=recipe.draws,
            tolerated=self.tolerated,
        )


def random_case(seed: int, kernels: str = "torch", device: str = "cpu", tolerated: tuple[str, ...] = ()) -> Case:
    chance = random.Random(seed)
    return Case(
        seed=seed,
        recipe=random_recipe(chance),
        events=tuple(chance.choice(list(EVENTS)) for _ in range(chance.choice([1, 1, 2, 2, 3, 4]))),
        share=chance.choice([0.0, 0.02, chance.random(), chance.random(), 1.0]),
        batch=chance.choice([4, 8, 16]),
        loss_inside=chance.random() < 0.5,
        optimizer=chance.choice(["", "SGD", "Adam"]),
        strict=chance.random() < 0.2,
        kernels=kernels,
        device=device,
        checks=chance.choice([2, 3]),
        tolerated=tolerated,
    )


def judge_case(case: Case, bystander: Bystander | None = None) -> Verdict:
    text = load(source(case.recipe))
    try:
        return judge(case.trial, text, [EVENTS[name] for name in case.events], bystander)
    finally:
        forget(text)
