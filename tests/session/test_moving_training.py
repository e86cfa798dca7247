"""What people do besides one plain step, with a model whose values go to the host and back, late."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import elbowroom  # noqa: E402
from delayed import delay_copies  # noqa: E402
from elbowroom.measure import host_memory  # noqa: E402
from fitted import host_room, least_budget, set_gradients  # noqa: E402

WIDTH, ROWS = 48, 64
MOVING = {"offload": "always", "host_budget": "1GiB", "link": "12GB/s", "kernels": "torch"}
pytestmark = pytest.mark.usefixtures("fresh")


class Net(nn.Module):
    """Two outputs, random numbers, and a buffer that each step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(5))
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = self.drop(layer(x))
        x = self.norm(x)
        return self.heads[0](x), self.heads[1](x.relu())


class Pair:
    """A model that is fitted at its least budget, and its plain twin."""

    def __init__(self, *, budget: int | None = None, **options) -> None:
        torch.manual_seed(0)
        self.plain, self.x = Net(), torch.randn(ROWS, WIDTH)
        self.fitted = elbowroom.fit(copy.deepcopy(self.plain), self.x, budget="1GiB", **{**MOVING, **options})
        self.session, self.room = self.fitted.elbowroom, host_room(self.fitted)
        self.session.set_budget(least_budget(self.fitted) if budget is None else budget)

    @property
    def program(self):
        return next(iter(self.session.entries.values())).regions[0].program

    def both(self, step) -> None:
        """A step of each, from the same state; everything that it leaves must be the same."""
        found = []
        for model in (self.plain, self.fitted):
            torch.manual_seed(7)
            set_gradients(model, there=False)
            returned = step(model, self.x)
            gradients = [p.grad for p in model.parameters()]
            found.append([returned, torch.get_rng_state(), *model.buffers(), *gradients])
        for one, other in zip(*found, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)


def plain_step(model, x):
    first, second = model(x)
    loss = first.square().mean() + second.abs().mean()
    loss.backward()
    return loss.detach()


@pytest.fixture
def lanes(monkeypatch):
    return delay_copies(monkeypatch, 0.001)


@pytest.fixture
def pair(lanes):
    return Pair()


def test_steps_in_a_row(pair):
    assert pair.program.moves
    for _ in range(3):
        pair.both(plain_step)
    assert not pair.room.taken_bytes


def test_a_second_backward(pair):
    def step(model, x):
        loss = sum(each.square().mean() for each in model(x))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss.detach()

    pair.both(step)
    pair.both(plain_step)
    assert not pair.room.taken_bytes


def test_gradients_that_are_asked_for(pair):
    def step(model, x):
        loss = sum(each.square().mean() for each in model(x))
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    pair.both(step)
    assert not pair.room.taken_bytes


@pytest.mark.parametrize("head", [0, 1])
def test_a_loss_of_one_output(pair, head):
    def step(model, x):
        loss = model(x)[head].square().mean()
        loss.backward()
        return loss.detach()

    pair.both(step)
    assert not pair.room.taken_bytes


def test_a_forward_whose_backward_never_comes(pair):
    held = host_memory.held_bytes()

    def step(model, x):
        first, _ = model(x)
        assert model is pair.plain or pair.room.taken_bytes == pair.room.bytes > 0
        return first.detach()

    for _ in range(3):
        pair.both(step)
        assert not pair.room.taken_bytes
        assert host_memory.held_bytes() == held
    pair.both(plain_step)


def two_forwards(model, x):
    losses = [sum(each.square().mean() for each in model(batch)) for batch in (x, 2 * x)]
    for loss in reversed(losses):
        loss.backward()
    return sum(losses).detach()


def test_two_forwards_before_their_backwards(lanes):
    pair = Pair(forwards=2)
    held = host_memory.held_bytes()
    pair.both(two_forwards)
    assert host_memory.held_bytes() == held
    host_memory.begin_counting()
    pair.both(two_forwards)
    assert host_memory.most_bytes() == held
    assert not pair.room.taken_bytes


def test_more_forwards_than_planned_have_memory_of_their_own(pair):
    held = host_memory.held_bytes()
    host_memory.begin_counting()
    with pytest.warns(UserWarning, match="pass forwards="):
        pair.both(two_forwards)
    assert host_memory.most_bytes() == held + pair.room.bytes
    assert host_memory.held_bytes() == held
    pair.both(plain_step)


# --- where hooks put away what is saved ---


def packed(pack, unpack):
    def step(model, x):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = sum(each.square().mean() for each in model(x))
        loss.backward()
        return loss.detach()

    return step


def on_cpu(model, x):
    with torch.autograd.graph.save_on_cpu():
        loss = sum(each.square().mean() for each in model(x))
    loss.backward()
    return loss.detach()


def under_checkpoint(model, x):
    loss = sum(each.square().mean() for each in checkpoint(model, x, use_reentrant=False))
    loss.backward()
    return loss.detach()


HOOKS = {
    "as they are": packed(lambda tensor: tensor, lambda tensor: tensor),
    "copied": packed(torch.clone, lambda tensor: tensor),
    "pickled": packed(lambda tensor: pickle.dumps(tensor), lambda kept: pickle.loads(kept)),
    "on the CPU": on_cpu,
}


@pytest.mark.parametrize("step", HOOKS.values(), ids=HOOKS)
def test_hooks_that_put_saved_tensors_away(pair, step):
    held = host_memory.held_bytes()
    for _ in range(3):
        pair.both(step)
        assert host_memory.held_bytes() == held
        assert not pair.room.taken_bytes
    pair.both(plain_step)


def test_a_checkpoint_around_the_fitted_model(pair):
    held = host_memory.held_bytes()
    for _ in range(3):
        pair.both(under_checkpoint)
        assert host_memory.held_bytes() == held
        assert not pair.room.taken_bytes


