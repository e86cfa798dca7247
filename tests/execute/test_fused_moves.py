"""Fused programs whose values move: the same gradients, the planned places and bytes, however long copies take."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

import elbowroom  # noqa: E402
from delayed import delay_copies  # noqa: E402
from elbowroom.errors import ElbowroomError  # noqa: E402
from elbowroom.execute.fused import Fused  # noqa: E402
from elbowroom.execute.fused_graphs import backward_graph, forward_graph  # noqa: E402
from elbowroom.execute.to_host import traced_moves  # noqa: E402
from elbowroom.plan.values.moves import carriers, needs, tight  # noqa: E402
from elbowroom.step.operations import Offload, Prefetch  # noqa: E402
from elbowroom.step.program import make_program  # noqa: E402
from fitted import host_room, step_peak  # noqa: E402
from fusible import cnn, gradients, needs_compiler, transformer  # noqa: E402
from steps import zero  # noqa: E402
from trained import only_entry  # noqa: E402

pytestmark = [pytest.mark.usefixtures("fresh"), needs_compiler]

MODELS = {"transformer": transformer, "cnn": cnn}


def fitted(name: str, share: float, offload: str):
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    plain = elbowroom.plan(copy.deepcopy(model), *batch, budget="1GiB", kernels="inductor", times="estimate")
    budget = plain.resident_bytes + int(share * (plain.peak_bytes - plain.resident_bytes))
    made = elbowroom.fit(
        model, *batch, budget=budget, kernels="inductor", offload=offload, times="estimate", compilations=2
    )
    return made, batch


def trained(model, batch):
    found = []
    for step in range(2):
        torch.manual_seed(step)
        zero(model)
        loss = model(*batch)
        loss.backward()
        found.append((loss.detach(), gradients(model)))
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "transformer" else name for name in MODELS]
)
def test_values_move_within_the_budget_and_gradients_stay(name, monkeypatch):
    delay_copies(monkeypatch)
    still, batch = fitted(name, 1.0, "never")
    expected = trained(still, batch)
    torch._dynamo.reset()
    moving, batch = fitted(name, 0.6, "always")
    entry = only_entry(moving)
    assert entry.instead is None
    moved = [each for each in entry.regions[0].program.moves if isinstance(each, Offload)]
    assert moved
    assert entry.host_bytes == host_room(moving).bytes > 0
    assert entry.plan.resident_bytes + step_peak(moving, batch) <= entry.plan.budget_bytes
    for (loss, found), (known_loss, known) in zip(trained(moving, batch), expected, strict=True):
        torch.testing.assert_close(loss, known_loss)
        for ours, theirs in zip(found, known, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not host_room(moving).taken_bytes


def test_all_that_is_saved_can_move_in_either_layout():
    from captured import traced

    _, measured = traced("vgg", fused=True)
    captured, graph = measured.captured, measured.captured.graph
    program = make_program(graph, graph.backward)
    moving = tight(graph, program, needs(graph, program, carriers(graph).values()))
    assert moving.moves
    for channels_last in (False, True):
        saved = [i for i in moving.saved if i not in graph.inputs]
        forward = forward_graph(captured, moving, saved, channels_last)
        backward, _ = backward_graph(captured, moving, (), "return", channels_last)
        away = forward.find_nodes(op="call_function", target=traced_moves.offload)
        back = backward.find_nodes(op="call_function", target=traced_moves.prefetch)
        assert [node.args[2] for node in away] == [m.value for m in moving.forward if isinstance(m, Offload)]
        assert [node.args[1] for node in back] == [m.value for m in moving.backward if isinstance(m, Prefetch)]
        for node in away:
            value = captured.nodes[node.args[2]].meta["val"]
            assert sorted(node.args[3]) == sorted(torch.empty(value.shape).stride()) or channels_last
        compiled = Fused(captured, moving, channels_last)
        assert "elbowroom.offload" in compiled.source("return")


def test_moves_without_memory_on_the_host_are_refused():
    with pytest.raises(ElbowroomError, match="nobody has given it memory on the host"):
        traced_moves.release(torch.zeros(1), torch.zeros(1), 3)
