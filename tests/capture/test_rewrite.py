"""Each rewrite on a tiny traced graph: what it takes away, what it must leave, and that no bit changes."""

from __future__ import annotations

import copy
import operator

import pytest

torch = pytest.importorskip("torch")

from torch import fx, nn  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from elbowroom.capture import rewrite as rewriting  # noqa: E402
from elbowroom.capture.rewrites.rewrite import PART_COPY, _is_causal, batch_norm_updating, rewrite  # noqa: E402
from elbowroom.measure.memory import measure  # noqa: E402
from elbowroom.step.program import make_program
from elbowroom.step.referee import predict

aten = torch.ops.aten


class Model(nn.Module):
    """A convolution, a norm, and whatever a test does with them."""

    def __init__(self, forward) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)
        self.register_buffer("count", torch.tensor(3))
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


def image():
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(5))


def assert_trains_like_eager(capture, forward, *, training=True):
    """Outputs, gradients and buffers of one step from the same state, with everything saved and with nothing."""
    for again, apart in ((False, True), (True, True), (True, False)):
        torch._dynamo.reset()
        model = Model(forward).train(training)
        plain = copy.deepcopy(model)
        captured = capture(model, image())
        got = captured.train(image(), again=again, copies_parts=apart)
        expected = plain(image())
        parts = expected if isinstance(expected, tuple) else (expected,)
        sum(part.square().sum() for part in parts if part.requires_grad).backward()
        for ours, theirs in zip(got if isinstance(got, tuple) else (got,), parts, strict=True):
            assert torch.equal(ours, theirs)
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad), f"gradient of {name}"
        for (name, ours), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(ours, theirs), name
    return captured


# --- aliases -------------------------------------------------------------------------------------------------


def test_clones_and_detaches_inside_the_model_disappear(capture):
    def forward(model, x):
        y = torch.tanh(model.conv(x)).clone()
        return torch.sin(y) * y.detach() + y.clone()

    captured = assert_trains_like_eager(capture, forward)
    assert not {"aten.clone.default", "aten.detach.default"} & set(captured.targets)


def test_a_clone_that_changes_the_layout_stays(capture):
    def forward(model, x):
        return torch.sin(model.conv(x).transpose(1, 3).contiguous()).view(2, -1)

    captured = assert_trains_like_eager(capture, forward)
    assert captured.targets.count("aten.clone.default") == 1


def test_a_clone_of_a_part_stays(capture):
    """Without it the whole would be kept for the part."""
    captured = assert_trains_like_eager(capture, lambda model, x: torch.sin(model.conv(x)[:1].clone()))
    assert captured.targets.count("aten.clone.default") == 1


@pytest.mark.parametrize("view", [lambda y: y, lambda y: y.view(-1), lambda y: y[:, 1:]])
def test_a_clone_that_is_returned_stays(capture, view):
    """The caller may overwrite what is returned, and has been promised a tensor of its own."""

    def forward(model, x):
        y = torch.tanh(model.conv(x))
        return y, view(y.clone())

    captured = assert_trains_like_eager(capture, forward)
    assert "aten.clone.default" in captured.targets
    first, second = captured.compiled(image())
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_a_clone_of_an_input_or_a_parameter_that_is_returned_stays(capture):
    def forward(model, x):
        return torch.tanh(model.conv(x)), x.clone(), model.conv.bias.clone()

    captured = assert_trains_like_eager(capture, forward)
    example = image()
    _, x, bias = captured.compiled(example)
    assert x.data_ptr() != example.data_ptr()
    bias.detach().zero_()
    assert captured.compiled(example)[2].abs().sum() > 0


def test_what_nobody_reads_is_gone(capture):
    def forward(model, x):
        torch.exp(x).sum()
        return torch.tanh(model.conv(x))

    captured = assert_trains_like_eager(capture, forward)
    assert "aten.exp.default" not in captured.targets
    effects = set(captured.graph.effects)
    body = [*captured.graph.forward, *captured.graph.backward]
    assert all(captured.nodes[op].users for op in body if op not in effects)


