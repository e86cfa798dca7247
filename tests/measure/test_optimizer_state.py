"""An optimizer's state, counted before its first step, is what is there afterwards."""

from __future__ import annotations

import time
from collections import deque

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from elbowroom.errors import InputError  # noqa: E402
from elbowroom.measure.resident import optimizer_bytes  # noqa: E402

CPU = torch.device("cpu")
MATRICES = [(64, 48), (64, 48), (7, 3), (1, 5)]
SHAPES = [*MATRICES, (48,), (3, 4, 3, 3), (), (1,), (0, 4)]


def parameters(shapes=SHAPES, dtype=torch.float32):
    made = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def bytes_there(optimizer):
    """Read from the tensors themselves: whatever lies in the state, one storage once."""
    leaves = [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, torch.Tensor)]
    storages = {leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes() for leaf in leaves}
    return sum(storages.values())


def check(optimizer, *, least=1):
    states, there = torch.get_rng_state(), bytes_there(optimizer)
    before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    counted = optimizer_bytes(optimizer, CPU)
    assert torch.equal(states, torch.get_rng_state())
    assert bytes_there(optimizer) == there
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    optimizer.step()
    assert counted == bytes_there(optimizer) >= least
    assert optimizer_bytes(optimizer, CPU) == counted


KINDS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"LBFGS", "SparseAdam"}))
def test_every_optimizer_of_pytorch_is_counted_to_the_byte(kind):
    takes = {"Muon": MATRICES, "Adafactor": SHAPES[:-1]}  # the one takes matrices only, the other nothing empty
    shapes = takes.get(kind, SHAPES)
    check(getattr(torch.optim, kind)(parameters(shapes), lr=1e-3), least=0 if kind == "SGD" else 1)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("Adam", {"amsgrad": True, "foreach": True}),
        ("AdamW", {"fused": True}),
        ("AdamW", {"lr": torch.tensor(1e-3)}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("Adafactor", {"foreach": True}),
    ],
)
def test_settings_of_a_group_are_kept_in_the_trial(kind, settings):
    optimizer = getattr(torch.optim, kind)(parameters(SHAPES[:-1]), **{"lr": 1e-3, **settings})
    lr = settings.get("lr", 0.0)
    counted = optimizer_bytes(optimizer, CPU)
    optimizer.step()
    assert counted == bytes_there(optimizer) + (lr.nbytes if isinstance(lr, torch.Tensor) else 0) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("kind", ["Adam", "Adagrad", "Rprop"])
def test_state_of_other_dtypes(kind, dtype):
    check(getattr(torch.optim, kind)(parameters([(33, 5), (9,)], dtype), lr=1e-3))


def test_groups_of_their_own_settings_and_mixed_dtypes():
    matrices, vectors = parameters(MATRICES), parameters([(48,)], torch.bfloat16) + parameters([(48,)])
    check(torch.optim.SGD([{"params": matrices, "momentum": 0.9}, {"params": vectors}], lr=0.1))
    check(torch.optim.RMSprop([{"params": matrices, "centered": True}, {"params": vectors}], lr=0.1))


def test_frozen_parameters_get_no_state():
    made = parameters()
    for parameter in made[:2]:
        parameter.requires_grad_(False)
        parameter.grad = None
    check(torch.optim.Adam(made))


def test_a_group_added_after_the_first_step_is_counted_too():
    made, added = parameters(MATRICES), parameters([(100, 10)])
    optimizer = torch.optim.Adam(made)
    optimizer.step()
    optimizer.add_param_group({"params": added})
    counted = optimizer_bytes(optimizer, CPU)
    optimizer.step()
    assert counted == bytes_there(optimizer)


@pytest.mark.parametrize("kind", ["Adam", "Adagrad", "Adafactor"])
def test_a_parameter_whose_first_gradient_comes_later_is_counted_all_the_time(kind):
    late, *made = parameters(MATRICES)
    optimizer = getattr(torch.optim, kind)([late, *made], lr=1e-3)
    whole, gradient, late.grad = optimizer_bytes(optimizer, CPU), late.grad, None
    optimizer.step()
    assert optimizer_bytes(optimizer, CPU) == whole
    late.grad = gradient
    optimizer.step()
    assert optimizer_bytes(optimizer, CPU) == bytes_there(optimizer) == whole