def test_hooks_of_a_forward_whose_backward_never_comes(pair):
    held = host_memory.held_bytes()
    for _ in range(3):
        with torch.autograd.graph.save_on_cpu():
            outputs = pair.fitted(pair.x)
        assert host_memory.held_bytes() == held + pair.room.bytes
        del outputs
        assert host_memory.held_bytes() == held


# --- models and sessions ---


def test_two_threads_train_two_models(lanes):
    pairs = [Pair(), Pair()]
    failures = []

    def train(pair) -> None:
        try:
            for _ in range(5):
                set_gradients(pair.fitted, there=False)
                plain_step(pair.fitted.eval(), pair.x)  # random numbers come from one generator for all threads
        except BaseException as failure:
            failures.append(failure)

    for pair in pairs:
        plain_step(pair.fitted.eval(), pair.x)
    threads = [threading.Thread(target=train, args=(pair,)) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for pair in pairs:
        plain_step(pair.plain.eval(), pair.x)
        for one, other in zip(pair.plain.parameters(), pair.fitted.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
        assert not pair.room.taken_bytes


def test_copies_of_a_fitted_model(pair):
    other = copy.deepcopy(pair.fitted)
    loaded = pickle.loads(pickle.dumps(pair.fitted))
    assert loaded.elbowroom is None
    pair.both(plain_step)
    wanted = [p.grad.clone() for p in pair.fitted.parameters()]
    torch.manual_seed(7)
    other.load_state_dict(pair.fitted.state_dict())
    plain_step(other, pair.x)
    assert host_room(other) is not pair.room
    assert all(torch.equal(p.grad, want) for p, want in zip(other.parameters(), wanted, strict=True))
    held = host_memory.held_bytes()
    room = host_room(other).bytes
    assert room
    del other
    torch._dynamo.reset()
    gc.collect()
    assert host_memory.held_bytes() == held - room


def test_a_budget_with_moves_one_without_and_back(pair):
    least, size = pair.fitted.elbowroom.options.budget, pair.room.bytes
    held = host_memory.held_bytes() - size
    for _ in range(2):
        pair.session.set_budget("1GiB")
        assert not pair.program.moves
        assert host_memory.held_bytes() == held
        pair.both(plain_step)
        pair.session.set_budget(least)
        assert pair.room.bytes == size
        pair.both(plain_step)
        assert host_memory.held_bytes() == held + size


def test_a_budget_that_changes_while_a_backward_waits(pair):
    """Its values stay where they are until it has come; then nobody needs that memory."""
    held = host_memory.held_bytes() - pair.room.bytes

    def step(model, x):
        loss = sum(each.square().mean() for each in model(x))
        if model is pair.fitted:
            pair.session.set_budget("1GiB")
            assert host_memory.held_bytes() > held
        loss.backward()
        return loss.detach()

    pair.both(step)
    assert host_memory.held_bytes() == held
    pair.both(plain_step)


def test_shapes_that_change(pair):
    for rows in (ROWS, ROWS // 2, ROWS, 3):
        pair.x = torch.randn(rows, WIDTH)
        pair.both(plain_step)
        assert not pair.room.taken_bytes
    assert pair.room.bytes == max(entry.host_bytes for entry in pair.session.entries.values())


def test_a_step_that_is_verified(lanes):
    least = Pair().session.options.budget
    torch.manual_seed(0)
    model, x = Net(), torch.randn(ROWS, WIDTH)
    fitted = elbowroom.fit(model, x, budget=least, verify=True, **MOVING)
    assert not host_room(fitted).taken_bytes
    plain_step(fitted, x)


def test_a_plan_that_is_saved_and_loaded(lanes, tmp_path):
    pair = Pair()
    path = tmp_path / "plan.json"
    pair.session.plan.save(path)
    torch.manual_seed(0)
    model, x = Net(), torch.randn(ROWS, WIDTH)
    budget = pair.session.options.budget
    fitted = elbowroom.fit(model, x, budget=budget, plan=elbowroom.Plan.load(path), **MOVING)
    (entry,) = fitted.elbowroom.entries.values()
    assert entry.regions[0].program == pair.program
    assert host_room(fitted).bytes == pair.room.bytes
    pair.fitted, pair.room = fitted, host_room(fitted)
    pair.both(plain_step)
    assert not pair.room.taken_bytes


def test_a_plan_that_moves_is_refused_where_nothing_may(lanes, tmp_path):
    pair = Pair()
    budget = pair.session.options.budget
    path = tmp_path / "plan.json"
    pair.session.plan.save(path)
    plan = elbowroom.Plan.load(path)
    torch.manual_seed(0)
    model, x = Net(), torch.randn(ROWS, WIDTH)
    with pytest.raises(elbowroom.InputError, match=r"plan: .*no link to the host.*plan again"):
        elbowroom.fit(model, x, budget=budget, plan=plan, kernels="torch", offload="never")
    with pytest.raises(elbowroom.InputError, match=r"plan: .*the host would need .* bytes more"):
        elbowroom.fit(model, x, budget=budget, plan=plan, **{**MOVING, "host_budget": 1})


def test_five_hundred_steps_take_no_more_of_the_host(lanes):
    pair = Pair()
    lanes.to_host._most_s = lanes.from_host._most_s = 0.0
    held = host_memory.held_bytes()
    host_memory.begin_counting()
    for _ in range(500):
        set_gradients(pair.fitted, there=False)
        plain_step(pair.fitted, pair.x)
    assert host_memory.most_bytes() == host_memory.held_bytes() == held
    assert len(pair.program.moves) // 4 * 500 <= lanes.to_host.copies
