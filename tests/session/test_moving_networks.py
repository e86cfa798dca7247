"""Real networks whose values go to the host and back: within both budgets, to the byte, and every bit equal, also
where every copy is late."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from test_fit_networks import DIFFERS_FROM_EAGER  # noqa: E402

import elbowroom  # noqa: E402
from delayed import delay_copies  # noqa: E402
from elbowroom.execute.verification import verify_step  # noqa: E402
from elbowroom.measure import host_memory  # noqa: E402
from fitted import host_room, least_budget, step_peak  # noqa: E402
from zoo import ZOO  # noqa: E402

QUICK = "resnet", "gpt2"
AROUND = 8  # bytes of the loss and its gradient, which are around the program
NETWORKS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ZOO]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_whose_values_move(name: str, monkeypatch) -> None:
    torch._dynamo.reset()
    network = ZOO[name]
    model, batch = network.build(), network.batch()
    plain = step_peak(copy.deepcopy(model), batch)
    options = {"offload": "always", "host_budget": "1GiB", "link": "12GB/s", "kernels": "torch"}
    fitted = elbowroom.fit(model, *batch, budget="1TiB", strict=True, **options)
    (entry,) = fitted.elbowroom.entries.values()
    assert not entry.host_bytes, "nothing moves where everything fits"
    resident, least, room = entry.plan.resident_bytes, least_budget(fitted), host_room(fitted)
    held_before = host_memory.held_bytes()
    moves = 0
    for budget in (max(least, resident + int(0.8 * plain)), (least + resident + plain) // 2, least):
        fitted.elbowroom.set_budget(budget)
        moves += len(entry.regions[0].program.moves)
        assert room.bytes == entry.host_bytes == host_memory.held_bytes() - held_before
        for is_late in (False, True):
            with monkeypatch.context() as patch:
                lanes = delay_copies(patch) if is_late else None
                measured = step_peak(fitted, batch)
                assert resident + measured <= budget
                assert 0 <= measured - (entry.plan.peak_bytes - resident) <= AROUND
                against = verify_step(fitted.elbowroom, batch, {}).against
                assert against == ("aot_eager" if name in DIFFERS_FROM_EAGER else "eager")
                if lanes is not None:
                    copies = lanes.to_host.copies + lanes.from_host.copies
                    assert copies == len(entry.regions[0].program.moves)  # half of the moves, and two steps
        assert not room.taken_bytes
        assert room.bytes == host_memory.held_bytes() - held_before
    assert moves
