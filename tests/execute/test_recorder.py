"""When a recording may be replayed, and what happens when it may not: on the CPU, with a recording made of launches.

It behaves as CUDA graphs do: parameters are read where they were, one forward's values are there at a time and are
gone after its backward, gradients go to given tensors, or to one place, and are gone with the next forward.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.execute import recorder, rehearsal  # noqa: E402
from fusible import needs_compiler  # noqa: E402
from steps import STEPS, accumulation, descent, zero  # noqa: E402

pytestmark = [needs_compiler, pytest.mark.usefixtures("quick_compiler")]


class Net(nn.Module):
    def __init__(self, layers=1) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
        self.drop = nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x, labels):
        return F.cross_entropy(self.head(self.drop(self.norm(self.body(x)))), labels)


class Recording:
    """Launches, with the restrictions of a recording."""

    made = 0

    def __init__(self, fused, arguments, gradients, mode, lease=None):
        assert mode in fused.has_run
        Recording.made += 1
        self.lease, self.moving = lease, [] if lease is None else [lease]
        graph = fused.captured.graph
        self.fused, self.gradients, self.mode = fused, gradients, mode
        if mode == "return":
            self.gradients = [gradient.detach() for gradient in fused.gradient_buffers(arguments)]
        self.fixed = fused.fixed
        self.places = [place for place, i in enumerate(graph.inputs) if i in self.fixed]
        self.parameters = {place: arguments[place] for place in self.places}
        self.addresses = {place: tensor.data_ptr() for place, tensor in self.parameters.items()}
        self.values = None

    def reads(self, arguments):
        return all(arguments[place].data_ptr() == address for place, address in self.addresses.items())

    def forward(self, arguments):
        if self.mode == "return":
            for gradient in self.gradients:
                gradient.fill_(torch.nan)
        given = [self.parameters.get(place, value) for place, value in enumerate(arguments)]
        outputs = self.fused.forward([*given, *self.moving])
        self.join()
        count = len(self.fused.captured.forward_outputs)
        self.values = outputs[count:]
        return [value.clone() for value in outputs[:count]]

    def backward(self, arriving):
        values, self.values = self.values, None
        given = self.gradients if self.mode != "return" else []
        returned = self.fused.run_backward([*values, *arriving, *self.moving], given, self.mode)
        self.join()
        if self.mode == "return":
            for made, gradient in zip(
                self.fused.take_gradients(returned, self.gradients), self.gradients, strict=True
            ):
                gradient.copy_(made)
        return returned

    def join(self):
        for lease in self.moving:
            lease.join()

    def handed(self, inputs):
        given = iter(inputs)
        pairs = zip(self.fused.handed, self.values, strict=True)
        return [next(given) if i in self.fixed else value for i, value in pairs]


@pytest.fixture(scope="module", params=[("return", False), ("write", False), ("return", True)], ids=str)
def fitted(request):
    """Gradients are made in the recording, or they have a place of their own; values move, or nothing does."""
    makes, moves = request.param
    torch._dynamo.reset()
    torch.manual_seed(0)
    batch = torch.randn(32, 16), torch.randint(4, (32,))
    model = Net(8 if moves else 1)
    plan = elbowroom.plan(model, *batch, budget="1GiB", kernels="inductor", times="estimate")
    budget = plan.peak_bytes - (plan.peak_bytes - plan.resident_bytes) // 4 if moves else "1GiB"
    offload = "always" if moves else "never"
    model = elbowroom.fit(model, *batch, budget=budget, kernels="inductor", times="estimate", offload=offload)
    (entry,) = model.elbowroom.entries.values()
    build = entry.regions[0].programs[entry.regions[0].current].build
    assert bool(build.program.moves) == moves
    model.elbowroom.set_budget("1GiB")  # a recording that is made of launches takes more than was planned
    (entry,) = model.elbowroom.entries.values()
    entry.late = []  # else the session would plan again where gradients are kept, and install another program
    (region,) = entry.regions
    region.install(build)
    fused, inputs = region.programs[region.current].fused, rehearsal._inputs(region, region.current)
    assert fused.has_run == {"return"}  # in its trial
    if makes == "write":  # as a trial does it where gradients are little
        with rehearsal._quietly():
            rehearsal._fused_step(fused, inputs, fused.gradient_buffers(inputs), "write")()
    region.install(replace(build, makes=makes))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    yield model, batch, state
    torch._dynamo.reset()


@pytest.fixture
def use(fitted, monkeypatch):
    """Installs the program, launched or recorded, in a model as it was at first."""
    model, _, state = fitted
    (entry,) = model.elbowroom.entries.values()
    (region,) = entry.regions
    build = region.programs[region.current].build
    monkeypatch.setattr(recorder, "Recording", Recording)

    def install(*, recorded):
        region.install(replace(build, recorded=recorded))
        zero(model)
        model.load_state_dict(state)
        torch.manual_seed(7)
        serving = region.programs[region.current].recorder
        if recorded:
            serving._to_wait, serving._moves_left, Recording.made = 0, 2, 0
        return serving

    yield install
    region.install(build)


def left(model):
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [*gradients, *(b.clone() for b in model.buffers()), torch.get_rng_state()]


@pytest.mark.parametrize("kind", STEPS, ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore:elbowroom")
def test_a_replayed_step_is_the_launched_step(fitted, use, kind):
    model, batch, _ = fitted
    found = []
    for recorded in (False, True):
        use(recorded=recorded)
        returned = kind(model, batch) or []
        found.append([*returned, *left(model)])
    for launched, replayed in zip(*found, strict=True):
        if launched is None or replayed is None:
            assert launched is replayed
        else:
            torch.testing.assert_close(replayed, launched, rtol=1e-5, atol=1e-7)


def test_ordinary_steps_are_replayed_from_one_recording(fitted, use):
    model, batch, _ = fitted
    serving = use(recorded=True)
    before = serving._runs
    descent(model, batch)
    assert (Recording.made, serving._runs - before) == (1, 3)


def test_accumulation_is_replayed_once_its_backward_has_run(fitted, use):
    model, batch, _ = fitted
    serving = use(recorded=True)
    accumulation(model, batch)
    assert serving.recording.mode == "add"
    before = serving._runs
    accumulation(model, batch)
    assert serving._runs - before == 6


def test_a_recording_that_was_given_up_is_made_again_after_some_steps(fitted, use):
    model, batch, _ = fitted
    serving = use(recorded=True)
    descent(model, batch)
    zero(model)
    serving.release()
    assert serving.recording is None
    for _ in range(recorder._PATIENCE):
        model(*batch).backward()
        zero(model)
        assert serving.recording is None
    model(*batch).backward()
    assert serving.recording is not None


def test_gradients_that_are_there_are_used_and_not_doubled(fitted, use):
    model, batch, _ = fitted
    serving = use(recorded=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    places = {parameter.grad.data_ptr() for parameter in model.parameters()}
    for _ in range(3):
        model(*batch).backward()
    assert {gradient.data_ptr() for gradient in serving.recording.gradients} == places
    assert {parameter.grad.data_ptr() for parameter in model.parameters()} == places
    serving.release()
    assert not serving._buffers


def test_gradients_that_somebody_keeps_are_not_overwritten(fitted, use):
    model, batch, _ = fitted
    serving = use(recorded=True)
    kept, before = [], []
    for _ in range(4):
        model(*batch).backward()
        kept.append([parameter.grad for parameter in model.parameters()])
        before.append([gradient.clone() for gradient in kept[-1]])
        zero(model)
    for gradients, copies in zip(kept, before, strict=True):
        for gradient, copy in zip(gradients, copies, strict=True):
            assert torch.equal(gradient, copy)
    assert serving.recording is None
    assert not serving._moves_left


def test_memory_is_not_given_up_while_a_backward_needs_it(fitted, use):
    model, batch, _ = fitted
    serving = use(recorded=True)
    descent(model, batch)
    zero(model)
    loss = model(*batch)
    serving.release()
    assert serving.recording is not None
    loss.backward()
    serving.release()
    assert serving.recording is None


def test_what_cannot_be_recorded_is_launched(fitted, use, monkeypatch):
    def fails(*_):
        raise RuntimeError("an operator waits for the device")

    model, batch, _ = fitted
    serving = use(recorded=True)
    monkeypatch.setattr(recorder, "Recording", fails)
    model(*batch).backward()
    assert serving.recording is None
    assert all(p.grad is not None for p in model.parameters())


def test_what_hooks_put_away_is_not_replayed(fitted, use):
    """They keep no ticket, which would tell that the values are still needed."""
    model, batch, _ = fitted
    serving = use(recorded=True)
    descent(model, batch)
    zero(model)
    before = serving._runs
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda value: value):
        model(*batch).backward()
    assert serving._runs == before
    assert all(p.grad is not None for p in model.parameters())


def test_the_hosts_memory_is_given_back_with_the_recording(fitted, use):
    model, batch, _ = fitted
    serving = use(recorded=True)
    descent(model, batch)
    zero(model)
    (entry,) = model.elbowroom.entries.values()
    room = entry.regions[0].looks.host_room
    assert room.taken_bytes == entry.host_bytes
    serving.release()
    assert room.taken_bytes == 0


def test_another_shape_gets_the_memory(fitted, use):
    model, batch, _ = fitted
    serving = use(recorded=True)
    descent(model, batch)
    zero(model)
    model(batch[0][:8], batch[1][:8]).backward()
    assert serving.recording is None
    model.elbowroom.entries.popitem()