# --- the same twice -------------------------------------------------------------------------------------------


def test_what_is_computed_twice_is_computed_once(capture):
    def forward(model, x):
        y = model.conv(x)
        return torch.sin(y).exp() + torch.sin(y).square()

    captured = assert_trains_like_eager(capture, forward)
    assert captured.targets.count("aten.sin.default") == 1


def test_a_cast_for_several_layers_is_made_once(capture):
    def forward(model, x):
        y = model.conv(x)
        parts = [F.linear(y.bfloat16(), model.conv.weight.view(-1, 6)[:6].bfloat16()) for _ in range(3)]
        return sum(part.float() for part in parts)

    captured = assert_trains_like_eager(capture, forward)
    casts = [op for op in captured.graph.ops if op.kind == "forward" and op.target == "aten._to_copy.default"]
    assert len(casts) == 3  # of the image, the weight, and the one product that is left


def test_another_argument_makes_another_value(capture):
    def forward(model, x):
        y = model.conv(x)
        return (
            y * 1
            + (y * 1.5).sum(1, keepdim=True)
            + y.sum(2, keepdim=True)
            + y.sum(2)[..., None, :]
            + y.sum(3)[..., None]
        )

    assert_trains_like_eager(capture, forward)


@pytest.mark.parametrize("view", [lambda y: y, lambda y: y.view(-1)])
def test_equal_values_that_are_returned_stay_apart(capture, view):
    def forward(model, x):
        y = model.conv(x)
        return torch.sin(y), view(torch.sin(y))

    captured = assert_trains_like_eager(capture, forward)
    first, second = captured.compiled(image())
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_what_is_random_is_drawn_each_time(capture):
    def forward(model, x):
        y = model.conv(x)
        return F.dropout(y, 0.5), F.dropout(y, 0.5)

    first, second = capture(Model(forward), image()).train(image())
    assert not torch.equal(first, second)


# --- BatchNorm and counters ----------------------------------------------------------------------------------


def test_batch_norm_updates_its_buffers_in_place_and_once(capture):
    captured = assert_trains_like_eager(capture, lambda model, x: torch.tanh(model.norm(model.conv(x))))
    assert sorted(captured.effects) == ["aten.add_.Tensor", "batch_norm_updating"]
    (norm,) = (node for node in captured.nodes if node.target is batch_norm_updating)
    assert len(norm.meta["val"]) == 3
    assert all(buffer.op == "placeholder" for buffer in norm.args[3:5])


def test_a_batch_norm_used_twice_updates_twice(capture):
    captured = assert_trains_like_eager(
        capture, lambda model, x: torch.tanh(model.norm(torch.sin(model.norm(model.conv(x)))))
    )
    assert captured.effects.count("batch_norm_updating") == 2
    first, second = (node for node in captured.nodes if node.target is batch_norm_updating)
    assert first.args[3:5] == second.args[3:5]


def test_looking_changes_no_buffer(capture):
    def forward(model, x):
        model.count.add_(1)
        return torch.tanh(model.norm(torch.sin(model.norm(model.conv(x)))))

    model = Model(forward)
    before = copy.deepcopy(model.state_dict())
    captured = capture(model, image())
    captured.compiled(image())
    assert len(captured.region.looks.calls) == 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(captured.outputs, model(image()))
    assert model.count == 4


def test_a_forward_without_its_backward_updates_once_as_well(capture):
    model = Model(lambda model, x: torch.tanh(model.norm(model.conv(x))))
    captured = capture(model, image())
    captured.train(image(), again=True)
    captured.compiled(image())
    assert model.norm.num_batches_tracked == 2


def test_batch_norm_in_evaluation_changes_nothing(capture):
    captured = assert_trains_like_eager(
        capture, lambda model, x: torch.tanh(model.norm(model.conv(x))), training=False
    )
    assert captured.effects == []
    (backward,) = (node for node in captured.nodes if node.target is aten.native_batch_norm_backward.default)
    assert all(isinstance(statistic, fx.Node) for statistic in backward.args[3:5])