class History(torch.optim.Optimizer):
    """Keeps lists of tensors, something for the whole group, and a view; its learning rate has no default."""

    def __init__(self, params, lr, *, depth):
        super().__init__(params, {"lr": lr})
        self.depth = depth

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            self.state.setdefault("all", {})["noise"] = torch.rand(1000)
            for p in group["params"]:
                state = self.state[p]
                state["past"] = [torch.zeros(p.numel() + i) for i in range(self.depth)]
                state["rows"] = deque([torch.zeros(p.shape[0])])
                state["same"] = (state["past"][0][:1], p)
                p.add_(p.grad, alpha=-group["lr"] * float(p.grad.norm()))


@pytest.mark.parametrize("kind", ["Adam", "Adafactor", "NAdam"])
def test_parameters_that_the_first_step_left_out_are_counted(kind):
    made = parameters(MATRICES)
    for parameter in made[1:3]:
        parameter.grad = None
    optimizer = getattr(torch.optim, kind)(made, lr=0.1)
    counted = optimizer_bytes(optimizer, CPU)
    optimizer.step()
    assert bytes_there(optimizer) < counted == optimizer_bytes(optimizer, CPU)
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    check(optimizer)
    assert bytes_there(optimizer) == counted


def test_an_optimizer_that_somebody_wrote():
    """Tried on the CPU, because it reads a number; what is the parameter's own memory is not counted."""
    made = parameters([(6, 5), (6, 5), (9,)])
    optimizer = History(made, 0.1, depth=3)
    counted = optimizer_bytes(optimizer, CPU)
    optimizer.step()
    assert counted == bytes_there(optimizer) - sum(p.untyped_storage().nbytes() for p in made)


class Standing(torch.optim.Optimizer):
    """Stands for another optimizer, as accelerate's does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)


def test_an_optimizer_that_stands_for_another():
    optimizer = torch.optim.Adam(parameters())
    counted = optimizer_bytes(Standing(optimizer), CPU)
    optimizer.step()
    assert counted == bytes_there(optimizer) > 0


def test_sparse_gradients():
    table = nn.Embedding(50, 8, sparse=True)
    table(torch.tensor([3, 5])).sum().backward()
    optimizer = torch.optim.SparseAdam(table.parameters())
    counted = optimizer_bytes(optimizer, CPU)
    optimizer.step()
    assert counted == bytes_there(optimizer) > 0


def test_an_optimizer_that_cannot_be_tried_is_refused_in_words():
    optimizer = torch.optim.LBFGS(parameters())
    with pytest.raises(InputError, match=r"^optimizer: LBFGS has no state yet.*take one step first$"):
        optimizer_bytes(optimizer, CPU)


def test_hundreds_of_parameters_take_a_moment():
    """No memory, and a fraction of a second: ten kinds of 40 GB together are tried once each, on the meta device."""
    with torch.device("meta"):
        made = [nn.Parameter(torch.empty(1000, 100_000 * (1 + i % 10))) for i in range(400)]
    optimizer = torch.optim.AdamW(made)
    begin = time.perf_counter()
    counted = optimizer_bytes(optimizer, torch.device("meta"))
    assert time.perf_counter() - begin < 0.5
    assert counted == sum(2 * 4 * p.numel() for p in made)


def test_counters_stay_on_the_host_unless_a_kernel_reads_them():
    """Asked for a device that is not the host: `cuda` parameters are not needed to see which tensors go there."""
    with torch.device("meta"):
        made = [nn.Parameter(torch.empty(100)), nn.Parameter(torch.empty(()))]
    meta = torch.device("meta")
    assert optimizer_bytes(torch.optim.Adam(made), meta) == 2 * (400 + 4)
    assert optimizer_bytes(torch.optim.Adam(made, capturable=True), meta) == 2 * (400 + 4) + 2 * 4
    assert optimizer_bytes(torch.optim.ASGD(made[:1]), meta) == 400
