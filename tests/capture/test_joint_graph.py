"""What is read off a traced graph: order, storages, gradients, random operators, and the user's own module names."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from elbowroom.capture.backend import make_backend  # noqa: E402
from elbowroom.capture.fingerprint import fingerprint  # noqa: E402
from elbowroom.capture.joint_graph import rerun_call  # noqa: E402

aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return x + self.drop(torch.relu(self.norm(self.conv(x))))


class Net(nn.Module):
    def __init__(self, drop: float = 0.2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(drop) for _ in range(2))
        self.heads = nn.ModuleDict({"small": nn.Sequential(nn.Linear(4, 3), nn.Tanh())})

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.heads["small"](x.mean((2, 3)))


def image():
    return torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(5))


def test_operators_are_known_by_the_users_names_of_their_modules(capture):
    ops = capture(Net(), image()).graph.ops
    forward = {op.module for op in ops if op.kind == "forward"}
    backward = {op.module for op in ops if op.kind == "backward"}
    parts = {f"blocks.{i}{part}" for i in range(2) for part in ("", ".conv", ".norm", ".drop")}
    assert forward == {"", *parts, "heads.small.0", "heads.small.1"}
    assert backward == forward
    assert {op.module for op in ops if op.target == "aten.convolution.default"} == {"blocks.0.conv", "blocks.1.conv"}
    assert {op.module for op in ops if op.kind in ("input", "gradient")} == {""}


@pytest.mark.parametrize("name", ["model", "self", "self_attention", "L"])
def test_a_module_may_be_called_what_the_model_is_called(capture, name):
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, nn.Sequential(nn.Linear(4, 4)))

        def forward(self, x):
            return getattr(self, name)(x)

    ops = capture(Outer(), torch.randn(2, 4)).graph.ops
    assert {op.module for op in ops if op.target == "aten.addmm.default"} == {f"{name}.0"}


def test_a_module_used_twice_is_one_module(capture):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    ops = capture(Twice(), torch.randn(2, 4)).graph.ops
    assert [op.module for op in ops if op.target == "aten.addmm.default"] == ["layer", "layer"]


def test_operators_are_numbered_in_an_order_in_which_they_can_run(capture):
    graph = capture(Net(), image()).graph
    assert [op.index for op in graph.ops] == list(range(len(graph.ops)))
    assert [op.index for op in graph.ops] == [*graph.inputs, *graph.arriving, *graph.forward, *graph.backward]
    for op in graph.ops:
        assert all(read < op.index for read in op.reads)
        assert set(op.rerun_reads) <= set(op.reads)
        if op.kind == "forward":
            assert all(graph.ops[read].kind in ("input", "forward") for read in op.reads)


def test_views_and_parts_share_storages_and_what_is_resident_costs_nothing(capture):
    captured = capture(Net(), image())
    graph = captured.graph
    for op, node in zip(graph.ops, captured.nodes, strict=True):
        if op.target in ("getitem", "aten.t.default", "aten.expand.default"):
            assert op.is_view
            assert op.bytes == 0
        if op.kind == "input":
            assert op.bytes == graph.bytes_of(set(graph.storages(op.index))) == 0
        if op.target == "aten.convolution.default":
            assert op.makes[0][1] == node.meta["val"].numel() * 4
    (norm, _) = (op for op in graph.ops if op.target == "batch_norm_updating")
    assert sorted(size for _, size in norm.makes) == [4 * 4, 4 * 4, 2 * 4 * 6 * 6 * 4]
    (turned, *_) = (op for op in graph.ops if op.target == "aten.t.default")
    assert graph.bytes_of(set(graph.storages(turned.index))) == 0  # a view of a parameter


def test_gradients_of_parameters_are_told_from_others(capture):
    model = Net()
    model.blocks[0].conv.requires_grad_(False)
    x = image().requires_grad_()
    graph = capture(model, x).graph
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(graph.parameters) == len(trained)
    assert len(graph.gradients) == len(trained) + 1  # of the batch too
    assert all(graph.ops[gradient].kind == "backward" for _, gradient in graph.gradients)


def test_results_are_told_from_updates(capture):
    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x, log):
            y = torch.tanh(self.layer(x)) * (1 + self.mean)
            self.mean.mul_(0.9).add_(y.detach().mean(0))
            log.mul_(2)
            return y, y.sum(), 3

    model = Logs()
    log = torch.ones(5)
    captured = capture(model, torch.randn(2, 4), log)
    graph = captured.graph
    assert [graph.ops[op].target for op in graph.results] == ["aten.mul.Tensor", "aten.sum.default"]
    assert len(graph.updates) == 2
    assert sorted(graph.overwritten.values()) == [4 * 4, 5 * 4]
    assert len(graph.arriving) == 2
    assert torch.equal(log, torch.ones(5))
    assert torch.equal(model.mean, torch.zeros(4))
    assert captured.outputs[2] == 3


def test_only_operators_that_draw_are_random(capture):
    """Attention is tagged as random whether it drops anything or not."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.layer(x).view(2, 5, 3, 8).permute(2, 0, 1, 3).unsqueeze(2)
            return F.dropout(torch.sin(F.scaled_dot_product_attention(q, k, v, is_causal=True)), 0.5)

    ops = capture(Attends(), torch.randn(2, 5, 8)).graph.ops
    assert any("attention" in op.target for op in ops)
    assert [op.target for op in ops if op.random] == ["aten.native_dropout.default"]


def test_a_batch_norm_that_runs_again_leaves_its_statistics_alone(capture):
    captured = capture(Net(), image())
    for op, node in zip(captured.graph.ops, captured.nodes, strict=True):
        if op.target == "batch_norm_updating":
            target, reads, args = rerun_call(node)
            assert target is aten._native_batch_norm_legit.no_stats
            assert not set(reads) & set(node.args[3:5])
            assert set(op.reads) - set(op.rerun_reads) == {captured.nodes.index(b) for b in node.args[3:5]}
            assert args[3] is True


def test_a_step_of_the_graph_as_read_is_the_same(capture):
    model = Net()
    plain = copy.deepcopy(model)
    captured = capture(model, image())
    for again in (False, True):
        torch.manual_seed(3)
        captured.train(image(), again=again)
        torch.manual_seed(3)
        plain(image()).square().sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
            assert torch.equal(ours, theirs)


def test_a_graph_with_unknown_shapes_is_refused_and_runs_all_the_same():
    torch._dynamo.reset()
    torch.manual_seed(0)
    refusals: list[str] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    example = torch.randn(3, 4)
    torch._dynamo.mark_dynamic(example, 0)
    compiled = torch.compile(model, backend=make_backend(pytest.fail, pytest.fail, refusals.append))
    compiled(example).sum().backward()
    gradient = model[0].weight.grad
    model.zero_grad()
    model(example).sum().backward()
    assert torch.equal(model[0].weight.grad, gradient)
    assert refusals == ["it has shapes that depend on data"]


def test_a_fingerprint_is_that_of_the_graph(capture):
    same = [fingerprint(capture(Net(), image()).region.traced)]
    torch._dynamo.reset()
    same.append(fingerprint(capture(Net(), image()).region.traced))
    torch._dynamo.reset()
    other = fingerprint(capture(Net(), image()[:, :, :5]).region.traced)
    torch._dynamo.reset()
    less = fingerprint(capture(Net(drop=0.1), image()).region.traced)
    assert same[0] == same[1]
    assert len({same[0], other, less}) == 3
