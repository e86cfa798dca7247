"""Parts of the host's memory, and the order of what is asked of a GPU's streams."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

from elbowroom.execute.to_host import host_room, lanes  # noqa: E402
from elbowroom.execute.to_host.host_room import HostRoom  # noqa: E402
from elbowroom.execute.to_host.lanes import OnStream, lanes_of  # noqa: E402
from elbowroom.measure import host_memory  # noqa: E402
from elbowroom.step.slab import Slab  # noqa: E402

CPU = torch.device("cpu")


def slab(size: int) -> Slab:
    return Slab({0: (0, size)}, size)


def start_of(room: HostRoom, lease) -> int:
    return lease.memory.data_ptr() - room._piece.memory.data_ptr()


def test_parts_of_one_piece_do_not_overlap_and_gaps_are_filled():
    room, held = HostRoom(), host_memory.held_bytes()
    room.reserve(100, CPU)
    first, second, third = room.lease(slab(40), CPU), room.lease(slab(30), CPU), room.lease(slab(30), CPU)
    assert [start_of(room, each) for each in (first, second, third)] == [0, 40, 70]
    assert room.taken_bytes == 100
    del second
    assert room.taken_bytes == 70
    again = room.lease(slab(20), CPU)
    assert start_of(room, again) == 40
    assert host_memory.held_bytes() == held + 100
    further = room.lease(slab(20), CPU)
    assert host_memory.held_bytes() == held + 120
    further.memory.fill_(1)
    del further
    assert host_memory.held_bytes() == held + 100
    del first, third, again
    assert not room.taken_bytes


def test_memory_that_no_plan_wants_goes_with_the_last_part():
    room, held = HostRoom(), host_memory.held_bytes()
    room.reserve(100, CPU)
    first, second = room.lease(slab(40), CPU), room.lease(slab(40), CPU)
    room.reserve(0, CPU)
    del first
    assert host_memory.held_bytes() == held + 100
    del second
    assert host_memory.held_bytes() == held
    assert not room.bytes


def test_a_lease_outlives_its_room():
    room, held = HostRoom(), host_memory.held_bytes()
    room.reserve(100, CPU)
    lease = room.lease(slab(100), CPU)
    del room
    gc.collect()
    assert host_memory.held_bytes() == held + 100
    lease.memory.fill_(1)
    del lease
    assert host_memory.held_bytes() == held


def test_what_somebody_records_keeps_its_part(monkeypatch):
    room = HostRoom()
    room.reserve(100, CPU)
    with monkeypatch.context() as patch:
        patch.setattr(host_room, "is_recorded", lambda device: True)
        recorded = room.lease(slab(60), CPU)
    place = start_of(room, recorded)
    del recorded
    gc.collect()
    assert room.taken_bytes == 60
    assert start_of(room, room.lease(slab(40), CPU)) != place


def test_a_device_has_one_pair_of_lanes():
    assert lanes_of(CPU) is lanes_of(torch.device("cpu"))


# --- streams, without a GPU ------------------------------------------------------------------------------------


class FakeStream:
    """Writes down what is asked of it."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def wait_stream(self, other) -> None:
        self.said.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.said.append(f"mark on {self.name}")
        return f"mark of {self.name}"

    def wait_event(self, event: str) -> None:
        self.said.append(f"{self.name} waits for the {event}")


class FakeTensor:
    def __init__(self, said: list[str]) -> None:
        self.said = said

    def copy_(self, source, *, non_blocking: bool) -> None:
        assert non_blocking
        self.said.append("copy")


def test_a_copy_waits_for_computing_and_computing_for_its_mark(monkeypatch):
    said: list[str] = []
    current = [FakeStream("computing", said)]
    names = iter(("out", "back"))

    @contextmanager
    def on(stream):
        said.append(f"on {stream.name}")
        yield
        said.append("as before")

    monkeypatch.setattr(lanes.torch.cuda, "Stream", lambda device: FakeStream(next(names), said))
    monkeypatch.setattr(lanes.torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(lanes.torch.cuda, "stream", on)
    device = torch.device("cuda", 0)
    out, back = OnStream(device), OnStream(device)
    wait = out.copy(FakeTensor(said), FakeTensor(said))
    assert said == ["out waits for computing", "on out", "copy", "as before", "mark on out"]
    said.clear()
    current[0] = FakeStream("backward", said)  # whoever computes when it is needed
    wait()
    wait()
    assert said == 2 * ["backward waits for the mark of out"]
    said.clear()
    out.follow(back)
    back.finish()
    assert said == ["out waits for back", "backward waits for back"]