def test_the_backward_of_batch_norm_in_training_reads_no_running_statistics(capture):
    captured = capture(Model(lambda model, x: torch.tanh(model.norm(model.conv(x)))), image())
    (backward,) = (node for node in captured.nodes if node.target is aten.native_batch_norm_backward.default)
    assert backward.args[3:5] == (None, None)


def test_batch_norm_without_running_statistics(capture):
    def forward(model, x):
        y = model.conv(x)
        return torch.tanh(F.batch_norm(y, None, None, model.norm.weight, model.norm.bias, True))

    assert assert_trains_like_eager(capture, forward).effects == []


def reads_a_copy_from_before(model, x):
    x = model.conv(x)
    before = model.norm.running_mean.clone()
    return model.norm(x) * torch.cos(before).view(1, -1, 1, 1)


def reads_them_before(model, x):
    x = torch.tanh(model.conv(x) * torch.cos(model.norm.running_mean + 1).view(1, -1, 1, 1))
    return torch.tanh(model.norm(x))


def reads_them_after(model, x):
    x = model.norm(model.conv(x))
    return torch.tanh(x * torch.cos(model.norm.running_mean).view(1, -1, 1, 1))


def reads_them_between_two_uses(model, x):
    x = model.norm(model.conv(x))
    x = x * torch.cos(model.norm.running_mean).view(1, -1, 1, 1)
    return model.norm(torch.tanh(x))


def reads_a_copy_from_between_two_uses(model, x):
    x = model.norm(model.conv(x))
    between = model.norm.running_mean.clone()
    return model.norm(torch.tanh(x)) * torch.cos(between).view(1, -1, 1, 1)


def reads_a_view_taken_before(model, x):
    seen = model.norm.running_mean.view(2, 4)
    return torch.tanh(model.norm(model.conv(x))), seen + 1


def reads_a_view_taken_before_two_uses(model, x):
    seen = model.norm.running_mean.view(2, 4)
    return torch.tanh(model.norm(torch.sin(model.norm(model.conv(x))))), seen + 1


def normalizes_with_them_too(model, x):
    x = model.conv(x)
    y = F.batch_norm(x, model.norm.running_mean, model.norm.running_var, training=False)
    return torch.tanh(model.norm(x)) * y


def returns_them(model, x):
    return torch.tanh(model.norm(model.conv(x))), model.norm.running_var.clone()


@pytest.mark.parametrize(
    "forward",
    [
        reads_a_copy_from_before,
        reads_them_before,
        reads_them_after,
        reads_them_between_two_uses,
        reads_a_copy_from_between_two_uses,
        reads_a_view_taken_before,
        reads_a_view_taken_before_two_uses,
        normalizes_with_them_too,
        returns_them,
    ],
)
def test_a_model_that_reads_running_statistics_itself(capture, forward):
    """Whoever reads a buffer sees it as it was at that point, however often and late it is read."""
    assert_trains_like_eager(capture, forward)


def test_a_counter_counts_in_place(capture):
    def forward(model, x):
        model.count.add_(2)
        return torch.tanh(model.conv(x))

    captured = assert_trains_like_eager(capture, forward)
    assert captured.effects == ["aten.add_.Tensor"]
    assert captured.targets.count("aten.add.Tensor") == 0


@pytest.mark.parametrize("before", [False, True])
def test_a_counter_that_the_model_reads_stays_as_it_is(capture, before):
    def forward(model, x):
        seen = model.count.clone()
        model.count.add_(1)
        return torch.tanh(model.conv(x) * (seen if before else model.count))

    assert assert_trains_like_eager(capture, forward).effects == []


def test_a_counter_that_is_returned_stays_as_it_is(capture):
    def forward(model, x):
        model.count.add_(1)
        return torch.tanh(model.conv(x)), model.count.clone()

    assert_trains_like_eager(capture, forward)


