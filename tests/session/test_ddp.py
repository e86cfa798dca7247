"""Data-parallel training on two processes: under DDP a fitted model is the original, bit for bit."""

from __future__ import annotations

import copy
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import distributed, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import elbowroom  # noqa: E402
from trained import Block  # noqa: E402

RANKS = 2
LIMIT_S = 120  # a rank that waits for the other one would wait for ever
STEPS = 3

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this PyTorch has no distributed package")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, x, y):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


SCENARIOS = {
    "plain": {},
    "gradients are views of the buckets": {"gradient_as_bucket_view": True},
    "accumulation without synchronizing": {"silent": 2},
    "both": {"gradient_as_bucket_view": True, "silent": 2},
    "the graph never changes": {"static_graph": True},
    "a shape first seen inside DDP": {"size": 3},
}


def test_two_ranks_train_as_with_the_original(tmp_path):
    """Parameters, gradients, buffers, losses and random state after every step, and every bucket is communicated."""
    ranks = torch.multiprocessing.spawn(run_rank, (tmp_path,), RANKS, join=False)
    deadline = time.monotonic() + LIMIT_S
    try:
        while not ranks.join(timeout=1):  # raises what a rank raises
            assert time.monotonic() < deadline, "the ranks wait for each other"
    finally:
        for process in ranks.processes:
            process.kill()
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    for name in SCENARIOS:
        for rank in range(RANKS):
            assert found[rank][name]["recomputes"], f"{name}: the budget forces nothing"
            original, fitted = found[rank][name]["original"], found[rank][name]["fitted"]
            for step, (a, b) in enumerate(zip(original["steps"], fitted["steps"], strict=True)):
                for what in a:
                    assert torch.equal(a[what], b[what]), f"{name}, rank {rank}, step {step}: {what}"
            assert original["communicated"] == fitted["communicated"], f"{name}, rank {rank}"
            assert fitted["communicated"][-1][0] > 1, f"{name}: one bucket shows little"
            elements = sum(p.numel() for p in Net().parameters())
            assert all(numbers == elements for _, numbers in fitted["communicated"]), name
        last = [found[rank][name]["fitted"]["steps"][-1] for rank in range(RANKS)]
        assert all(torch.equal(last[0][what], last[1][what]) for what in last[0] if what.startswith("gradient"))
        assert not torch.equal(last[0]["loss"], last[1]["loss"]), "the ranks saw the same batch"


# --- in the ranks --------------------------------------------------------------------------------------------


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", f"file://{folder}/meeting", timedelta(seconds=LIMIT_S), world_size=RANKS, rank=rank
    )
    torch.manual_seed(0)
    model = Net()
    start = copy.deepcopy(model.state_dict())
    fitted = tight(copy.deepcopy(model), batch(rank, 0, 4))
    found = {name: run_scenario(rank, model, fitted, start, **options) for name, options in SCENARIOS.items()}
    assert all("outside the plan" in why for why in fitted.elbowroom.said), "only buckets of DDP are not planned"
    torch.save(found, folder / f"{rank}.pt")
    distributed.destroy_process_group()


def tight(model, example):
    """The model fitted to 60 % of what its activations would like."""
    fitted = elbowroom.fit(model, *example, budget="1TiB", times="estimate")
    (entry,) = fitted.elbowroom.entries.values()
    resident = entry.plan.resident_bytes
    fitted.elbowroom.set_budget(resident + int(0.6 * (entry.plan.peak_bytes - resident)))
    return fitted


def run_scenario(rank, model, fitted, start, **options):
    result = {}
    for name, module in (("original", model), ("fitted", fitted)):
        module.load_state_dict(start)
        module.zero_grad()
        result[name] = train(module, rank, **options)
    entry = list(fitted.elbowroom.entries.values())[-1]
    (region,) = entry.regions
    return {**result, "recomputes": bool(region.program.reruns)}


def batch(rank, number, size):
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(size, 3, 10, 10, generator=generator), torch.randint(5, (size,), generator=generator)


def train(module, rank, silent=0, size=4, **options):
    """A few steps under DDP; what each left behind, and what was communicated: buckets and numbers in them."""
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.01, **options)
    communicated = SimpleNamespace(buckets=0, numbers=0)
    ddp.register_comm_hook(communicated, mean_of_ranks)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(7 + rank)
    steps, counts = [], []
    for step in range(STEPS):
        communicated.buckets = communicated.numbers = 0
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for part in range(silent + 1):
            with ddp.no_sync() if part < silent else nullcontext():
                loss = ddp(*batch(rank, 10 * step + part, size))
                loss.backward()
            if part < silent:
                assert not communicated.buckets
        steps.append(left_behind(module, loss))
        counts.append((communicated.buckets, communicated.numbers))
        optimizer.step()
    steps.append(left_behind(module, loss))
    return {"steps": steps, "communicated": counts}


def mean_of_ranks(communicated, bucket):
    communicated.buckets += 1
    communicated.numbers += bucket.buffer().numel()
    work = distributed.all_reduce(bucket.buffer().div_(RANKS), async_op=True).get_future()
    return work.then(lambda future: future.value()[0])


def left_behind(module, loss):
    result = {"loss": loss.detach(), "random state": torch.get_rng_state()}
    for name, parameter in module.named_parameters():
        result[f"parameter {name}"] = parameter.detach().clone()
        result[f"gradient of {name}"] = parameter.grad.clone()
    for name, buffer in module.named_buffers():
        result[f"buffer {name}"] = buffer.clone()
    return result
