"""Figures that can be worked out by hand, and what must not disturb them."""

from __future__ import annotations

import gc
import json
import threading

import pytest

torch = pytest.importorskip("torch")

from elbowroom.errors import ElbowroomError, InputError  # noqa: E402
from elbowroom.measure.host_memory import HostPiece, held_bytes  # noqa: E402
from elbowroom.measure.memory import live_bytes, measure  # noqa: E402

KIB = 256  # float32 elements in 1024 bytes


@pytest.fixture(autouse=True)
def _few_objects():
    """A measurement looks through every object there is, and torch imports many: set aside what came before."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _all_objects_again():
    yield
    gc.unfreeze()


def events(m):
    """Seconds and bytes after each event of the allocator. The timeline begins before the first, with nothing."""
    first, *moments = m.timeline.moments
    assert first == (0, 0)
    return moments


def levels(m):
    """The timeline without its times, in KiB."""
    return [held / 1024 for _, held in events(m)]


def test_a_chain_of_tensors():
    with measure("cpu") as m:
        a = torch.zeros(KIB)
        b = a.exp()
        del a
        c = torch.cat([b, b])
        del b
    assert levels(m) == [1, 2, 1, 3, 2]
    assert (m.device, m.start_bytes, m.peak_bytes, m.end_bytes) == ("cpu", 0, 3 * 1024, 2 * 1024)
    assert m.reserved_bytes is None
    assert m.end_bytes == live_bytes([c])


def test_what_is_on_the_host_for_values_that_move():
    """The most of it: what was there before, and what comes and goes within the block."""
    with measure("cpu") as m:
        pass
    assert m.host_bytes == m.to_json()["host_bytes"] == held_bytes()
    before = m.host_bytes
    cpu = torch.device("cpu")
    kept = HostPiece(3000, cpu)
    with measure("cpu", timeline=False) as m:
        one = HostPiece(2000, cpu)
        del one
        other = HostPiece(1000, cpu)
    assert m.host_bytes == before + 5000
    del kept, other
    with measure("cpu", timeline=False) as m:
        pass
    assert m.host_bytes == before


def test_views_and_in_place_operations_take_nothing():
    x = torch.zeros(4, KIB)
    with measure("cpu") as m:
        x.add_(x).relu_()
        x.t().view(-1, 2, 2)[0].zero_()
    assert (m.peak_bytes, m.end_bytes, events(m)) == (0, 0, [])


def test_a_number_is_a_small_tensor_for_a_moment():
    x = torch.zeros(KIB)
    with measure("cpu") as m:
        x.add_(1.0)
    assert 0 < m.peak_bytes <= 16
    assert m.end_bytes == 0


def test_storage_that_grows():
    with measure("cpu") as m:
        x = torch.zeros(KIB)
        x.untyped_storage().resize_(3 * 1024)
    assert levels(m) == [1, 4, 3]  # the old contents are copied, so both are there for a moment


@pytest.mark.parametrize(
    ("batch", "inputs", "hidden", "outputs"), [(64, 16, 32, 8), (2, 16, 64, 32), (1, 512, 64, 1)]
)
def test_forward_and_backward_of_a_small_network(batch, inputs, hidden, outputs):
    x, gradient = torch.randn(batch, inputs), torch.ones(batch, outputs)
    w1 = torch.randn(inputs, hidden, requires_grad=True)
    w2 = torch.randn(hidden, outputs, requires_grad=True)

    def step():
        y = (x @ w1).relu() @ w2
        y.backward(gradient)

    with measure("cpu") as m:
        step()
    h, y, grad1, grad2 = 4 * batch * hidden, 4 * batch * outputs, 4 * inputs * hidden, 4 * hidden * outputs
    product = [h]
    relu = [2 * h, h]  # its result is saved for the backward, its input is not
    output = [h + y]
    second = {h + y + h, h + y + grad2}, h + y + h + grad2  # two products, in an order that is autograd's choice
    threshold = [y + 3 * h + grad2]
    bytes_held = [held for _, held in events(m)]
    assert bytes_held[:4] == product + relu + output
    assert bytes_held[4] in second[0]
    assert bytes_held[5] == second[1]
    assert bytes_held[6:7] == threshold
    assert m.peak_bytes == max(2 * h, y + 3 * h + grad2, y + h + grad1 + grad2)
    assert m.end_bytes == grad1 + grad2 == live_bytes([w1.grad, w2.grad])


def test_what_the_timeline_says():
    model = torch.nn.Sequential(*(torch.nn.Linear(50, 50) for _ in range(10)))
    with measure("cpu") as m:
        model(torch.randn(20, 50)).square().sum().backward()
    times = [seconds for seconds, _ in events(m)]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= m.time_s + 1e-3
    assert max(levels(m)) * 1024 == m.peak_bytes == m.timeline.peak_bytes
    assert m.timeline.time >= times[-1]
    assert levels(m)[-1] * 1024 == m.end_bytes == live_bytes(p.grad for p in model.parameters())


def test_thousands_of_events_stay_in_order():
    with measure("cpu") as m:
        for _ in range(10):
            several = [torch.empty(1) for _ in range(1000)]
            del several
    assert [held for _, held in events(m)] == [4 * k for k in [*range(1, 1001), *range(999, -1, -1)]] * 10


def test_older_memory_freed_in_the_block_counts_below_zero():
    old, kept = torch.zeros(4 * KIB), torch.zeros(KIB)
    view = old[:5]
    with measure("cpu") as m:
        new = torch.zeros(KIB)
        del old
        newer = torch.zeros(KIB)
        del view
        kept.zero_()
        last = torch.zeros(2 * KIB)
    assert levels(m) == [1, 2, -2, 0]
    assert (m.peak_bytes, m.end_bytes) == (2 * 1024, 0)
    assert live_bytes([new, newer, last]) == 4 * 1024


def test_gradients_of_the_step_before_count_when_they_go():
    model = torch.nn.Linear(16, 16, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    x = torch.randn(4, 16)
    model(x).sum().backward()
    with measure("cpu") as m:
        optimizer.zero_grad()
        model(x).sum().backward()
    assert levels(m)[0] == -1
    assert m.end_bytes == 0


def test_memory_that_is_not_the_allocators_does_not_count():
    numpy = pytest.importorskip("numpy")
    borrowed = torch.from_numpy(numpy.zeros(1000))
    shared = torch.zeros(1000).share_memory_()
    with measure("cpu") as m:
        del borrowed, shared
    assert events(m) == []


def test_sizes_noted_by_an_earlier_profile_do_not_mislead():
    # The allocator remembers what was allocated under a profiler, not that it was freed outside: with the same
    # address in use again it reports the size from before. About a fifth of these rounds get one.
    for extra in range(100):
        with measure("cpu"):
            noted = torch.empty(1000 + extra % 7)
        del noted
        now = torch.empty(1000 + extra % 5)
        size = live_bytes([now])
        with measure("cpu") as m:
            del now
        assert m.end_bytes == -size


def test_what_one_block_leaves_the_next_can_free():
    with measure("cpu") as first:
        x = torch.zeros(KIB)
    with measure("cpu") as second:
        del x
    assert (first.end_bytes, second.end_bytes) == (1024, -1024)


def test_odd_tensors_nearby_do_no_harm():
    bystanders = [
        torch.eye(3).to_sparse(),
        torch.empty(10, device="meta"),
        torch.empty(0),
        torch.nn.Parameter(torch.zeros(2)),
        torch.zeros(3, requires_grad=True).exp(),
    ]
    with measure("cpu") as m:
        bystanders.clear()
    # The parameter, exp's result and its input; a sparse tensor's storages are out of Python's sight.
    assert m.end_bytes == -4 * (2 + 3 + 3)


def test_autograds_threads_are_included():
    class Deep(torch.autograd.Function):
        """A backward within a backward within …: autograd continues in a thread of its own at some depth."""

        @staticmethod
        def forward(ctx, x, depth):
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            threads.add(threading.get_native_id())
            if ctx.depth:
                with torch.enable_grad():
                    x = torch.zeros(KIB, requires_grad=True)
                    Deep.apply(x, ctx.depth - 1).backward(ones)
                kept.append(x.grad)
            return gradient, None

    threads, kept, ones = set(), [], torch.ones(KIB)
    x = torch.zeros(KIB, requires_grad=True)
    with measure("cpu") as m:
        Deep.apply(x, 100).backward(ones)
    assert len(threads) > 1
    assert len(kept) == 100
    assert m.end_bytes == live_bytes([x.grad, *kept, ones]) - live_bytes([ones])


def test_other_threads_are_not():
    with measure("cpu") as m:
        thread = threading.Thread(target=lambda: torch.zeros(KIB))
        thread.start()
        thread.join()
    assert events(m) == []


def test_an_exception_passes_through_and_leaves_the_figures():
    with pytest.raises(KeyError, match="mine"), measure("cpu") as m:  # noqa: PT012
        x = torch.zeros(KIB)
        raise KeyError("mine")
    assert m.peak_bytes == live_bytes([x])
    assert not torch._C._autograd._profiler_enabled()
    with measure("cpu") as again:
        pass
    assert again.peak_bytes == 0


def test_nesting_is_refused_and_the_outer_block_goes_on():
    with measure("cpu") as outer:
        a = torch.zeros(KIB)
        with pytest.raises(ElbowroomError, match="nested"), measure("cpu"):
            pass
        b = torch.zeros(KIB)
    assert outer.peak_bytes == live_bytes([a, b])


def test_a_running_profiler_is_refused():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        with pytest.raises(ElbowroomError, match="another profiler"), measure("cpu"):
            pass
        torch.zeros(KIB)
    assert any(event.key == "aten::zeros" for event in theirs.key_averages())


def test_a_profiler_that_warms_up_is_refused():
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule) as theirs:
        with pytest.raises(ElbowroomError, match="another profiler"), measure("cpu"):
            pass
        theirs.step()
    with measure("cpu") as m:  # theirs is still there, but over
        pass
    assert m.peak_bytes == 0


def test_a_profiler_in_the_block_is_an_error_not_a_wrong_figure():
    with pytest.raises(ElbowroomError, match="profiler of its own"), measure("cpu"):  # noqa: PT012
        torch.zeros(KIB)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            torch.zeros(KIB)
    with measure("cpu") as m:
        torch.zeros(KIB)
    assert m.peak_bytes == 1024


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_before_and_not_during(enabled):
    class Cycle:
        def __init__(self):
            self.me, self.data = self, torch.zeros(KIB)

    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        Cycle()
        with measure("cpu") as m:
            assert not gc.isenabled()
            Cycle()
        assert gc.isenabled() == enabled
        assert levels(m) == [1]
        with pytest.raises(KeyError), measure("cpu"):
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if before else gc.disable()


def test_no_figures_before_the_end():
    with measure("cpu") as m, pytest.raises(AttributeError, match="peak_bytes: known only once"):
        _ = m.peak_bytes
    with pytest.raises(AttributeError, match="no attribute 'peek'"):
        _ = m.peek


def test_for_machines():
    with measure("cpu") as m:
        x = torch.zeros(KIB)
    report = json.loads(json.dumps(m.to_json(timeline=True)))
    assert report["peak_bytes"] == report["end_bytes"] == live_bytes([x])
    assert report["timeline"] == [[events(m)[0][0], 1024]]
    assert "timeline" not in m.to_json()


def test_for_people():
    with measure("cpu") as m:
        x = torch.zeros(1024 * KIB)
        x = torch.cat([x, x])
        for _ in range(100):
            x.sin_()
    lines = m.picture(width=30, height=4).splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("     3 MiB ┤")
    assert lines[2].endswith("█")
    assert lines[-1].endswith("on cpu, peak 3 MiB, 2 MiB at the end")


def test_without_a_timeline():
    with measure("cpu", timeline=False) as m:
        torch.zeros(KIB)
    assert (m.timeline, m.peak_bytes, m.end_bytes) == (None, 1024, 0)
    with pytest.raises(ElbowroomError, match="no timeline"):
        m.picture()


@pytest.mark.parametrize("device", ["meta", "gpu", "cuda:99", 1.5])
def test_devices_that_cannot_be_measured(device):
    with pytest.raises(InputError, match="device"), measure(device):
        pass


def test_the_device_may_be_left_out():
    with measure() as m:
        pass
    assert m.device == ("cuda:0" if torch.cuda.is_initialized() else "cpu")


def test_live_bytes_counts_storages():
    x = torch.zeros(4, KIB)
    assert live_bytes([x, x[1], x.t(), x.detach()]) == 4 * 1024
    assert live_bytes([x[1], torch.zeros(3), torch.empty(5, device="meta")]) == 4 * 1024 + 12 + 20
    assert live_bytes(torch.zeros(KIB) for _ in range(10)) == 10 * 1024
    assert live_bytes([]) == 0
