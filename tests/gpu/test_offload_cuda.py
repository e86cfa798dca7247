"""On a GPU: values move on streams of their own, within both budgets, and no bit of a step changes."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.execute.to_host.lanes import OnStream, lanes_of  # noqa: E402
from elbowroom.execute.to_host.link_speed import link_of  # noqa: E402
from elbowroom.measure.host_memory import HostPiece, held_bytes  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = torch.device("cuda", 0)
CYCLES = 2_000_000  # about a millisecond, by which a copy is late


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("ELBOWROOM_CACHE", str(tmp_path))
    torch._dynamo.reset()
    torch.manual_seed(0)


def network():
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Dropout(0.1)) for _ in range(12)]
    return nn.Sequential(*layers, nn.Linear(1024, 10)).to(DEVICE)


def batch():
    return torch.randn(4096, 1024, device=DEVICE), torch.randint(10, (4096,), device=DEVICE)


def fit(model, example, share, **wishes):
    loss = nn.functional.cross_entropy
    plain = elbowroom.plan(model, *example, budget="100GiB", loss=loss, kernels="torch", times="estimate")
    budget = plain.resident_bytes + int(share * (plain.plain_peak_bytes - plain.resident_bytes))
    return elbowroom.fit(model, *example, budget=budget, loss=loss, offload="always", **wishes), budget


def late(lane: OnStream):
    """A lane's copy, which waits for a while on its stream."""
    copy_on_time = lane.copy

    def copy_late(target, source):
        with torch.cuda.stream(lane._stream):
            torch.cuda._sleep(CYCLES)
        return copy_on_time(target, source)

    return copy_late


def steps(model, example, count):
    found = []
    for seed in range(count):
        torch.manual_seed(seed)
        model.zero_grad()
        loss = model(*example)
        loss.backward()
        found.append([loss.detach().clone(), *(p.grad.clone() for p in model.parameters())])
    return found


@pytest.mark.parametrize("share", [0.7, 0.5, 0.35])
@pytest.mark.parametrize("is_late", [False, True])
def test_every_bit_is_the_same_however_late_copies_are(share, is_late, monkeypatch):
    model, example = network(), batch()
    still = elbowroom.fit(
        copy.deepcopy(model), *example, budget="100GiB", loss=nn.functional.cross_entropy, kernels="torch"
    )
    expected = steps(still, example, 3)
    del still
    fitted, budget = fit(model, example, share, kernels="torch")
    (entry,) = fitted.elbowroom.entries.values()
    assert entry.regions[0].program.moves
    for lane in lanes_of(DEVICE) if is_late else ():
        monkeypatch.setattr(lane, "copy", late(lane), raising=False)
    torch.cuda.reset_peak_memory_stats()
    for ours, theirs in zip(steps(fitted, example, 3), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    torch.cuda.reset_peak_memory_stats()
    fitted.zero_grad()
    fitted(*example).backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() <= budget + sum(size.nbytes for row in expected for size in row)


def test_fused_programs_move_within_the_budget():
    model, example = network(), batch()
    fitted, budget = fit(model, example, 0.5, kernels="inductor", cuda_graphs=False)
    (entry,) = fitted.elbowroom.entries.values()
    assert entry.instead is None
    assert entry.host_bytes > 0
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        fitted.zero_grad()
        fitted(*example).backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() <= budget


def test_a_recording_copies_as_the_launched_program_does():
    model, example = network(), batch()
    fitted, _budget = fit(model, example, 0.5, kernels="inductor")
    (entry,) = fitted.elbowroom.entries.values()
    (region,) = entry.regions
    build = region.programs[region.current].build
    assert build.program.moves
    found = {}
    for recorded in (False, True):
        region.install(replace(build, recorded=recorded))
        found[recorded] = steps(fitted, example, 4)
    serving = region.programs[region.current].recorder
    assert serving.recording is not None, "it was not recorded"
    assert serving._runs > 0
    for ours, theirs in zip(found[True], found[False], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    del found
    held, reserved = held_bytes(), torch.cuda.memory_reserved()
    for _ in range(100):
        fitted.zero_grad()
        fitted(*example).backward()
    torch.cuda.synchronize()
    assert (held_bytes(), torch.cuda.memory_reserved()) == (held, reserved)
    print(f"launched {timed(region, build, fitted, example, False):.2f} ms", end=", ")
    print(f"replayed {timed(region, build, fitted, example, True):.2f} ms, recorded by itself: {build.recorded}")


def timed(region, build, fitted, example, recorded):
    """For people: what steps take."""
    region.install(replace(build, recorded=recorded))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(25):
        if number == 15:
            begin.record()
        fitted.zero_grad()
        fitted(*example).backward()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 10


def test_what_is_held_stays_the_same_over_many_steps():
    model, example = network(), batch()
    fitted, _ = fit(model, example, 0.5, kernels="torch")
    (entry,) = fitted.elbowroom.entries.values()
    steps(fitted, example, 3)
    held, reserved = held_bytes(), torch.cuda.memory_reserved()
    assert held == entry.host_bytes > 0
    for _ in range(200):
        fitted.zero_grad()
        fitted(*example).backward()
    torch.cuda.synchronize()
    assert (held_bytes(), torch.cuda.memory_reserved()) == (held, reserved)


def test_memory_is_pinned_as_it_is_and_given_back():
    before = held_bytes()
    piece = HostPiece(3 << 20, DEVICE)
    assert piece.memory.is_pinned()
    assert held_bytes() == before + (3 << 20)
    del piece
    assert held_bytes() == before


def test_the_link_is_faster_than_memory_that_is_not_pinned():
    link = link_of(DEVICE, None)
    loose, there = torch.empty(64 << 20, dtype=torch.uint8), torch.zeros(64 << 20, dtype=torch.uint8, device=DEVICE)
    loose.copy_(there)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    loose.copy_(there)
    end.record()
    end.synchronize()
    assert link.to_host > loose.numel() / (begin.elapsed_time(end) / 1e3)
    assert 0 < link.seconds_per_copy < 1e-3
    assert link.duplex <= 1.05 * max(link.to_host, link.from_host)
