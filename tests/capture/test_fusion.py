"""A step's graph as a fusing compiler runs it: stored values only, and the cone of operators that computes each."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from elbowroom.capture.operators import draws, is_fusible, is_reduction  # noqa: E402
from elbowroom.capture.rewrites import rewrite  # noqa: E402
from elbowroom.plan.planner import Planner  # noqa: E402
from elbowroom.step.referee import Surroundings  # noqa: E402
from tracing import looked_at  # noqa: E402

HEAVY = ("mm.", "convolution", "attention")


class Perceptron(nn.Module):
    """Pointwise chains between matrix products."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(torch.sin(layer(x)) * 2 + 1)
        return x


class Joins(nn.Module):
    """What the first product makes, beside what the others make of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(16, 8)
        self.between = Perceptron(6)

    def forward(self, x):
        start = self.first(x)
        return self.last(torch.cat([start, self.between(start)], 1))


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = x + F.dropout(torch.tanh(layer(x)), 0.3)
        return x.square().mean()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))

    def forward(self, x):
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.relu(norm(convolution(x))) + x
        return x.mean((2, 3))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.mix(self.norm(x)).view(2, 5, 3, 8).permute(2, 0, 1, 3).unsqueeze(2)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(0))


class Frozen(nn.Module):
    """A product with fixed weights: the backward reads what it reads inside pointwise kernels only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("fixed", torch.randn(8, 8))

    def forward(self, x):
        for layer in self.layers:
            h = layer(x)
            x = torch.tanh(h) @ self.fixed + torch.sin(h)
        return x


