"""Writing an output over an input: which operators can, and that the bits are the same."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from elbowroom.capture.out_variant import out_variant, overwritable  # noqa: E402
from elbowroom.step.program import make_program  # noqa: E402

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("target", "variant", "name"),
    [
        (aten.mul.Tensor, aten.mul.out, "out"),
        (aten.tanh.default, aten.tanh.out, "out"),
        (aten.where.self, aten.where.self_out, "out"),
        (aten.threshold_backward.default, aten.threshold_backward.grad_input, "grad_input"),
        (aten.gelu_backward.default, aten.gelu_backward.grad_input, "grad_input"),
        (aten._softmax_backward_data.default, aten._softmax_backward_data.out, "grad_input"),
    ],
)
def test_an_operator_with_an_out_variant(target, variant, name):
    assert out_variant(target) == (variant, name)


@pytest.mark.parametrize(
    "target",
    [
        aten.native_dropout_backward.default,  # generated: computes a new tensor and copies it
        aten.mul.Scalar,
        aten.clone.default,
        aten.native_batch_norm.default,  # three tensors to write to
        aten.relu_.default,
        aten.view.default,
    ],
)
def test_an_operator_without_one(target):
    assert out_variant(target) is None


def test_a_variant_takes_the_same_arguments_and_is_never_a_generated_one():
    found = with_variant()
    assert len(found) > 300
    for target, variant, name in found:
        assert torch.Tag.generated not in variant.tags, target
        (written,) = (argument for argument in variant._schema.arguments if argument.is_out)
        assert written.name == name
        others = [argument for argument in variant._schema.arguments if not argument.is_out]
        assert [a.name for a in others] == [a.name for a in target._schema.arguments]
        assert [str(a.type) for a in others] == [str(a.type) for a in target._schema.arguments]


def with_variant() -> list[tuple[torch._ops.OpOverload, torch._ops.OpOverload, str]]:
    """Every operator of ATen with an out variant: the operator, the variant, the name of what it writes to."""
    names = [name[6:].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    packets = [getattr(aten, name) for name in sorted(set(names))]
    targets = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    return [(target, *found) for target in targets if (found := out_variant(target)) is not None]


def test_every_elementwise_operator_written_over_an_input_gives_the_same_bits():
    """On floats of one shape and layout, over each of its inputs in turn."""
    tried = set()
    for target, variant, name in with_variant():
        if torch.Tag.pointwise not in target.tags:
            continue
        for dtype in (torch.float32, torch.bfloat16):
            for shape, order in (((7, 33), (1, 0)), ((4, 5, 6, 7), (0, 2, 3, 1))):
                generator = torch.Generator().manual_seed(2)
                arguments = [made_up(a, dtype, shape, order, generator) for a in target._schema.arguments]
                try:
                    expected = target(*arguments)
                except (RuntimeError, NotImplementedError, IndexError, TypeError):
                    continue  # not for floats, or not for these arguments
                for place, given in enumerate(arguments):
                    if not isinstance(given, torch.Tensor) or not alike(given, expected):
                        continue
                    for others in (torch.preserve_format, torch.contiguous_format):
                        copies = [
                            a.clone(memory_format=others) if isinstance(a, torch.Tensor) and a is not given else a
                            for a in arguments
                        ]
                        copies[place] = given.clone()
                        expected = target(*copies)
                        variant(*copies, **{name: copies[place]})
                        assert torch.equal(copies[place].nan_to_num(), expected.nan_to_num()), target
                        tried.add(target)
    assert len(tried) > 100


def made_up(argument, dtype, shape, order, generator):
    """A value for an argument; tensors have a permuted layout."""
    kind = str(argument.type)
    if kind in ("Tensor", "Optional[Tensor]"):
        permuted = torch.rand([shape[i] for i in order], generator=generator) + 0.1
        back = sorted(range(len(order)), key=order.__getitem__)
        return permuted.to(dtype).permute(back)
    if argument.has_default_value():
        return argument.default_value
    return {"number": 0.5, "float": 0.5, "int": 1, "bool": False}.get(kind)


def alike(given, expected) -> bool:
    return (given.dtype, given.shape, given.stride()) == (expected.dtype, expected.shape, expected.stride())


@pytest.mark.parametrize("target", [aten._softmax_backward_data.default, aten._log_softmax_backward_data.default])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_backward_of_softmax_written_over_the_arriving_gradient(target, dtype, dim):
    torch.manual_seed(3)
    gradient = torch.randn(17, 40, 65).to(dtype)
    forward = torch.softmax if target is aten._softmax_backward_data.default else torch.log_softmax
    output = forward(torch.randn(17, 40, 65), dim).to(dtype)
    expected = target(gradient, output, dim, dtype)
    variant, name = out_variant(target)
    variant(gradient, output, dim, dtype, **{name: gradient})
    assert torch.equal(gradient, expected)


class Chain(nn.Module):
    """A chain of elementwise operators: nearly every one can write over what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        y = self.inside(x)
        y = torch.tanh(y) * torch.sigmoid(y) + nn.functional.gelu(y)
        y = torch.where(y > 0, y, y.exp()) / (1 + y * y)
        return torch.log_softmax(self.outside(y.softmax(-1)), -1)