def test_a_counter_that_counts_by_a_tensor_stays_as_it_is(capture):
    def forward(model, x):
        model.count.add_(model.norm.num_batches_tracked)
        return torch.tanh(model.conv(x))

    assert assert_trains_like_eager(capture, forward).effects == []


def test_adding_to_an_input_that_is_no_counter_is_not_mistaken_for_one(capture):
    assert assert_trains_like_eager(capture, lambda model, x: (torch.tanh(model.conv(x)), x + 1)).effects == []


# --- causal masks --------------------------------------------------------------------------------------------

SIZE = 6


def triangle():
    return torch.ones(SIZE, SIZE, dtype=torch.bool).tril()


def added():
    return torch.zeros(SIZE, SIZE).masked_fill(~triangle(), float("-inf"))


def positions():
    place = torch.arange(SIZE)
    return (place.unsqueeze(1) >= place)[None, None].expand(2, 3, SIZE, SIZE)


CAUSAL = {
    "a lower triangle": triangle,
    "one to add": added,
    "one to add, with a large finite number": lambda: torch.full((SIZE, SIZE), -1e9).triu(1),
    "positions compared": positions,
    "half precision": lambda: torch.full((SIZE, SIZE), torch.finfo(torch.bfloat16).min).to(torch.bfloat16).triu(1),
}
OTHERS = {
    "an upper triangle": lambda: triangle().t(),
    "without the diagonal": lambda: torch.ones(SIZE, SIZE, dtype=torch.bool).tril(-1),
    "a band": lambda: triangle().triu(-2),
    "everything is seen": lambda: torch.ones(SIZE, SIZE, dtype=torch.bool),
    "not square": lambda: torch.ones(SIZE, SIZE + 1, dtype=torch.bool).tril(),
    "a penalty that hides little": lambda: -torch.ones(SIZE, SIZE).triu(1),
    "a bias with the distance": lambda: added() - torch.arange(SIZE),
    "one row for all": lambda: triangle()[-1:].expand(SIZE, SIZE),
    "one number for all": lambda: torch.ones(1, 1, dtype=torch.bool).expand(SIZE, SIZE),
    "one row of a batch differs": lambda: torch.stack([triangle(), triangle().triu(-1)]),
}


def mask_node(make) -> fx.Node:
    graph = make_fx(make)().graph
    return graph.output_node().args[0]


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_is_recognized(name):
    assert _is_causal(mask_node(CAUSAL[name]))


@pytest.mark.parametrize("name", OTHERS)
def test_another_mask_is_left_alone(name):
    assert not _is_causal(mask_node(OTHERS[name]))


def test_a_mask_that_depends_on_the_batch_is_left_alone():
    graph = make_fx(lambda x: triangle() & (x > 0))(torch.ones(SIZE)).graph
    assert not _is_causal(graph.output_node().args[0])


def test_a_mask_expanded_over_batch_and_heads_is_looked_at_once():
    """It may be one matrix in memory and gigabytes if written out."""
    mask = mask_node(lambda: torch.ones(256, 256, dtype=torch.bool).tril().expand(64, 32, 256, 256))
    with measure("cpu", timeline=False) as measured:
        assert _is_causal(mask)
    assert measured.peak_bytes < 10 * 256 * 256


def attention_graph(make_mask, device: str = "cuda"):
    """Attention and its backward under a mask, written by hand, on a device that need not be there."""
    mask = mask_node(make_mask)
    graph = mask.graph
    (output,) = graph.find_nodes(op="output")
    with FakeTensorMode():
        tensor = torch.empty(2, 3, SIZE, 8, device=device)
        mask.meta["val"] = torch.empty(2, 3, SIZE, SIZE, device=device)
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        q, k, v, arriving = (graph.placeholder(name) for name in ("q", "k", "v", "tangents_1"))
    for node in (q, k, v, arriving):
        node.meta["val"] = tensor
    forward = aten._scaled_dot_product_efficient_attention
    backward = aten._scaled_dot_product_efficient_attention_backward
    with graph.inserting_before(output):
        attention = graph.call_function(forward.default, (q, k, v, mask, True))
        parts = [graph.call_function(operator.getitem, (attention, i)) for i in range(4)]
        wanted = [True, True, True, False]
        rest = (parts[0], parts[1], parts[2], parts[3], 0.0, wanted)
        gradients = graph.call_function(backward.default, (arriving, q, k, v, mask, *rest))
        kept = [graph.call_function(operator.getitem, (gradients, i)) for i in range(3)]
    output.args = ((parts[0], *kept),)
    return graph, attention, gradients


