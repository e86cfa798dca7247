"""Programs replayed as CUDA graphs: the bits of launched ones, their memory shown, and every kind of step served."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import elbowroom
from steps import STEPS, descent, zero

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Net(nn.Module):
    """Dropout and batch norm: random numbers and buffers must be those of a launched step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(6)))
        self.head = nn.Linear(256, 10)

    def forward(self, x, labels):
        return F.cross_entropy(self.head(self.layers(x)), labels)


class Layer(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Dropout(0.1))


class Subject:
    """A fitted model whose program can be launched or replayed."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.batch = torch.randn(4096, 256, device="cuda"), torch.randint(10, (4096,), device="cuda")
        self.model = elbowroom.fit(Net().cuda(), *self.batch, budget="1GiB", kernels="inductor")
        (entry,) = self.model.elbowroom.entries.values()
        (self.region,) = entry.regions
        self.build = self.region.programs[self.region.current].build
        self.state = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.results = {}

    def use(self, *, recorded: bool) -> None:
        self.region.install(replace(self.build, recorded=recorded))
        for parameter in self.model.parameters():
            parameter.grad = None
        self.model.load_state_dict(self.state)
        torch.manual_seed(7)
        if recorded:
            self.recorder._to_wait, self.recorder._moves_left = 0, 2

    @property
    def recorder(self):
        return self.region.programs[self.region.current].recorder

    def left(self):
        """Everything that a scenario leaves behind."""
        gradients = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        return [*gradients, *(b.clone() for b in self.model.buffers()), torch.cuda.get_rng_state()]


@pytest.fixture(scope="module")
def subject():
    return Subject()


@pytest.mark.parametrize("kind", STEPS, ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore:elbowroom")
def test_a_replayed_step_is_the_launched_step(subject, kind):
    found = []
    for recorded in (False, True):
        subject.use(recorded=recorded)
        returned = kind(subject.model, subject.batch) or []
        torch.cuda.synchronize()
        found.append([*returned, *subject.left()])
    for launched, replayed in zip(*found, strict=True):
        if launched is None or replayed is None:
            assert launched is replayed
        else:
            torch.testing.assert_close(replayed, launched, rtol=1e-5, atol=1e-7)


def test_ordinary_steps_are_replayed(subject):
    subject.use(recorded=True)
    descent(subject.model, subject.batch)
    assert subject.recorder.recording is not None
    assert subject.recorder._runs >= 3


def test_what_a_recording_takes_is_shown_as_allocated(subject):
    subject.use(recorded=True)
    zero(subject.model)
    subject.region.release()
    subject.recorder._to_wait = 0
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # recording clears them
    before = torch.cuda.memory_allocated()
    subject.model(*subject.batch).backward()
    recording = subject.recorder.recording
    assert recording._held
    assert before + 0.98 * recording.bytes <= torch.cuda.memory_allocated() <= before + 1.02 * recording.bytes + 2**20
    # Gradients are what is left of it when it goes.
    gradients = sum(gradient.untyped_storage().nbytes() for gradient in recording.gradients)
    del recording
    subject.region.release()
    gc.collect()
    assert before + gradients <= torch.cuda.memory_allocated() <= before + gradients + 2**20
    zero(subject.model)
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_gradients_use_what_activations_leave(subject):
    """Made in the pool, they take no memory of their own: all the batch's values are larger than all of them."""
    subject.use(recorded=True)
    subject.model(*subject.batch).backward()
    made_inside = subject.recorder.recording.bytes
    subject.model(*subject.batch).backward()  # launched, its backward has not run yet
    subject.model(*subject.batch).backward()
    assert subject.recorder.recording.mode == "add"
    gradients = sum(gradient.untyped_storage().nbytes() for gradient in subject.recorder.recording.gradients)
    assert made_inside < subject.recorder.recording.bytes + 0.5 * gradients


def test_the_allocators_settings_are_left_as_they_were(subject):
    before = torch.cuda.memory._snapshot()["allocator_settings"]
    subject.use(recorded=True)
    subject.model(*subject.batch).backward()
    after = torch.cuda.memory._snapshot()["allocator_settings"]
    assert before["expandable_segments"] == after["expandable_segments"]
    assert before["max_split_size"] == after["max_split_size"]


def test_a_plan_that_was_replayed_is_replayed_when_loaded(tmp_path):
    """Many short kernels, which wait for the host: the plan is replayed, and so is the one that its file says."""
    torch.manual_seed(0)
    batch = torch.randn(512, 256, device="cuda"), torch.randint(10, (512,), device="cuda")
    model = Net().cuda()
    fitted = elbowroom.fit(model, *batch, budget="1GiB", kernels="inductor")
    (entry,) = fitted.elbowroom.entries.values()
    assert entry.plan.recorded
    path = tmp_path / "plan.json"
    entry.plan.save(path)
    del fitted, entry
    loaded = elbowroom.fit(model, *batch, budget="1GiB", kernels="inductor", plan=elbowroom.Plan.load(path))
    (entry,) = loaded.elbowroom.entries.values()
    assert entry.plan.recorded
    assert entry.plan.regions[0].measured_peak_bytes is not None
    descent(loaded, batch)
    (region,) = entry.regions
    recorder = region.programs[region.current].recorder
    assert recorder.recording is not None
    assert recorder._runs >= 2


@torch.library.custom_op("elbowroom_tests::waits", mutates_args=())
def waits(x: torch.Tensor) -> torch.Tensor:
    """Reads a number, for which the GPU has to be waited for: nothing that CUDA records."""
    return x * (1.0 if x.sum().item() > 0 else 2.0)


waits.register_fake(torch.empty_like)
waits.register_autograd(lambda _, gradient: gradient)


class Waits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(256, 256), nn.Linear(256, 1)

    def forward(self, x):
        return self.last(torch.tanh(waits(F.dropout(torch.tanh(self.first(x)), 0.1)))).mean()


@pytest.mark.filterwarnings("ignore:elbowroom")
def test_a_recording_that_cuda_refuses_disturbs_nobody(subject):
    """Neither random numbers, nor other models, and its memory comes back."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    model, x = Waits().cuda(), torch.randn(64, 256, device="cuda")
    model = elbowroom.fit(model, x, budget="1GiB", kernels="inductor")
    (entry,) = model.elbowroom.entries.values()
    (region,) = entry.regions
    build = region.programs[region.current].build
    region.install(replace(build, recorded=True))
    for _ in range(4):
        model(x).backward()
        model.zero_grad()
    recorder = region.programs[region.current].recorder
    assert recorder.recording is None
    assert not recorder._moves_left  # it was tried
    for _ in range(3):
        F.dropout(torch.ones(64, device="cuda"), 0.5)
    subject.use(recorded=True)
    for _ in range(3):
        subject.model(*subject.batch).backward()
        subject.model.zero_grad()
    assert subject.recorder.recording is not None
    subject.use(recorded=False)
    del model, entry, region, recorder, build
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 4 * 2**20