class Forgets(nn.Module):
    """Attention whose weights are dropped: on the CPU it is written out. To be traced in mixed precision."""

    mixed = True

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = (part(x).view(2, 16, 2, 4).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return self.out(y.transpose(1, 2).reshape(2, 16, 8)).float()


MODELS: dict[str, Any] = {
    "perceptron": lambda: (Perceptron(), torch.randn(6, 8)),
    "dropout": lambda: (Drops(), torch.randn(64, 16)),
    "images": lambda: (Images(), torch.randn(2, 4, 6, 6)),
    "attention": lambda: (Attends(), torch.randn(2, 5, 8)),
    "frozen weights": lambda: (Frozen(), torch.randn(6, 8)),
    "attention with dropout": lambda: (Forgets(), torch.randn(2, 16, 8)),
}


def look(model, *example):
    """The contracted graph of a model. Nothing is compiled for it."""
    with torch.autocast("cpu", torch.bfloat16, enabled=getattr(model, "mixed", False)):
        _, region, _ = looked_at(model, *example, fused=True)
    return region.traced


@pytest.fixture(scope="module", params=list(MODELS))
def captured(request):
    torch.manual_seed(0)
    return look(*MODELS[request.param]())


def inputs_of(captured):
    """A value for every input and arriving gradient, by node."""
    torch.manual_seed(1)
    nodes = [captured.nodes[i] for i in (*captured.graph.inputs, *captured.graph.arriving)]
    return {node: made(node.meta["val"]) for node in nodes}


def made(value):
    return torch.rand(value.shape) if value.is_floating_point() else torch.ones(value.shape, dtype=value.dtype)


def played(values, nodes):
    """Run nodes in order, reading what earlier ones left; returns all values.

    Compiled, random values follow from their seeds; run by themselves, they would be drawn from the stream.
    """
    env = dict(values)
    for node in nodes:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        with torch.random.fork_rng(enabled=node.target is torch.ops.prims.inductor_random.default):
            if node.target is torch.ops.prims.inductor_random.default:
                torch.manual_seed(int(args[1]))
            env[node] = node.target(*args, **kwargs)
    return env


def read_by_the_backward(captured):
    return {captured.nodes[read] for i in captured.graph.backward for read in captured.graph.ops[i].reads}


def test_what_an_operator_reads_is_stored_or_an_input(captured):
    graph = captured.graph
    assert [op.index for op in graph.ops] == list(range(len(graph.ops)))
    stored = {captured.nodes[i] for i in (*graph.inputs, *graph.arriving, *graph.forward, *graph.backward)}
    for op, cone in zip(graph.ops, captured.cones, strict=True):
        assert all(read < op.index for read in op.reads)
        outside = {read for node in cone for read in node.all_input_nodes} - set(cone)
        constants = {node for node in outside if node.op == "get_attr"}
        assert outside - constants == {captured.nodes[read] for read in op.reads}
        assert outside - constants <= stored
        again = set(cone[:-1]) & stored  # what a cone computes on its way is not stored, or only for the forward
        assert op.kind == "backward" or not again
        assert not again & read_by_the_backward(captured)


def test_only_inputs_have_no_cone_and_a_cone_ends_with_its_operator(captured):
    for op, node, cone in zip(captured.graph.ops, captured.nodes, captured.cones, strict=True):
        if op.kind in ("input", "gradient"):
            assert cone == ()
        else:
            assert cone[-1] is node


def test_cones_in_order_compute_what_the_graph_computes(captured):
    whole = captured.unfused
    order = [whole.nodes[i] for i in (*whole.graph.forward, *whole.graph.backward)]
    # Seeds are drawn, not computed: both get the same. Updates overwrite inputs: each gets inputs of its own.
    torch.manual_seed(2)
    expected = played(inputs_of(whole), order)
    drawn = {node: expected[node] for i in captured.graph.kept if (node := captured.nodes[i])}
    found = inputs_of(captured)
    for i in (*captured.graph.forward, *captured.graph.backward):
        if captured.nodes[i] in drawn:
            found[captured.nodes[i]] = drawn[captured.nodes[i]]
        else:  # a cone sees stored values alone, and leaves one
            found[captured.nodes[i]] = played(found, captured.cones[i])[captured.nodes[i]]
    pairs = zip(
        (*whole.forward_outputs, *whole.backward_outputs),
        (*captured.forward_outputs, *captured.backward_outputs),
        strict=True,
    )
    returned = [(whole.nodes[a], captured.nodes[b]) for a, b in pairs if a is not None]
    assert len(returned) > 2
    for theirs, ours in returned:
        assert theirs is ours
        assert torch.equal(found[ours], expected[theirs])
    for i in captured.graph.overwritten:
        assert torch.equal(found[captured.nodes[i]], expected[captured.nodes[i]])


def test_heavy_operators_and_what_they_read_are_stored(captured):
    heavy = [op for op in captured.unfused.graph.ops if any(word in op.target for word in HEAVY)]
    assert heavy
    for op in heavy:
        assert captured.unfused.nodes[op.index] in captured.nodes
        if "convolution_backward" not in op.target:
            assert_stored(captured, (op.index, *op.reads))


def test_what_a_convolutions_backward_reads_is_stored():
    captured = look(Images(), torch.randn(2, 4, 6, 6))
    for op in captured.unfused.graph.ops:
        if "convolution_backward" in op.target:
            assert_stored(captured, op.reads)


def assert_stored(captured, values) -> None:
    shown = {storage for op in captured.graph.ops for storage in captured.graph.storages(op.index)}
    whole = captured.unfused
    for i in values:
        assert whole.nodes[i].op == "get_attr" or set(whole.graph.storages(i)) <= shown


def test_only_some_pointwise_values_are_stored(captured):
    """Those that a heavy operator reads, that leave the graph, or that are dear to compute again."""
    before = sum(is_fusible(node) for node in captured.unfused.nodes)
    after = sum(is_fusible(node) and not is_reduction(node) for node in captured.nodes)
    assert after < before / 2


def test_a_pointwise_chain_between_products_is_one_operator():
    captured = look(Perceptron(), torch.randn(6, 8))
    forward = [captured.graph.ops[i].target for i in captured.graph.forward]
    assert forward == ["aten.addmm.default", "aten.tanh.default"] * 3
    chain = captured.cones[captured.graph.forward[1]]
    assert [node.target._opname for node in chain] == ["sin", "mul", "add", "tanh"]


def test_what_only_the_forward_needs_in_memory_is_not_saved():
    captured = look(*MODELS["frozen weights"]())
    written = [node for node in captured.nodes if "tanh" in str(node.target)]
    assert len(written) == 3  # a product reads each
    assert not set(written) & read_by_the_backward(captured)
    inside = [node for cone in captured.cones for node in cone if node in written]
    assert len(inside) > len(written)  # backward kernels compute it


def test_weights_after_dropout_are_computed_from_scores_that_are_there_anyway():
    captured = look(*MODELS["attention with dropout"]())
    assert any("inductor_random" in str(node.target) for cone in captured.cones for node in cone)
    saved = [captured.nodes[i] for i in Planner(captured.graph, Surroundings()).everything.program.saved]
    quadratic = [node for node in saved if node.meta["val"].numel() == 2 * 2 * 16 * 16]
    assert [node.meta["val"].dtype for node in quadratic] == [torch.float32, torch.bool]  # scores, what is dropped


class Narrows(nn.Module):
    """Reads what is drawn in half precision, in the backward, too; and once in the forward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        noise = (torch.rand(64, 16, device=x.device) > 0.2).half().view(16, 64)
        return self.last((self.first(x + torch.rand_like(x)).view(16, 64) * noise).view(64, 16))


@pytest.mark.parametrize(("model", "masks"), [(Drops, 6), (Narrows, 1)])
def test_what_was_drawn_is_stored_at_its_smallest_if_the_backward_reads_it(model, masks):
    captured = look(model(), torch.randn(64, 16))
    stored = [node for node in captured.nodes if node.meta["val"].dtype == torch.bool]
    assert [node.target for node in stored] == [torch.ops.aten.gt.Scalar] * masks
    saved = {captured.nodes[i] for i in Planner(captured.graph, Surroundings()).everything.program.saved}
    assert saved.issuperset(stored)
    later = [cone for op, cone in zip(captured.graph.ops, captured.cones, strict=True) if op.kind == "backward"]
    assert not any(draws(node) for cone in later for node in cone)


def test_random_seeds_are_kept_and_never_drawn_again():
    torch.manual_seed(0)
    captured = look(Drops(), torch.randn(64, 16))
    graph = captured.graph
    drawing = {op.index for op in captured.unfused.graph.ops if op.random}
    assert drawing
    assert {captured.unfused.nodes[i] for i in drawing} <= {captured.nodes[i] for i in graph.kept}
    assert not any(op.random for op in graph.ops)
    planner = Planner(graph, Surroundings())
    least, most = planner.least.prediction.peak_bytes, planner.everything.prediction.peak_bytes
    assert least < most
    for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        program = planner.best(least + int(share * (most - least))).program
        assert not graph.kept & program.reruns.keys()
        assert program.reruns or share == 1.0
        assert program.reseeded == ()


def test_gradients_that_are_written_at_once_take_no_memory(captured):
    graph = captured.graph
    read = {read for op in graph.ops for read in op.reads}
    gradients = dict(graph.gradients)
    assert graph.parameters
    written = [gradients[i] for i in graph.parameters if is_fusible(captured.nodes[gradients[i]])]
    for gradient in written:
        assert graph.ops[gradient].bytes == 0 or gradient in read or graph.ops[gradient].is_view
    for i in gradients.keys() - graph.parameters:
        assert graph.ops[gradients[i]].bytes > 0


def test_the_gradient_of_a_layer_norm_takes_no_memory_and_that_of_the_batch_does():
    model = Attends()
    captured = look(model, torch.randn(2, 5, 8, requires_grad=True))
    graph = captured.graph
    (batch,) = (gradient for i, gradient in graph.gradients if i not in graph.parameters)
    assert graph.ops[batch].bytes == 2 * 5 * 8 * 4
    sums = [g for i, g in graph.gradients if i in graph.parameters and is_reduction(captured.nodes[g])]
    assert len(sums) == 2  # its weight and its bias
    assert all(graph.bytes_of(set(graph.storages(g))) == 0 for g in sums)


def test_the_gradient_of_an_embedding_is_written_into_its_zeros():
    """Or the largest value of a language model would be predicted twice."""
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Tanh())
    graph = look(model, torch.randint(50, (3, 7))).graph
    size = 50 * 8 * 4
    (gradient,) = (g for i, g in graph.gradients if graph.ops[g].bytes == size)
    (zeros,) = graph.ops[gradient].reusable
    assert graph.ops[zeros].bytes == size
    planner = Planner(graph, Surroundings())
    assert size <= planner.everything.prediction.peak_bytes < 2 * size


def test_the_gradient_that_a_convolution_passes_on_is_written_over_where_it_is_read():
    """It is one part of a tuple, and dies in a pointwise kernel that makes one of its size."""
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()) for _ in range(3)))
    captured = look(model, torch.randn(2, 4, 16, 16))
    graph = captured.graph
    program = Planner(graph, Surroundings()).everything.program
    over = {graph.ops[run.reuses].target for run in program.backward if run.reuses is not None}
    assert over == {"getitem"}


def test_a_part_kept_apart_is_stored(monkeypatch):
    monkeypatch.setattr(rewrite, "_LARGE", 1)
    monkeypatch.setattr(rewrite, "_LONG", {True: 20})
    captured = look(Joins(), torch.randn(4, 8))
    (part,) = (
        op for op, node in zip(captured.graph.ops, captured.nodes, strict=True) if rewrite.PART_COPY in node.meta
    )
    assert part.bytes == 4 * 8 * 4
    assert not part.shares


def test_equal_blocks_have_equal_keys():
    graph = look(Perceptron(layers=5), torch.randn(6, 8)).graph
    blocks = [tuple(graph.ops[j].key for j in graph.forward[i : i + 2]) for i in range(0, 10, 2)]
    assert len(set(blocks)) == 1
    assert "fused with" in blocks[0][1]


def test_blocks_that_differ_inside_have_different_keys():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            return self.c(torch.tanh(self.b(torch.tanh(self.a(x).sin())).cos()))

    graph = look(Two(), torch.randn(6, 8)).graph
    first, second = (graph.ops[i].key for i in graph.forward if graph.ops[i].target == "aten.tanh.default")
    assert first != second
