"""What the allocator says, and a profiler of the user's that goes on as if nobody else had listened."""

from __future__ import annotations

import json
import threading

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import profiler as autograd_profiler  # noqa: E402

from elbowroom.measure.allocator_reports import changes_during, profiler_is_running  # noqa: E402

KIB = 256  # float32 elements in 1024 bytes


def chain_of_tensors():
    a = torch.zeros(KIB)
    b = a.exp()
    del a
    return torch.cat([b, b])


CHANGES = [1024, 1024, -1024, 2048, -1024]


def test_allocations_and_frees_in_order():
    result, changes = changes_during(chain_of_tensors)
    assert changes == CHANGES
    assert result.nbytes == 2048
    assert not profiler_is_running()


def test_a_call_that_fails_leaves_nothing_running():
    with pytest.raises(ZeroDivisionError):
        changes_during(lambda: 1 / 0)
    assert not torch._C._autograd._profiler_enabled()
    assert changes_during(chain_of_tensors)[1] == CHANGES


@pytest.mark.parametrize("options", [{}, {"profile_memory": True, "with_stack": True, "record_shapes": True}])
def test_beside_a_profiler_that_records(options, tmp_path):
    with torch.profiler.profile(**options) as user:
        torch.zeros(4).sin()
        thread = threading.get_ident()
        (ran_in, changes) = changes_during(lambda: (threading.get_ident(), chain_of_tensors())[0])
        torch.zeros(4).cos()
    assert changes == [*CHANGES, -2048]
    assert ran_in != thread
    keys = {event.key for event in user.key_averages()}
    assert {"aten::sin", "aten::cos"} <= keys
    assert "aten::exp" not in keys  # what was measured is none of the user's business
    user.export_chrome_trace(str(tmp_path / "trace.json"))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_beside_the_older_kinds_of_profilers():
    for profile in (autograd_profiler.profile, torch.autograd.profiler_legacy.profile):
        with profile() as user:
            torch.zeros(4).sin()
            assert changes_during(chain_of_tensors)[1] == CHANGES
            torch.zeros(4).cos()
        assert {"aten::sin", "aten::cos"} <= {event.key for event in user.key_averages()}


def test_in_every_phase_of_a_schedule():
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    seen = []
    with torch.profiler.profile(
        schedule=schedule, on_trace_ready=lambda user: seen.append({event.key for event in user.key_averages()})
    ) as user:
        for _ in range(5):
            torch.zeros(4).sin()
            assert changes_during(chain_of_tensors)[1] == CHANGES
            torch.zeros(4).cos()
            user.step()
    assert len(seen) == 1
    assert {"aten::sin", "aten::cos"} <= seen[0]


@pytest.mark.parametrize("grad_mode", [False, True])
def test_the_other_thread_has_the_same_grad_mode(grad_mode):
    with torch.profiler.profile(), torch.set_grad_enabled(grad_mode):
        assert changes_during(torch.is_grad_enabled)[0] is grad_mode
