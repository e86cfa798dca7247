"""BatchNorm and counters: buffers are updated in place and once, and who reads them sees what eager would show."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import fx  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from elbowroom.capture.rewrites.rewrite import batch_norm_updating  # noqa: E402
from rewritten import Model, assert_trains_like_eager, image  # noqa: E402

aten = torch.ops.aten


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
