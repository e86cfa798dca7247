"""What a block takes on a GPU, as CUDA's allocator tells it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from elbowroom.errors import ElbowroomError  # noqa: E402
from elbowroom.measure import memory  # noqa: E402
from elbowroom.measure.memory import live_bytes, measure  # noqa: E402


def test_moments_of_a_cuda_trace():
    trace = [
        {"action": "segment_alloc", "size": 2**21, "time_us": 9},
        {"action": "alloc", "size": 1000, "time_us": 9},
        {"action": "alloc", "size": 24, "time_us": 2_000_010},
        {"action": "free_requested", "size": 1000, "time_us": 3_000_010},
        {"action": "free_completed", "size": 1000, "time_us": 3_000_011},
        {"action": "oom", "size": 2**40, "time_us": 4_000_000},
        {"action": "snapshot", "size": 0, "time_us": 4_000_000},
    ]
    assert list(memory._trace_moments(trace, began_us=10.0)) == [(0, 1000), (2, 1024), (3, 24)]


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MIB = 2**18  # float32 elements; from 1 MiB on, sizes are not rounded up much


@needs_cuda
def test_cuda_figures():
    old = torch.zeros(8 * MIB, device="cuda")
    start = torch.cuda.memory_allocated()
    with measure("cuda") as m:
        a = torch.zeros(2 * MIB, device="cuda")
        b = torch.zeros(4 * MIB, device="cuda")
        del a
        kept = b[:10]
        del b, old
    assert (m.device, m.start_bytes) == (f"cuda:{torch.cuda.current_device()}", start)
    assert [held / 2**20 for _, held in m.timeline.moments[1:]] == [2, 6, 4, -4]
    # A cached block may be larger than what is asked of it, if the rest is too small to be split off.
    assert 6 * 2**20 <= m.peak_bytes < 8 * 2**20
    assert -4 * 2**20 <= m.end_bytes < -2 * 2**20
    assert m.reserved_bytes >= m.start_bytes + m.peak_bytes
    assert not torch._C._cuda_isHistoryEnabled()
    assert live_bytes([kept]) == 4 * 2**20


@needs_cuda
def test_cuda_is_chosen_once_it_is_in_use():
    torch.zeros(1, device="cuda")
    with measure(timeline=False) as m:
        torch.zeros(MIB, device="cuda")
    assert m.device.startswith("cuda")
    assert m.timeline is None
    assert m.end_bytes == 0


@needs_cuda
def test_cuda_history_of_someone_else_is_left_alone():
    torch.zeros(1, device="cuda")
    torch.cuda.memory._record_memory_history("all", context=None)
    try:
        with pytest.raises(ElbowroomError, match="timeline=False"), measure("cuda"):
            pass
        with measure("cuda", timeline=False) as m:
            torch.zeros(MIB, device="cuda")
        assert m.peak_bytes >= 2**20
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(None)


@needs_cuda
def test_cuda_trace_that_overflows_gives_no_timeline(monkeypatch):
    monkeypatch.setattr(memory, "TRACE_ENTRIES", 10)
    with measure("cuda") as m:
        for _ in range(20):
            torch.zeros(MIB, device="cuda")
    assert m.timeline is None
    assert m.peak_bytes >= 2**20


@needs_cuda
def test_cuda_exception_passes_through_and_leaves_the_figures():
    with pytest.raises(KeyError), measure("cuda") as m:  # noqa: PT012
        kept = torch.zeros(MIB, device="cuda")
        raise KeyError
    assert m.end_bytes >= live_bytes([kept])
    assert not torch._C._cuda_isHistoryEnabled()