def test_a_program_that_writes_over_what_dies_gives_the_same_bits(capture):
    model, example = Chain(), torch.randn(24, 16)
    model(example).square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    captured = capture(model, example)
    for again in (False, True):
        for p in model.parameters():
            p.grad = None
        captured.train(example, again=again)
        reused = [run.reuses for run in (*captured.region.program.forward, *captured.region.program.backward)]
        assert len([value for value in reused if value is not None]) > 10
        assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), expected, strict=True))


def test_what_came_from_outside_is_never_written_over(capture):
    """The batch, the parameters, what autograd hands to the backward: it may hand it out again."""
    captured = capture(Chain(), torch.randn(24, 16))
    graph = captured.graph
    offered = {value for op in graph.ops for value in op.reusable}
    assert offered & set(graph.arriving)
    for order in (graph.backward, [*graph.forward, *graph.backward]):
        program = make_program(graph, order)
        for listing, outside in (
            (program.forward, graph.inputs),
            (program.backward, (*program.saved, *graph.arriving)),
        ):
            untouchable = {*outside, *graph.inputs}
            for run in listing:
                assert run.reuses not in untouchable
                untouchable.discard(run.op)  # from here on there is a copy that the program made


def test_only_tensors_exactly_like_the_output_can_be_written_over(capture):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            y = self.layer(x)
            row, turned, half = y[:1] * 2, y.t() * 2, y.to(torch.float16) * 2
            return (
                (y.tanh() * row).sum() + (y.sin() * turned).sum() + (y.cos() * half).sum() + (y[1:].exp() * 2).sum()
            )

    captured = capture(Mixed(), torch.randn(8, 8))
    for node in captured.nodes:
        for read in overwritable(node):
            value, output = read.meta["val"], node.meta["val"]
            assert alike(value, output)
            assert value.untyped_storage().nbytes() == output.untyped_storage().nbytes()
    (exp,) = (node for node in captured.nodes if node.target is aten.exp.default)
    assert overwritable(exp) == []  # a part of a larger storage


def test_where_a_layout_is_ambiguous_nothing_is_written_over(capture):
    """Of a single pixel both are laid out channels last and not: eager decides, and BatchNorm looks at it."""

    class Pixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            y = self.layer(x)
            last, first = y.view(2, 1, 1, 8).permute(0, 3, 1, 2).sin(), y.view(2, 8, 1, 1).cos()
            return (last + first).square().sum() + (last - last.tanh()).square().sum()

    captured = capture(Pixels(), torch.randn(2, 8))
    (added,) = (
        node
        for node in captured.nodes
        if node.target is aten.add.Tensor
        and node.meta["val"].dim() == 4
        and {read.target for read in node.all_input_nodes} == {aten.sin.default, aten.cos.default}
    )
    assert len({read.meta["val"].stride() for read in added.all_input_nodes}) == 2
    assert overwritable(added) == []
    (apart,) = (node for node in captured.nodes if node.target is aten.sub.Tensor)
    assert len(overwritable(apart)) == 2
