"""What goes wrong around values that move: one sentence with the remedy, memory given back on both sides, and the
next step as if nothing had happened."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")

from test_moving_training import MOVING, ROWS, WIDTH, Net, Pair, plain_step  # noqa: E402
from torch import nn  # noqa: E402

import elbowroom  # noqa: E402
from delayed import delay_copies  # noqa: E402
from elbowroom.errors import BudgetTooSmall, CopyFailed, HostMemoryRefused  # noqa: E402
from elbowroom.measure import host_memory  # noqa: E402
from elbowroom.measure.memory import measure  # noqa: E402
from fitted import host_room, least_budget, set_gradients  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


class Refusing:
    """PyTorch as `host_memory.py` sees it, with at most so many bytes to give at once."""

    def __init__(self, most: int) -> None:
        self.most = most

    def __getattr__(self, name):
        return getattr(torch, name)

    def zeros(self, size, **options):
        raise RuntimeError("CUDA error: the one that pinning has left")

    def empty(self, size, **options):
        if size > self.most:
            raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {size} bytes")
        return torch.empty(size, **options)


@pytest.fixture
def lanes(monkeypatch):
    return delay_copies(monkeypatch, 0.001)


@pytest.fixture
def pair(lanes):
    return Pair()


def in_use() -> int:
    """Bytes of tensors that Python can find."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def assert_unharmed(pair) -> None:
    assert not pair.room.taken_bytes
    assert host_memory.held_bytes() == pair.held
    pair.both(plain_step)
    assert not pair.room.taken_bytes


@pytest.fixture
def settled(pair):
    """A pair that has trained: gradients and what is made once are there."""
    pair.both(plain_step)
    pair.held = host_memory.held_bytes()
    return pair


# --- host memory -----------------------------------------------------------------------------------------------


def test_memory_that_is_refused_when_a_model_is_fitted(lanes, monkeypatch):
    least, held = Pair().session.options.budget, host_memory.held_bytes()
    torch.manual_seed(0)
    model, x = Net(), torch.randn(ROWS, WIDTH)
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "torch", Refusing(100))
        with pytest.raises(HostMemoryRefused) as refusal:
            elbowroom.fit(model, x, budget=least, **MOVING)
    said = str(refusal.value)
    assert "of host memory for values that move (DefaultCPUAllocator" in said
    assert 'pass a smaller host_budget=…, or offload="never"' in said
    assert "\n" not in said
    assert host_memory.held_bytes() <= held
    fitted = elbowroom.fit(model, x, budget=least, **MOVING)
    plain_step(fitted, x)


def test_a_budget_whose_host_memory_is_refused_changes_nothing(settled, monkeypatch):
    least = settled.session.options.budget
    settled.session.set_budget("1GiB")
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "torch", Refusing(100))
        with pytest.raises(HostMemoryRefused):
            settled.session.set_budget(least)
        assert settled.session.options.budget_bytes == 2**30
        assert not settled.program.moves
        settled.both(plain_step)
    settled.session.set_budget(least)
    assert settled.program.moves
    assert_unharmed(settled)


def test_a_shape_whose_host_memory_is_refused_leaves_the_others(settled, monkeypatch):
    small, large = settled.x, torch.randn(ROWS + 8, WIDTH)
    with pytest.raises(BudgetTooSmall) as refusal:
        settled.fitted(large)
    settled.session.set_budget(refusal.value.least_budget)
    size = settled.room.bytes
    assert size
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "torch", Refusing(size))
        settled.both(plain_step)
        for _ in range(2):
            with pytest.raises(HostMemoryRefused):
                settled.fitted(large)
            assert settled.room.bytes == size
            settled.both(plain_step)
    settled.x = large
    settled.both(plain_step)
    settled.x = small
    settled.both(plain_step)


def test_further_memory_that_is_refused_in_a_step(settled, monkeypatch):
    """More forwards are under way than were planned: the second is refused before it begins."""
    outputs = settled.fitted(settled.x)
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "torch", Refusing(100))
        with pytest.raises(HostMemoryRefused):
            settled.fitted(settled.x)
    sum(each.sum() for each in outputs).backward()
    del outputs
    for buffer, plain in zip(settled.fitted.buffers(), settled.plain.buffers(), strict=True):
        buffer.copy_(plain)
    assert_unharmed(settled)


class FakeCudart:
    def __init__(self, failure: int) -> None:
        self.failure, self.pinned = failure, []

    def cudaHostRegister(self, pointer, size, flags):
        if not self.failure:
            self.pinned.append(pointer)
        return self.failure

    def cudaHostUnregister(self, pointer):
        self.pinned.remove(pointer)
        return 0