def test_attention_under_a_causal_mask_is_told_so_and_the_mask_goes():
    graph, attention, gradients = attention_graph(triangle)
    rewrite(graph)
    assert attention.args[3] is None
    assert attention.kwargs == {"is_causal": True}
    assert gradients.args[4] is None
    assert gradients.kwargs == {"is_causal": True}
    assert not graph.find_nodes(op="call_function", target=aten.tril.default)


@pytest.mark.parametrize(("mask", "device"), [(OTHERS["a band"], "cuda"), (triangle, "cpu")])
def test_attention_under_another_mask_or_on_the_cpu_keeps_it(mask, device):
    graph, attention, gradients = attention_graph(mask, device)
    rewrite(graph)
    assert isinstance(attention.args[3], fx.Node)
    assert gradients.args[4] is attention.args[3]
    assert not attention.kwargs


# --- parts that outlive the rest -----------------------------------------------------------------------------


def joins(early, layers=6):
    """Concatenates values made early, eight channels each, with what a deep path makes of the first."""

    def forward(model, x):
        start = model.conv(x)
        values = [start, torch.tanh(start), torch.sin(start), torch.cos(start)][:early]
        for _ in range(layers):
            start = torch.tanh(torch.sin(start) * 2 + 1)
        return torch.sin(torch.cat([*values, start], 1))

    return forward


@pytest.fixture
def parts(capture, monkeypatch):
    """Sizes of the slices that are copied, of gradients of any size."""
    monkeypatch.setattr(rewriting, "_LARGE", 1)
    monkeypatch.setattr(rewriting, "_LONG", {False: 20, True: 20})

    def find(forward):
        captured = assert_trains_like_eager(capture, forward)
        return [node.meta["val"].shape[1] for node in captured.nodes if PART_COPY in node.meta]

    return find


@pytest.mark.parametrize("early", [1, 2])
def test_parts_of_a_gradient_that_are_read_long_after_the_rest_are_copied(parts, early):
    assert parts(joins(early)) == [8] * early


@pytest.mark.usefixtures("parts")
def test_a_copy_that_is_not_made_is_a_view(capture):
    """Planned with the copies and doing without them, or planned without: the same memory at the same moments."""
    graph = capture(Model(joins(1)), image()).graph
    for op in graph.ops:
        op.time = 1.0
    shown = graph.with_parts_viewed()
    order = [*graph.forward, *graph.backward]
    without = predict(graph, make_program(graph, order, copies_parts=False))
    assert without == predict(shown, make_program(shown, order))
    copied = predict(graph, make_program(graph, order))
    assert copied.time_s == without.time_s + 1
    assert any(a < b for a, b in zip(copied.backward_bytes, without.backward_bytes, strict=True))


def test_without_parts_to_copy_there_is_one_program(capture):
    """Or it would be compiled twice."""
    graph = capture(Model(joins(1)), image()).graph
    assert not graph.part_copies
    assert make_program(graph, graph.backward, copies_parts=False) == make_program(graph, graph.backward)


def test_parts_that_are_most_of_a_gradient_stay_in_it(parts):
    assert parts(joins(4)) == []


def test_parts_that_are_read_soon_stay_in_it(parts):
    assert parts(joins(1, layers=1)) == []


def test_small_gradients_stay_whole(parts, monkeypatch):
    monkeypatch.setattr(rewriting, "_LARGE", 2**20)
    assert parts(joins(1)) == []
