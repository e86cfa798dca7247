"""Planning inside a profiler of the user's: the plan is the same, and the profiler goes on recording."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.autograd import profiler as autograd_profiler  # noqa: E402

import elbowroom  # noqa: E402
from fusible import needs_compiler  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "fresh")
BUDGET = "1MB"


@pytest.fixture(autouse=True)
def nothing_measured_before(monkeypatch, tmp_path):
    """Or nothing would have to be measured during the test."""
    monkeypatch.setenv("ELBOWROOM_CACHE", str(tmp_path))


def network():
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    return nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), *layers), torch.randn(16, 8, 64)


def fitted(model, batch):
    return elbowroom.fit(model, batch, budget=BUDGET)


def fitted_by_stages(model, batch):
    return elbowroom.fit(model, batch, budget=BUDGET, stages=list(model))


def compiled(model, batch):
    return torch.compile(model, backend="elbowroom", options={"budget": BUDGET})


def compiled_and_fused(model, batch):
    return torch.compile(model, backend="elbowroom", options={"budget": BUDGET, "kernels": "inductor"})


def step(model, batch):
    model(batch).square().mean().backward()


ROADS = pytest.mark.parametrize("prepare", [fitted, fitted_by_stages, compiled])


def sees_the_step(user):
    keys = {event.key for event in user.key_averages()}
    return {"aten::sin", "aten::cos", "aten::addmm"} <= keys


@ROADS
@pytest.mark.parametrize("profile", [torch.profiler.profile, autograd_profiler.profile])
def test_a_profiler_that_records_goes_on(prepare, profile, tmp_path):
    model, batch = network()
    with profile(profile_memory=True) as user:
        torch.zeros(4).sin()
        planned = prepare(model, batch)
        step(planned, batch)
        torch.zeros(4).cos()
    assert sees_the_step(user)
    user.export_chrome_trace(str(tmp_path / "trace.json"))
    assert (tmp_path / "trace.json").stat().st_size > 0


@ROADS
@pytest.mark.parametrize("at", range(4))
def test_in_every_phase_of_a_schedule(prepare, at):
    model, batch = network()
    seen = []
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    with torch.profiler.profile(
        schedule=schedule, on_trace_ready=lambda user: seen.append(sees_the_step(user))
    ) as user:
        for number in range(5):
            torch.zeros(4).sin()
            if number == at:
                model = prepare(model, batch)
            step(model, batch)
            torch.zeros(4).cos()
            user.step()
    assert seen == [True]


@needs_compiler
@pytest.mark.usefixtures("quick_compiler")
def test_fused_trials_leave_it_running():
    model, batch = network()
    with torch.profiler.profile() as user:
        torch.zeros(4).sin()
        step(compiled_and_fused(model, batch), batch)
        torch.zeros(4).cos()
    assert {"aten::sin", "aten::cos"} <= {event.key for event in user.key_averages()}


def test_the_plan_is_the_one_that_is_made_without_a_profiler(monkeypatch, tmp_path):
    plans = []
    for number in range(2):
        monkeypatch.setenv("ELBOWROOM_CACHE", str(tmp_path / str(number)))
        torch._dynamo.reset()
        model, batch = network()
        with torch.profiler.profile(profile_memory=True) if number else torch.no_grad():
            plan = elbowroom.plan(model, batch, budget="100MB")
        plans.append([region.predicted_peak_bytes for region in plan.regions])
    assert plans[0] == plans[1]


def test_fit_inside_a_measured_block():
    model, batch = network()
    with elbowroom.measure("cpu") as measured:
        kept = torch.zeros(256)
        fitted(model, batch)
        more = torch.zeros(512)
    assert measured.peak_bytes >= kept.nbytes + more.nbytes
    assert kept.nbytes + more.nbytes <= measured.end_bytes < 100_000
