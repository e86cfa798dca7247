"""Random programs of random models: what is kept, computed again and moved is a matter of chance, and so is when each
copy happens. Outputs, gradients, buffers and random state are those of the program that does nothing of it."""

from __future__ import annotations

from random import Random

import pytest

torch = pytest.importorskip("torch")

from test_random_programs import BATCH, OPERATORS, ROWS, WIDTH, Straight  # noqa: E402

from delayed import delay_copies  # noqa: E402
from elbowroom.execute.region import Build  # noqa: E402
from elbowroom.measure.measured import Measured  # noqa: E402
from elbowroom.problem import Platform  # noqa: E402
from elbowroom.step.program import make_program  # noqa: E402
from elbowroom.step.referee import predict  # noqa: E402
from moving import may_move, moved  # noqa: E402
from stepgraphs import missing  # noqa: E402
from tracing import looked_at  # noqa: E402

PROGRAMS = 20  # of each model
MODELS = [pytest.param(seed, marks=() if seed < 2 else pytest.mark.slow) for seed in range(50)]
LINK = Platform(bandwidth=1e9)


@pytest.mark.parametrize("seed", MODELS)
def test_random_programs_with_late_copies(seed, monkeypatch, fresh):
    chance = Random(seed)
    names = sorted(OPERATORS)
    steps = [(chance.choice(names), chance.randrange(4), chance.randrange(7)) for _ in range(chance.randint(4, 14))]
    model, x = Straight(steps), torch.randn(BATCH, ROWS, WIDTH)
    compiled, region, _ = looked_at(model, x)
    region.looks.calls = None
    graph = region.traced.graph
    plain = make_program(graph, graph.backward)
    wanted = outcome(model, compiled, region, plain, x)
    lanes = delay_copies(monkeypatch, 0.001)
    for _ in range(PROGRAMS):
        program = random_program(graph, chance)
        predict(graph, program, platform=LINK)
        found = outcome(model, compiled, region, program, x)
        assert len(found) == len(wanted)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert not region.looks.host_room.taken_bytes
    assert lanes.to_host.copies == lanes.from_host.copies > PROGRAMS


def outcome(model, compiled, region, program, x):
    """What a step leaves behind, from the same state each time."""
    region.programs.clear()
    region.install(Build(Measured(region.traced), program))
    torch.manual_seed(3)
    model.zero_grad()
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()
    loss = compiled(x)
    loss.backward()
    gradients = [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]
    return [each.clone() for each in (loss.detach(), torch.get_rng_state(), *model.buffers(), *gradients)]


def random_program(graph, chance):
    """Some values are lost on the way and computed again; some of those that are saved move."""
    storable = [op for op in graph.forward if graph.ops[op].storable and op not in graph.kept]
    have = {op for op in graph.forward if op not in storable or chance.random() < 0.7} - unstorable(graph)
    order = []
    for op in graph.backward:
        if chance.random() < 0.1 and storable:
            have.discard(chance.choice(storable))
        again = missing(graph, graph.ops[op].reads, have)
        order += [*again, op]
        have.update(again)
        have -= unstorable(graph)
    program = make_program(graph, order)
    values = may_move(graph, program)
    for value in chance.sample(values, min(len(values), chance.randint(1, 6))):
        program = moved(graph, program, value, chance.randint)
    return program


def unstorable(graph):
    return {op for op in graph.forward if not graph.ops[op].storable}
