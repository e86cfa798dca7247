"""Programs as Python source: what they compute when run by themselves, and how the source reads."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from elbowroom.execute.emitter import copied_gradients, emit, emit_outputs_only  # noqa: E402
from elbowroom.step.operations import Await, Offload, Prefetch, Release  # noqa: E402
from elbowroom.step.program import forward_only, make_program  # noqa: E402
from tracing import looked_at  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


class Drops(nn.Module):
    """Dropout between layers, an in-place ReLU, a batch norm; two results."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.4)
        return F.relu_(self.norm(x)), x.sum()


class Subject:
    """A model that was looked at, its inputs in the order of the graph, and what plain execution makes of them."""

    def __init__(self, model: nn.Module, *example: torch.Tensor) -> None:
        self.model = model
        self.plain, self.example = copy.deepcopy(model), example
        _, region, _ = looked_at(model, *example)
        self.captured, self.graph = region.traced, region.traced.graph
        self.inputs = [given() for given in region.example]

    def plainly(self):
        """Results, the gradients of parameters, and the random state afterwards."""
        torch.manual_seed(5)
        results = self.plain(*self.example)
        results = results if isinstance(results, tuple) else (results,)
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])
        return (
            [result.detach() for result in results],
            [p.grad for p in self.plain.parameters()],
            torch.get_rng_state(),
        )

    def emitted(self, order):
        """The same by a program that runs so much in its backward."""
        made = emit(self.captured, make_program(self.graph, order))
        torch.manual_seed(5)
        arguments = list(self.inputs)
        outputs = made.forward(arguments)
        assert arguments == []
        count = len(self.captured.forward_outputs)
        handed = outputs[count:]
        arriving = [torch.ones(self.captured.nodes[i].meta["val"].shape) for i in self.graph.arriving]
        gradients = made.backward(given := [*handed, *arriving])
        assert given == []
        places = {self.inputs[n].data_ptr(): n for n in self.graph.parameters}
        found = [gradients[places[p.data_ptr()]] for p in self.model.parameters()]
        updates = [i is not None for i in self.captured.overwrites]
        results = [value for value, is_update in zip(outputs[:count], updates, strict=True) if not is_update]
        return results, found, torch.get_rng_state(), made.source


def orders(graph):
    """Backwards that rerun nothing, everything once, and what they need again before each half."""
    half = len(graph.backward) // 2
    twice = [*graph.forward, *graph.backward[:half], *graph.forward, *graph.backward[half:]]
    return {"nothing": graph.backward, "everything": [*graph.forward, *graph.backward], "twice": twice}