@pytest.mark.parametrize("failure", [0, 2])
def test_memory_that_cannot_be_pinned(failure, monkeypatch):
    cudart, device = FakeCudart(failure), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    held = host_memory.held_bytes()
    if failure:
        monkeypatch.setattr(host_memory, "torch", Refusing(1000))
        with pytest.raises(HostMemoryRefused, match=r"1000 B .*pinning it failed with CUDA's error 2.*host_budget"):
            host_memory.HostPiece(1000, device)
        assert not cudart.pinned
    else:
        piece = host_memory.HostPiece(1000, device)
        assert cudart.pinned == [piece.memory.data_ptr()]
        assert host_memory.held_bytes() == held + 1000
        memory = piece.memory
        del piece
        assert not cudart.pinned
        memory.zero_()
    assert host_memory.held_bytes() == held


@pytest.mark.parametrize("host_budget", [0, 1, 100])
def test_a_host_budget_in_which_nothing_fits(host_budget):
    """The plan does without moves, and a refusal names the other remedy."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(ROWS, WIDTH)
    held = host_memory.held_bytes()
    fitted = elbowroom.fit(model, x, budget="1GiB", **{**MOVING, "host_budget": host_budget})
    least = least_budget(fitted)
    assert least > Pair().session.options.budget
    fitted.elbowroom.set_budget(least)
    (entry,) = fitted.elbowroom.entries.values()
    assert entry.host_bytes <= host_budget
    assert host_memory.held_bytes() <= held + host_budget + Pair().room.bytes
    plain_step(fitted, x)
    with pytest.raises(BudgetTooSmall, match="or pass a larger host_budget=…"):
        fitted.elbowroom.set_budget(1024)
    with pytest.raises(BudgetTooSmall) as refusal:
        Pair(budget=1024)
    assert "host_budget" not in str(refusal.value)


# --- copies that fail ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["to_host", "from_host"])
@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_copy_that_fails(settled, lanes, direction, which):
    lane, count = getattr(lanes, direction), len(settled.program.moves) // 4
    before = in_use()
    lane.fails_at = lane.copies + which % count
    buffers = [buffer.clone() for buffer in settled.fitted.buffers()]
    with pytest.raises(CopyFailed) as failure:
        plain_step(settled.fitted, settled.x)
    assert str(failure.value) == (
        "a copy between the device and the host failed (an error of the link), and with it this step; run it again, "
        'or pass offload="never"'
    )
    assert not settled.room.taken_bytes
    del failure
    set_gradients(settled.fitted, there=False)
    set_gradients(settled.plain, there=False)
    assert in_use() <= before
    for buffer, kept in zip(settled.fitted.buffers(), buffers, strict=True):
        buffer.copy_(kept)
    assert_unharmed(settled)


# --- errors of others ------------------------------------------------------------------------------------------


def test_a_loss_that_raises(settled):
    def fail(model, x):
        outputs = model(x)
        raise ZeroDivisionError(len(outputs))

    for model in (settled.plain, settled.fitted):
        torch.manual_seed(1)
        with pytest.raises(ZeroDivisionError):
            fail(model, settled.x)
    assert_unharmed(settled)


def test_a_hook_that_raises_in_the_backward(settled):
    def fail(model, x):
        outputs = model(x)
        outputs[0].register_hook(lambda gradient: 1 / 0)
        sum(each.sum() for each in outputs).backward()

    for model in (settled.plain, settled.fitted):
        torch.manual_seed(1)
        with pytest.raises(ZeroDivisionError):
            fail(model, settled.x)
        assert not settled.room.taken_bytes
    assert_unharmed(settled)


class Checked(nn.Module):
    """Raises where a number in the batch says so, in a program that has moved values by then."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))

    def forward(self, x, limit):
        for layer in self.layers:
            x = layer(x)
        torch._assert_async((x < limit).all(), "too large")
        return x.square().mean()


def test_an_error_inside_of_the_forward(lanes):
    torch.manual_seed(0)
    model, x, limit = Checked(), torch.randn(ROWS, WIDTH), torch.tensor(1e9)
    fitted = elbowroom.fit(model, x, limit, budget="1GiB", **MOVING)
    fitted.elbowroom.set_budget(least_budget(fitted))
    room, held = host_room(fitted), host_memory.held_bytes()

    def step():
        set_gradients(fitted, there=False)
        with measure("cpu", timeline=False) as measured:
            fitted(x, limit).backward()
        return [p.grad.clone() for p in fitted.parameters()], measured.peak_bytes

    step()
    gradients, peak = step()
    kept = []
    for _ in range(3):
        with pytest.raises(AssertionError, match="too large") as failure:
            fitted(x, torch.tensor(-1e9))
        kept.append(failure.value)  # whoever looks at it holds no values, and no part of the host's memory
        assert not room.taken_bytes
        assert host_memory.held_bytes() == held
    found, found_peak = step()
    assert found_peak == peak
    assert all(torch.equal(one, other) for one, other in zip(found, gradients, strict=True))
