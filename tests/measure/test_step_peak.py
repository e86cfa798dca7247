"""A step measured between two moments, beside whatever else the user runs."""

from __future__ import annotations

import gc
import threading

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import profiler as autograd_profiler  # noqa: E402

from elbowroom.measure.memory import measure  # noqa: E402
from elbowroom.measure.step_peak import StepPeak  # noqa: E402

KIB = 256  # float32 elements in 1024 bytes


def started(**options):
    peak = StepPeak()
    assert peak.start("cpu", **options)
    return peak


def model_and_batch():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(6)]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.GELU())))
    return model, torch.randn(32, 64)


def test_the_peak_and_not_what_is_left():
    peak = started()
    a = torch.zeros(2 * KIB)
    b = a.exp()
    del a, b
    torch.zeros(KIB)
    assert peak.stop() == 4 * 1024


def test_stopping_again_says_the_same_and_measures_nothing_more():
    peak = started()
    torch.zeros(KIB)
    first = peak.stop()
    torch.zeros(8 * KIB)
    assert first == peak.stop() == 1024


def test_a_step_takes_what_measure_says():
    model, batch = model_and_batch()

    def forward():
        return model(batch).square().mean()

    forward().backward()
    with measure("cpu", timeline=False) as measured:
        forward().backward()
    peak = started(watched=model.parameters())
    loss = forward()
    loss.backward()
    assert peak.stop() == measured.peak_bytes > 0


@pytest.mark.parametrize("profiled_before", [False, True])
def test_gradients_that_go_between_forward_and_backward_make_room(profiled_before):
    """Whether the allocator reports by itself that they go, because it noted when they came, or not."""
    model, batch = model_and_batch()
    first = started() if profiled_before else None
    model(batch).square().mean().backward()
    if first is not None:
        first.stop()

    def step():
        loss = model(batch).square().mean()
        model.zero_grad()
        loss.backward()

    peak = started(watched=model.parameters())
    step()
    found = peak.stop()
    with measure("cpu", timeline=False) as measured:
        step()
    assert found == measured.peak_bytes


def test_what_goes_unwatched_only_looks_like_more():
    older, watched = torch.zeros(64 * KIB), torch.zeros(64 * KIB)
    peak = started(watched=[watched])
    del older, watched
    torch.zeros(256 * KIB)
    assert peak.stop() == (256 - 64) * 1024


@pytest.mark.parametrize("profile", [torch.profiler.profile, autograd_profiler.profile])
def test_no_start_while_a_profiler_runs_which_keeps_its_events(profile):
    with profile() as user:
        torch.zeros(4).exp()
        peak = StepPeak()
        assert not peak.start("cpu")
        assert peak.stop() is None
        torch.zeros(4).cos()
    assert {"aten::exp", "aten::cos"} <= {event.key for event in user.key_averages()}


@pytest.mark.parametrize("profile", [torch.profiler.profile, autograd_profiler.profile])
def test_a_profiler_that_starts_meanwhile_takes_the_place(profile):
    peak = started()
    torch.zeros(4).sin()
    with profile(profile_memory=True) as user:
        torch.zeros(4).exp()
        assert peak.stop() is None
        torch.zeros(4).cos()
    assert {"aten::exp", "aten::cos"} <= {event.key for event in user.key_averages()}
    assert peak.stop() is None
    peak = started()
    torch.zeros(KIB)
    assert peak.stop() == 1024


def test_a_profiler_that_warms_up_minds_neither_before_nor_after():
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    seen, taken = [], []
    with torch.profiler.profile(
        schedule=schedule, on_trace_ready=lambda user: seen.append({event.key for event in user.key_averages()})
    ) as user:
        for _ in range(5):
            peak = StepPeak()
            runs = peak.start("cpu")
            torch.zeros(KIB).exp()
            taken.append(peak.stop() if runs else None)
            user.step()
    assert taken == [2048, 2048, None, None, 2048]
    assert len(seen) == 1
    assert "aten::exp" in seen[0]


