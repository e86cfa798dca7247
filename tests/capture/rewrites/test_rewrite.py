"""Each rewrite on a tiny traced graph: what it takes away, what it must leave, and that no bit changes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from rewritten import Model, assert_trains_like_eager, image  # noqa: E402

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
