"""A thousand damaged plan files: each is refused in one clear line, or the step is right and within its budget."""

from __future__ import annotations

import copy
import json
import random

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.errors import InputError
from elbowroom.measure.memory import measure
from elbowroom.plan.plan import Plan
from elbowroom.session.loading import confirmed

FILES = 1000
STRANGE = None, True, -1, 0, 3, 2**70, 1.5, float("nan"), "", "run", [], {}, [[]]


class Network(nn.Module):
    """Enough to recompute, with dropout and batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.3)) for _ in range(4)]
        self.layers = nn.Sequential(*layers, nn.Linear(32, 4))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.layers(x), y)


@pytest.fixture(scope="module", params=["never", "always"])
def fitted(request):
    """A model under half of the memory that its step would take, with its plan as a file says it, which it has
    loaded: one that computes values again, or one that moves them."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = Network(), (torch.randn(256, 32), torch.randint(4, (256,)))
    plain = elbowroom.plan(model, *batch, budget="1GiB", kernels="torch")
    budget = plain.resident_bytes + (plain.peak_bytes - plain.resident_bytes) * 6 // 10
    plan = elbowroom.plan(model, *batch, budget=budget, kernels="torch", offload=request.param)
    assert plan.regions[0].program.moves if request.param == "always" else plan.regions[0].program.reruns
    fitted = elbowroom.fit(model, *batch, budget=budget, kernels="torch", plan=plan)
    entry = fitted.elbowroom.prepare(batch, {})
    return fitted, batch, entry, json.dumps(entry.plan.to_json())


def step(model, batch):
    """Loss, gradients and buffers of one step from a fixed state, and its peak above what was there."""
    torch.manual_seed(1)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for parameter in model.parameters():
        parameter.grad = None
    with measure("cpu", timeline=False) as taken:
        loss = model(*batch)
        loss.backward()
    values = [loss.detach(), *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return values, taken.peak_bytes


def test_damaged_files_are_refused_or_right(fitted):
    model, batch, entry, text = fitted
    session = model.elbowroom
    budget, resident = session.options.budget_bytes, entry.plan.resident
    right, _ = step(model, batch)
    rng = random.Random(0)
    refused = served = 0
    programs = set()
    said: list[str] = []
    for _ in range(FILES):
        damaged = damage(text, rng)
        try:
            plan = Plan.from_json(json.loads(damaged))
            (planned,) = confirmed(plan, entry.graphs, resident, budget, no_trials)
        except json.JSONDecodeError:
            refused += 1
            continue
        except InputError as refusal:
            said.append(str(refusal))
            refused += 1
            continue
        served += 1
        if planned.program in programs:
            continue
        programs.add(planned.program)
        entry.graphs[0].install(planned)
        values, peak = step(model, batch)
        assert all(torch.equal(a, b) for a, b in zip(right, values, strict=True))
        assert entry.plan.start_bytes + peak <= budget
        assert plan.host_budget_bytes is None or entry.host_bytes <= plan.host_budget_bytes
    assert all("\n" not in each and len(each) < 400 for each in said)
    assert refused > FILES / 2
    assert served > 10  # damage to what a plan only tells


def no_trials():
    raise AssertionError("predictions are exact here")


# --- damage --------------------------------------------------------------------------------------------------


def damage(text: str, rng: random.Random) -> str:
    """One change, to the text or to what it says; most changes hit the program."""
    if rng.random() < 0.1:
        return damaged_text(text, rng)
    data = json.loads(text)
    region = data["regions"][0]
    moves = [region["traffic"]] if region["traffic"] else []
    where = rng.choice([data, region, *moves, *[region["program"]] * 6])
    change(where, rng)
    return json.dumps(data)


def damaged_text(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text))
    if rng.random() < 0.5:
        return text[:at]
    return text[:at] + rng.choice('0123456789[]{},":x') + text[at + 1 :]


def change(where, rng: random.Random) -> None:
    """Change one thing in a list or an object, or in something inside of it."""
    keys = list(where) if isinstance(where, dict) else list(range(len(where)))
    if not keys:
        if isinstance(where, list):
            where.append(rng.choice(STRANGE))
        return
    key = rng.choice(keys)
    inner = where[key]
    if isinstance(inner, list | dict) and rng.random() < 0.85:
        change(inner, rng)
        return
    kind = rng.randrange(5)
    if kind == 0:
        del where[key]
    elif kind == 1 and isinstance(where, list):
        where.insert(rng.randrange(len(where) + 1), copy.deepcopy(inner))
    elif kind == 2 and isinstance(where, list):
        other = rng.randrange(len(where))
        where[key], where[other] = where[other], where[key]
    elif kind == 3 or not isinstance(inner, int) or isinstance(inner, bool):
        where[key] = rng.choice(STRANGE)
    else:
        where[key] = inner + rng.choice((-2, -1, 1, 2, 10))