def test_a_scheduled_profiler_that_becomes_active_during_a_step():
    user = torch.profiler.profile(schedule=torch.profiler.schedule(wait=0, warmup=1, active=1))
    user.start()
    peak = started()
    user.step()
    torch.zeros(4).exp()
    assert peak.stop() is None
    user.stop()
    assert "aten::exp" in {event.key for event in user.key_averages()}


def test_a_profiler_of_another_thread_is_not_in_the_way():
    peak = started()
    torch.zeros(KIB)
    seen = []

    def work():
        with torch.profiler.profile() as user:
            torch.zeros(9 * KIB).exp()
        seen.append({event.key for event in user.key_averages()})

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert peak.stop() == 1024
    assert "aten::exp" in seen[0]


def test_measure_takes_the_place():
    peak = started()
    with measure("cpu") as measured:
        torch.zeros(KIB)
    assert measured.peak_bytes == 1024
    assert peak.stop() is None


def test_an_abandoned_measurement_ends_by_itself():
    peak = started()
    del peak
    gc.collect()
    assert not torch._C._autograd._profiler_enabled()
    with torch.profiler.profile() as user:
        torch.zeros(4).exp()
    assert "aten::exp" in {event.key for event in user.key_averages()}


def test_stopped_by_another_thread_it_says_nothing_and_is_in_nobodys_way():
    peak, found = started(), []
    thread = threading.Thread(target=lambda: found.append(peak.stop()))
    thread.start()
    thread.join()
    assert found == [None]
    with torch.profiler.profile() as user:
        torch.zeros(4).exp()
    assert "aten::exp" in {event.key for event in user.key_averages()}
    peak = started()
    torch.zeros(KIB)
    assert peak.stop() == 1024


def test_pytorchs_own_function_is_back_afterwards():
    before = autograd_profiler._run_on_profiler_start
    peak = started()
    assert autograd_profiler._run_on_profiler_start is not before
    peak.stop()
    assert autograd_profiler._run_on_profiler_start is before


def test_on_cuda_the_peak_is_set_back_only_where_it_would_hide_the_step(monkeypatch):
    allocator = {"now": 1000, "peak": 1500, "resets": 0}

    def reset(device):
        allocator.update(peak=allocator["now"], resets=allocator["resets"] + 1)

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocator["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocator["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    peaks = []
    for limit, resets in ((600, 0), (500, 0), (499, 1), (None, 2)):
        peak = StepPeak()
        assert peak.start("cuda:0", limit_bytes=limit)
        assert allocator["resets"] == resets
        allocator["peak"] = max(allocator["peak"], 1400 if resets else 1700)
        peaks.append(peak.stop())
        allocator["peak"] = allocator["peak"] if resets else 1500
    assert peaks == [700, 700, 400, 400]
    peak = StepPeak()
    assert peak.start("cuda:0", limit_bytes=1000)
    allocator["peak"] = 1000  # somebody else set it back meanwhile
    assert peak.stop() is None


def test_what_a_pause_allocates_is_not_the_steps():
    peak = StepPeak()
    assert peak.start("cpu")
    kept = torch.zeros(256).exp()
    with peak.paused():
        torch.zeros(10_000).exp()
    more = kept.exp()
    del kept
    again = more.exp()
    assert peak.stop() == 3 * 1024 - 1024
    assert again.numel() == 256


def test_a_pause_in_which_a_profiler_starts_loses_the_measurement():
    peak = StepPeak()
    assert peak.start("cpu")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), peak.paused():
        torch.zeros(16)
    assert peak.stop() is None


def test_outputs_of_the_step_before_that_go_make_the_peak_no_lower():
    peak = StepPeak()
    assert peak.start("cpu")
    earlier = torch.zeros(256).exp()
    peak.stop()
    assert peak.start("cpu", uncounted=[earlier.untyped_storage()])
    kept = torch.zeros(256)
    del earlier  # as large as what was allocated before it, so that sizes alone do not tell whose it was
    more = torch.zeros(256)
    assert peak.stop() == 2048
    assert len(kept) == len(more)