@pytest.mark.parametrize("again", ["nothing", "everything", "twice"])
def test_a_program_with_dropout_draws_the_same_numbers_again(again):
    subject = Subject(Drops(), torch.randn(16, 8))
    expected, expected_gradients, state = subject.plainly()
    order = orders(subject.graph)[again]
    results, gradients, state_after, source = subject.emitted(order)
    for found, wanted in zip((*results, *gradients), (*expected, *expected_gradients), strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(state_after, state)
    for (name, ours), theirs in zip(subject.model.named_buffers(), subject.plain.buffers(), strict=True):
        assert torch.equal(ours, theirs), name  # updated once, however often it runs
    dropouts = sum(subject.graph.ops[op].random for op in subject.graph.forward)
    assert dropouts == 4
    draws = make_program(subject.graph, order).reruns
    again_drawn = sum(times for op, times in draws.items() if subject.graph.ops[op].random)
    assert source.count(" = private_draws.draw_again(state_") == again_drawn
    assert (
        again_drawn in {"nothing": [0], "everything": [dropouts], "twice": range(dropouts + 1, 2 * dropouts)}[again]
    )
    assert source.count(" = private_draws.draw(drop_out, ") == (dropouts if again_drawn else 0)


def test_every_operation_is_a_line_that_lets_go_of_what_nobody_reads_afterwards():
    subject = Subject(Drops(), torch.randn(16, 8))
    program = make_program(subject.graph, orders(subject.graph)["twice"])
    names = [op.name for op in subject.graph.ops]
    source = emit(subject.captured, program).source
    forward, backward = source.split("\n\ndef backward")
    for text, operations in ((forward, program.forward), (backward, program.backward)):
        lines = [line.strip() for line in text.splitlines()]
        calls = [line for line in lines if " = " in line and not line.startswith(("#", "accumulate,"))]
        calls = [line for line in calls if "arguments" not in line]
        assert len(calls) == len(operations)
        for line, run in zip(calls, operations, strict=True):
            assert line.startswith((f"{names[run.op]} = ", f"{names[run.op]}, state_{names[run.op]} = "))
            freed = line.rpartition("; ")[2].removesuffix(" = None").split(" = ") if run.frees else []
            assert freed == [names[value] for value in run.frees]
            assert ("out=" in line or "grad_input=" in line) == (run.reuses is not None)


def test_comments_name_the_users_modules():
    subject = Subject(Drops(), torch.randn(16, 8))
    source = emit(subject.captured, make_program(subject.graph, orders(subject.graph)["everything"])).source
    for module in ("layers.0", "norm", "layers.1 again"):
        assert f"    # {module}\n" in source
    assert "layers.3 again" not in source.split("\n\ndef backward")[0]


class Counts(nn.Module):
    """Overwrites a buffer that must be read as it was before, should the forward run again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x):
        y = torch.tanh(self.layer(x)) * (1 + self.scale)
        self.scale.mul_(0.5)
        return y


def test_an_input_that_the_step_overwrites_is_saved_as_a_copy():
    subject = Subject(Counts(), torch.randn(16, 8))
    expected, expected_gradients, _ = subject.plainly()
    results, gradients, _, source = subject.emitted(orders(subject.graph)["everything"])
    for found, wanted in zip((*results, *gradients), (*expected, *expected_gradients), strict=True):
        assert torch.equal(found, wanted)
    (returned,) = (line for line in source.split("\n\ndef backward")[0].splitlines() if "return [" in line)
    assert returned.count(".clone()") == 1


def test_a_look_changes_no_input():
    subject = Subject(Counts(), torch.randn(16, 8))
    look = emit_outputs_only(subject.captured, forward_only(subject.graph))
    before = [value.clone() for value in subject.inputs]
    outputs = look(list(subject.inputs))
    assert all(torch.equal(value, kept) for value, kept in zip(subject.inputs, before, strict=True))
    expected, _, _ = subject.plainly()
    assert any(torch.equal(output, expected[0]) for output in outputs)


def test_every_move_is_a_line_that_names_the_value():
    subject = Subject(Drops(), torch.randn(16, 8))
    program = make_program(subject.graph, subject.graph.backward)
    value = next(op for op in program.saved if op in subject.graph.forward)
    name = subject.graph.ops[value].name
    away, back = (Offload(value), Release(value)), (Prefetch(value), Await(value))
    moved = replace(program, forward=(*program.forward, *away), backward=(*back, *program.backward))
    source = emit(subject.captured, replace(moved, saved=tuple(op for op in program.saved if op != value))).source
    forward, backward = source.split("\n\ndef backward")
    assert f"    host.offload({value}, {name})\n    host.release({value}); {name} = None\n    return" in forward
    assert f"    {name} = host.prefetch({value})\n    host.arrive({value})\n" in backward
    assert forward.splitlines()[1].endswith("host, = arguments")
    assert backward.splitlines()[1].endswith("host, = arguments")
    assert "host" not in emit(subject.captured, program).source


class Shares(nn.Module):
    """Two parameters have one gradient, a third gets the one that arrives, a fourth one that is made for it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = (nn.Parameter(torch.randn(8, 16)) for _ in range(3))
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        return ((self.one + self.two) * (x @ self.weight)).sin() + self.last


def test_gradients_that_cannot_become_grad_themselves_are_copied():
    subject = Subject(Shares(), torch.randn(8, 16))
    number = {value.data_ptr(): n for n, value in enumerate(subject.inputs)}
    copied = {
        name
        for name, p in subject.model.named_parameters()
        if number[p.data_ptr()] in copied_gradients(subject.captured)
    }
    assert copied == {"one", "two", "last"}
    source = emit(subject.captured, make_program(subject.graph, subject.graph.backward)).source
    assert source.count("accumulate_copy(") == 2  # what arrives is returned as it is
    assert source.count("accumulate(") == 1
