"""A fitted model that has nothing to do with the one on trial. Whatever befalls that one must not touch this one.

It has dropout, so that its gradients tell whether somebody else's random numbers got into its recomputation.
"""

from __future__ import annotations

import copy
import re
import sys
import threading
import warnings

import torch
from torch import nn

import elbowroom
from campaign.comparing import Failure, Generators, apart, drawing_as_plainly
from campaign.metering import TOOK_MORE, Meter, storages

# On a GPU the budget that did may be too small by what others have taken since.
OTHERS_GREW = re.compile("outside the plan|compiled, it needs at least")

# Names that no model on trial has: a script of a failure holds both.
ITS_WIDTH, ITS_ROWS, DROPPED = 16, 64, 0.5


class Dropping(nn.Module):
    """Answers with its result and with what each layer dropped, so that gradients can be computed plainly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(ITS_WIDTH, ITS_WIDTH) for _ in range(5))
        self.drop = nn.Dropout(DROPPED)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        dropped = []
        for layer in self.layers:
            x = self.drop(torch.exp(torch.tanh(layer(x))))  # never 0 before
            dropped.append(x.detach() == 0)
        return x.square().mean(), dropped


def gradients_plainly(model: nn.Module, x: torch.Tensor, dropped: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of a step that dropped exactly this."""
    for layer, gone in zip(model.layers, dropped, strict=True):
        x = torch.exp(torch.tanh(layer(x))).masked_fill(gone, 0.0) / (1 - DROPPED)
    return list(torch.autograd.grad(x.square().mean(), list(model.parameters())))


class Bystander:
    """Fitted once, and then looked at from time to time."""

    def __init__(self, kernels: str = "torch", device: str = "cpu") -> None:
        chance = Generators.now()
        torch.manual_seed(0)
        self.device = device
        self.x = torch.randn(ITS_ROWS, ITS_WIDTH).to(device)
        model = Dropping().to(device)
        self.plain = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="elbowroom")
            with drawing_as_plainly(kernels):
                self._fit(model, kernels)
        chance.put_back()

    def _fit(self, model: nn.Module, kernels: str) -> None:
        self.fitted = elbowroom.fit(model, self.x, budget="1GiB", kernels=kernels)
        try:
            self.fitted.elbowroom.set_budget(1)
        except elbowroom.BudgetTooSmall as refusal:
            self.budget = refusal.least_budget
        self.fitted.elbowroom.set_budget(self.budget)
        self._step(self.fitted, metered=False)

    def _step(self, model: nn.Module, *, metered: bool) -> tuple[int, list[torch.Tensor]]:
        """The highest number of bytes, and how far gradients are from the plain ones of the same step."""
        resident = sum(storages([*model.parameters(), self.x]).values())
        model.zero_grad()
        with Meter(self.device) if metered else warnings.catch_warnings() as meter:
            result, dropped = model(self.x)
            result.backward()
        gradients = [p.grad for p in model.parameters()]
        self.expected = gradients_plainly(self.plain, self.x, dropped)
        return resident + (meter.peak_bytes if metered else 0), gradients

    def step(self) -> list[Failure]:
        """One step whose gradients must be those of what it dropped, whoever else draws random numbers meanwhile."""
        _, gradients = self._step_again_if_due(metered=False)
        share, text = apart(self.expected, gradients)
        return [Failure("thread: wrong gradient", f"of another model: {text}")] if share > 1e-4 else []

    def _step_again_if_due(self, *, metered: bool) -> tuple[int, list[torch.Tensor]]:
        """A step, which on a GPU may be refused once: whatever else is allocated there counts. What the refusal names
        must be enough."""
        try:
            return self._step(self.fitted, metered=metered)
        except elbowroom.BudgetTooSmall as refusal:
            if self.device == "cpu":
                raise
            self.budget = refusal.least_budget
        self.fitted.elbowroom.set_budget(self.budget)
        return self._step(self.fitted, metered=metered)

    def check(self, when: str) -> list[Failure]:
        """What is wrong with it now. On a GPU others may take memory while it steps, and then it says so."""
        chance = Generators.now()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                peak, gradients = self._step_again_if_due(metered=True)
            except Exception as failure:
                return [Failure("bystander raised", f"{type(failure).__name__}: {failure} ({when})"[:200])]
        chance.put_back()
        said = [str(each.message) for each in caught if str(each.message).startswith("elbowroom")]
        if self.device != "cpu":
            said = [text for text in said if not TOOK_MORE.match(text) and not OTHERS_GREW.search(text)]
        found = []
        share, text = apart(self.expected, gradients)
        if share > 1e-4:
            found.append(Failure("bystander: wrong gradient", f"{text} ({when})"))
        if said:
            found.append(Failure("bystander no longer planned", f"{said[0][:200]} ({when})"))
        elif peak > self.budget and self.device == "cpu":
            found.append(Failure("bystander over budget", f"{peak} of {self.budget} bytes ({when})"))
        return found


class Company:
    """A thread that works on something of its own, again and again, while the block runs."""

    def __init__(self, work: object) -> None:
        self.work, self.ended = work, threading.Event()
        self.failures: list[Failure] = []
        self.thread = threading.Thread(target=self._loop, daemon=True)

    def _loop(self) -> None:
        torch.set_num_threads(1)
        while not self.ended.is_set():
            try:
                self.failures += self.work() or []  # type: ignore[operator]
            except Exception as failure:
                self.failures.append(Failure(f"thread: raised {type(failure).__name__}", str(failure)[:160]))
                return

    def __enter__(self) -> Company:
        self.usual_s = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)  # threads take turns as often as they can
        self.thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.ended.set()
        self.thread.join(30)
        sys.setswitchinterval(self.usual_s)
