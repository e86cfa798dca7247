"""Programs compiled by Inductor: they keep the budget, the measured peak is the plan's, and gradients are right.

Compiling takes seconds for every program, so each model is fitted once, and all tests share its programs.
"""

from __future__ import annotations

import copy
import gc
import shutil
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.capture import rewrite  # noqa: E402
from elbowroom.capture.operators import draws  # noqa: E402
from elbowroom.demo.training import Transformer  # noqa: E402
from elbowroom.errors import BudgetTooSmall, InputError  # noqa: E402
from elbowroom.execute import recording, rehearsal  # noqa: E402
from elbowroom.execute.trials import Trials  # noqa: E402
from elbowroom.session.session import Session  # noqa: E402
from elbowroom.step.program import make_program
from elbowroom.step.referee import predict

pytestmark = [
    pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="Inductor needs a C++ compiler"),
    pytest.mark.usefixtures("quick_compiler"),
]

SHARES = (1.0, 0.35)  # of what the step takes with everything saved, resident state aside
MARGIN = 2048  # bytes


class Cnn(nn.Module):
    """Convolutions with batch norm, all alike: the kernels of one serve for all."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.head = nn.Linear(width, 10)

    def forward(self, images, labels):
        return F.cross_entropy(self.head(self.layers(images).mean((2, 3))), labels)


class Layer(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())


def transformer():
    tokens = torch.randint(32, (2, 16, 32))
    return Transformer(32, 32, 64, 2, layers=4, dropout=0.1), (tokens[0], tokens[1])


def cnn():
    """Channels last, as Inductor wants its images: else it copies every weight, and there are more kernels."""
    images = torch.randn(16, 8, 16, 16).contiguous(memory_format=torch.channels_last)
    return Cnn(8, layers=8).to(memory_format=torch.channels_last), (images, torch.randint(10, (16,)))


@dataclass
class Subject:
    """A fitted model, a program for each share, and what `torch.compile` computes."""

    name: str
    fitted: Any
    batch: tuple[Any, ...]
    state: dict[str, Any]
    before: list[Any]  # random state, buffers, gradients, around `fit`
    after: list[Any]
    budgets: dict[float, int]
    programs: dict[float, Any]
    expected: Step

    @property
    def entry(self) -> Any:
        (entry,) = self.fitted.elbowroom.entries.values()
        return entry

    @property
    def region(self) -> Any:
        (region,) = self.entry.regions
        return region

    def use(self, share: float) -> None:
        self.region.install(self.programs[share])

    def step(self, call: Any = None) -> Step:
        """One step from the same state, gradients as the caller left them."""
        self.fitted.load_state_dict(self.state)
        torch.manual_seed(3)
        loss = (self.fitted if call is None else call)(*self.batch)
        loss.backward()
        return Step(loss.detach(), gradients(self.fitted), [b.clone() for b in self.fitted.buffers()])


@dataclass
class Step:
    loss: Any
    gradients: list[Any]
    buffers: list[Any]


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def state_of(model):
    return [torch.get_rng_state(), *(b.clone() for b in model.buffers()), *gradients(model)]


def set_gradients(model, value: float | None) -> None:
    for p in model.parameters():
        p.grad = None if value is None else torch.full_like(p, value)


def peak_of(subject: Subject) -> int:
    """Of a step whose gradients exist. The first one compiles."""
    set_gradients(subject.fitted, 0)
    subject.step()
    gc.collect()
    torch.manual_seed(3)
    with elbowroom.measure("cpu", timeline=False) as measured:
        subject.fitted(*subject.batch).backward()
    return measured.peak_bytes


def assert_close(ours: Step, theirs: Step) -> None:
    """Kernels that fuse otherwise sum in another order: the last bits may differ, no more."""
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(ours.buffers, theirs.buffers, rtol=1e-5, atol=1e-6)
    for a, b in zip(ours.gradients, theirs.gradients, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-8


@pytest.fixture(scope="module", params=[transformer, cnn], ids=["transformer", "cnn"])
def subject(request):
    torch.manual_seed(0)
    model, batch = request.param()
    state = copy.deepcopy(model.state_dict())
    set_gradients(model, 0.5)
    before = state_of(model)
    fitted = elbowroom.fit(model, *batch, budget="1TiB", kernels="inductor", times="estimate")
    after = state_of(model)
    made = Subject(request.param.__name__, fitted, batch, state, before, after, {}, {}, None)
    (everything,) = made.entry.trials.known
    for share in SHARES:
        budget = made.entry.plan.resident_bytes + int(share * everything.peak_bytes) + MARGIN
        fitted.elbowroom.set_budget(budget)
        made.budgets[share], made.programs[share] = budget, made.region.program
    set_gradients(model, None)
    made.expected = made.step(torch.compile(model, dynamic=False))
    return made


def test_fitting_changes_nothing(subject):
    for a, b in zip(subject.before, subject.after, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("share", SHARES)
def test_the_measured_peak_is_the_plans_and_within_the_budget(subject, share):
    subject.use(share)
    subject.fitted.elbowroom.set_budget(subject.budgets[share])
    resident = subject.entry.plan.resident_bytes
    peak = peak_of(subject)
    assert resident + peak <= subject.budgets[share]
    assert subject.entry.plan.peak_bytes - resident == pytest.approx(peak, rel=0.01)


def test_only_smaller_budgets_recompute(subject):
    everything, *others = subject.programs.values()
    assert not everything.reruns
    assert all(program.reruns for program in others)


@pytest.mark.parametrize("share", SHARES)
def test_a_step_gives_what_torch_compile_gives(subject, share):
    subject.use(share)
    set_gradients(subject.fitted, None)
    step = subject.step()
    if subject.name == "transformer":
        assert torch.equal(step.loss, subject.expected.loss)
    assert_close(step, subject.expected)


def test_gradients_are_as_exact_as_those_of_torch_compile(subject):
    if subject.name == "transformer":
        pytest.skip("its dropout draws other numbers in float64")
    model = copy.deepcopy(subject.fitted.elbowroom.model)
    model.load_state_dict(subject.state)
    set_gradients(model.double(), None)
    images, labels = subject.batch
    model(images.double(), labels).backward()
    exact = torch.cat([p.grad.flatten() for p in model.parameters()])

    def distance(step):
        return (torch.cat([g.flatten() for g in step.gradients]) - exact).norm()

    for program in subject.programs.values():
        subject.region.install(program)
        set_gradients(subject.fitted, None)
        assert distance(subject.step()) <= 2 * distance(subject.expected)


def test_batch_norm_counts_a_step_once(subject):
    if subject.name == "transformer":
        pytest.skip("it has none")
    counters = [b for name, b in subject.fitted.named_buffers() if "num_batches" in name]
    for program in subject.programs.values():
        subject.region.install(program)
        subject.step()
        assert counters
        assert all(counter == 1 for counter in counters)


@pytest.mark.parametrize("share", SHARES)
def test_gradients_are_the_slope_of_the_loss(subject, share):
    """What is dropped in the backward is what the forward dropped."""
    if subject.name == "cnn":
        pytest.skip("it drops nothing, and its ReLUs have kinks")
    subject.use(share)
    set_gradients(subject.fitted, None)
    found = subject.step().gradients
    direction = [torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * p.norm() for p in found]
    length = sum(d.square().sum() for d in direction).sqrt()
    slope = sum((g.double() * d.double()).sum() for g, d in zip(found, direction, strict=True)) / length

    def loss_at(distance):
        subject.fitted.load_state_dict(subject.state)
        with torch.no_grad():
            for p, d in zip(subject.fitted.parameters(), direction, strict=True):
                p.add_(d, alpha=float(distance / length))
        torch.manual_seed(3)
        return subject.fitted(*subject.batch).item()

    step = 2e-2
    slopes = [(loss_at(step * k) - loss_at(-step * k)) / (2 * step * k) for k in (1, 2)]
    assert (4 * slopes[0] - slopes[1]) / 3 == pytest.approx(slope.item(), rel=0.01)


@pytest.mark.parametrize("share", SHARES)
def test_gradients_are_added_to_those_there(subject, share):
    subject.use(share)
    set_gradients(subject.fitted, None)
    written = subject.step()
    set_gradients(subject.fitted, 0)
    kept = [p.grad for p in subject.fitted.parameters()]
    added = subject.step()
    assert all(p.grad is grad for p, grad in zip(subject.fitted.parameters(), kept, strict=True))
    assert_close(added, written)
    twice = subject.step()
    for once, total in zip(written.gradients, twice.gradients, strict=True):
        assert (total - 2 * once).norm() <= 1e-5 * total.norm() + 1e-8


def test_some_gradients_exist_and_some_do_not(subject):
    set_gradients(subject.fitted, None)
    expected = subject.step()
    for number, p in enumerate(subject.fitted.parameters()):
        p.grad = torch.zeros_like(p) if number % 2 else None
    assert_close(subject.step(), expected)


def test_autograd_takes_gradients_where_it_wants_them(subject):
    """`torch.autograd.grad` writes none, and a hook sees its own before it is written."""
    if subject.name == "cnn":
        pytest.skip("one model is enough: every program has a backward to compile for this")
    subject.region.install(subject.programs[0.35])
    set_gradients(subject.fitted, None)
    expected = subject.step()
    set_gradients(subject.fitted, None)
    torch.manual_seed(3)
    found = torch.autograd.grad(subject.fitted(*subject.batch), list(subject.fitted.parameters()))
    assert all(p.grad is None for p in subject.fitted.parameters())
    assert_close(Step(expected.loss, list(found), expected.buffers), expected)
    seen = []
    hook = subject.fitted.head.weight.register_hook(lambda g: seen.append(g.clone()) or 2 * g)
    doubled = subject.step()
    hook.remove()
    number = [name for name, _ in subject.fitted.named_parameters()].index("head.weight")
    expected.gradients[number] *= 2
    assert_close(doubled, expected)
    assert torch.equal(2 * seen[0], doubled.gradients[number])


def test_a_second_backward_through_a_retained_graph(subject):
    subject.region.install(subject.programs[0.35])
    set_gradients(subject.fitted, 0)
    once = subject.step()
    set_gradients(subject.fitted, 0)
    torch.manual_seed(3)
    subject.fitted.load_state_dict(subject.state)
    loss = subject.fitted(*subject.batch)
    loss.backward(retain_graph=True)
    loss.backward()
    for a, b in zip(gradients(subject.fitted), once.gradients, strict=True):
        assert (a - 2 * b).norm() <= 1e-5 * a.norm() + 1e-8


def test_a_pending_backward_belongs_to_the_program_of_its_forward(subject):
    set_gradients(subject.fitted, None)
    subject.region.install(subject.programs[0.35])
    subject.fitted.load_state_dict(subject.state)
    torch.manual_seed(3)
    loss = subject.fitted(*subject.batch)
    subject.region.install(subject.programs[1.0])
    loss.backward()
    assert_close(Step(loss.detach(), gradients(subject.fitted), subject.expected.buffers), subject.expected)


def test_a_larger_budget_never_gets_a_program_that_was_slower(subject):
    times = []
    for share in sorted(subject.programs):
        subject.fitted.elbowroom.set_budget(subject.budgets[share])
        (time,) = (t.time_s for t in subject.entry.trials.known if t.planned[0].program == subject.region.program)
        room = subject.budgets[share] - subject.entry.plan.resident_bytes
        fitting = [t.time_s for t in subject.entry.trials.known if t.peak_bytes <= room - 1024]
        assert time == min(fitting)
        times.append(time)
    assert times == sorted(times, reverse=True)


def test_evaluation_without_gradients(subject):
    subject.fitted.load_state_dict(subject.state)
    plain = subject.fitted.elbowroom.model
    with torch.no_grad():
        subject.fitted.eval()
        assert torch.equal(subject.fitted(*subject.batch), plain(*subject.batch))
        subject.fitted.train()
        torch.manual_seed(3)
        assert not subject.fitted(*subject.batch).requires_grad


def test_the_source_is_both_graphs(subject):
    subject.region.install(subject.programs[0.35])
    source = subject.region.source
    assert source.count("def forward(self") == 2
    forward, backward = source.split("\n\n", 1)
    assert "gradient_of_" in backward
    assert "tangents_1" in backward
    assert "tangents_1" not in forward


# --- what can go wrong ---------------------------------------------------------------------------------------


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))), torch.randn(32, 16)


def assert_falls_back(budget, match: str) -> None:
    model, x = perceptron()
    plain = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=match) as said:
        fitted = elbowroom.fit(model, x, budget=budget, kernels="inductor", times="estimate")
    assert len([s for s in said if "elbowroom" in str(s.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted(x).square().sum().backward()
    plain(x).square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    (entry,) = fitted.elbowroom.entries.values()
    assert entry.plan.peak_bytes <= entry.plan.budget_bytes


def test_a_compiler_that_fails_is_said_once_and_done_without(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no compiler here\nand more")

    monkeypatch.setattr("elbowroom.execute.fused.compile_fx_inner", fail)
    assert_falls_back("1GiB", r"PyTorch's own kernels.*compiling it failed: no compiler here$")


def test_a_graph_that_cannot_be_contracted_says_what_failed(monkeypatch):
    def fail(captured):
        raise KeyError("odd")

    monkeypatch.setattr("elbowroom.capture.backend.contract", fail)
    assert_falls_back("1GiB", r"PyTorch's own kernels.*compiling it failed: KeyError: 'odd'$")


def test_a_budget_that_fused_programs_cannot_meet_is_met_without_them(monkeypatch):
    monkeypatch.setattr(Trials, "best", lambda *args: None)
    assert_falls_back("1GiB", r"PyTorch's own kernels.*compiled, it needs at least")


def test_a_budget_that_nothing_can_meet_is_refused():
    model, x = perceptron()
    with pytest.raises(BudgetTooSmall) as unfused:
        elbowroom.fit(model, x, budget=1024, kernels="torch", times="estimate")
    with pytest.raises(BudgetTooSmall) as either:
        elbowroom.fit(model, x, budget=1024, kernels="inductor", times="estimate")
    assert either.value.least_budget <= unfused.value.least_budget


def test_a_budget_too_small_for_want_of_a_compiler_says_so(monkeypatch):
    monkeypatch.setattr("elbowroom.execute.fused.compile_fx_inner", None)
    model, x = perceptron()
    with pytest.raises(BudgetTooSmall, match=r"is too small.*PyTorch's own kernels, because compiling it failed"):
        elbowroom.fit(model, x, budget=1024, kernels="inductor", times="estimate")


def test_a_look_at_the_model_that_runs_out_of_memory_is_no_reason_to_give_up(monkeypatch):
    def fail(arguments):
        arguments.clear()
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr("elbowroom.execute.region.emit_outputs_only", lambda *args: fail)
    model, x = perceptron()
    model(x).square().sum().backward()
    expected = gradients(model)
    set_gradients(model, None)
    fitted = elbowroom.fit(model, x, budget="1GiB", kernels="torch", times="estimate")
    fitted(x).square().sum().backward()
    for found, wanted in zip(gradients(model), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("fails", [False, True])
def test_the_compile_backend(monkeypatch, fails):
    torch._dynamo.reset()
    model, x = perceptron()
    model(x).square().sum().backward()
    expected = gradients(model)
    set_gradients(model, None)
    if fails:
        monkeypatch.setattr("elbowroom.execute.fused.compile_fx_inner", None)
    options = {"budget": "1GiB", "kernels": "inductor", "times": "estimate"}
    compiled = torch.compile(model, backend="elbowroom", options=options)
    with pytest.warns(UserWarning, match=r"PyTorch's own kernels.*compiling it failed") if fails else nullcontext():
        compiled(x).square().sum().backward()
    for found, wanted in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("field", "value"), [("kernels", "triton"), ("kernels", None), ("compilations", 0)])
def test_options_that_make_no_sense_are_named(field, value):
    model, x = perceptron()
    with pytest.raises(InputError, match=field) as error:
        elbowroom.fit(model, x, budget="1GiB", **{"kernels": "inductor", field: value})
    assert error.value.field == field


def test_stages_cut_by_hand_are_not_fused():
    model, x = perceptron()
    with pytest.raises(InputError, match="kernels"):
        elbowroom.fit(model, x, budget="1GiB", kernels="inductor", stages=list(model))


def test_a_model_that_changes_takes_one_step_without_a_trial_and_is_tried_again(monkeypatch):
    """Freezing a layer makes PyTorch trace anew, in the middle of a step."""
    captured = []
    on_capture = Session._on_capture

    def noted(self, region):
        during = self._looks.calls is None
        on_capture(self, region)
        captured.append((during, region.captured.cones is not None))

    monkeypatch.setattr(Session, "_on_capture", noted)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    plain, x = copy.deepcopy(model), torch.randn(64, 16)
    fitted = elbowroom.fit(model, x, budget="1GiB", kernels="inductor", loss=lambda y: y.sum(), strict=True)
    for step in range(3):
        for each in (fitted, plain):
            each[2].requires_grad_(step < 1)
            each.zero_grad()
        fitted(x).backward()
        plain(x).sum().backward()
        for ours, theirs in zip(fitted.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    fused, during = True, True
    assert captured == [(not during, fused), (during, not fused)]
    (entry,) = fitted.elbowroom.entries.values()
    assert len(entry.regions[0].captured.graph.gradients) == 4
    assert entry.regions[0].programs[entry.regions[0].current][1].fused is not None


class ScaledByItself(nn.Module):
    """Fused kernels round its sum otherwise than tracing did, and what follows is traced anew with the new number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.last(x * x.sum().item()).square().mean()


def test_a_step_of_which_a_part_is_traced_anew_is_verified_as_a_fused_one():
    torch.manual_seed(0)
    model, x = ScaledByItself(), torch.randn(64, 32)
    plain = copy.deepcopy(model)
    fitted = elbowroom.fit(model, x, budget="1GiB", kernels="inductor", loss=lambda loss: loss, verify=True)
    fitted(x).backward()
    plain(x).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


class Joins(nn.Module):
    """What the first product makes, beside what the others make of it: its gradient waits for theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(32, 16)
        self.between = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x):
        start = x = self.first(x)
        for layer in self.between:
            x = torch.tanh(torch.sin(layer(x)))
        return self.last(torch.cat([start, x], 1)).square().mean()


def test_a_part_of_a_gradient_is_kept_apart_or_shown(monkeypatch):
    monkeypatch.setattr(rewrite, "_LARGE", 1)
    monkeypatch.setattr(rewrite, "_LONG", {True: 20})
    torch.manual_seed(0)
    model, x = Joins(), torch.randn(256, 16)
    model(x).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    fitted = elbowroom.fit(model, x, budget="1TiB", loss=lambda loss: loss, kernels="inductor", compilations=1)
    (entry,) = fitted.elbowroom.entries.values()
    (region,), (planner,) = entry.regions, entry.planners
    graph = region.captured.graph
    for apart in (False, True):
        region.install(make_program(graph, graph.backward, copies_parts=apart))
        assert ("force_stride_order" in region.source) == apart
        model.zero_grad()
        fitted(x).backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        measured = rehearsal.launched(region, region.current, 0, planner.around.late_bytes)
        assert measured.peak_bytes <= predict(graph, region.program, planner.around).peak_bytes + MARGIN


def test_random_numbers_drawn_again_are_stored_if_they_are_read_twice():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    x = torch.randn(256, 16)
    fitted = elbowroom.fit(model, x, budget="1TiB", loss=lambda y: y.mean(), kernels="inductor", compilations=1)
    (entry,) = fitted.elbowroom.entries.values()
    (region,) = entry.regions
    graph, cones = region.captured.graph, region.captured.cones
    (mask,) = (op for op in graph.forward if any(map(draws, cones[op][:-1])))
    (dropped,) = (op for op in graph.forward if mask in graph.ops[op].reads)
    gradients = []
    for again in ([], [mask], [mask, dropped]):
        region.install(make_program(graph, [*again, *graph.backward]))
        assert list(region.program.reruns) == again
        assert ("force_stride_order" in region.source) == (len(again) == 2)
        torch.manual_seed(1)
        fitted.zero_grad()
        fitted(x).backward()
        gradients.append([parameter.grad for parameter in fitted.parameters()])
    for others in gradients[1:]:
        for first, other in zip(gradients[0], others, strict=True):
            assert torch.equal(first, other)


class Shared(nn.Module):
    """Two parameters with the same gradient, and a third whose gradient is the one that arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = (nn.Parameter(torch.randn(8, 16)) for _ in range(3))

    def forward(self, x):
        return ((self.one + self.two) * x).sin() + self.last


@pytest.fixture(scope="module", params=["torch", "inductor"])
def shared(request):
    x = torch.randn(8, 16)
    return elbowroom.fit(Shared(), x, budget="1GiB", kernels=request.param, times="estimate"), x


def test_every_gradient_has_memory_of_its_own(shared):
    (fitted, x), arriving = shared, torch.randn(8, 16)
    for _ in range(2):
        fitted.zero_grad()
        fitted(x).backward(arriving)
    one, two, last = (parameter.grad for parameter in fitted.parameters())
    assert len({tensor.data_ptr() for tensor in (one, two, last, arriving)}) == 4
    assert torch.equal(one, two)
    assert torch.equal(last, arriving)


def test_gradients_set_to_none_are_gone_at_once(shared):
    """The next step uses their memory: nothing may hold them until garbage is collected."""
    fitted, x = shared
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            fitted(x).sum().backward()
            left = [weakref.ref(parameter.grad) for parameter in fitted.parameters()]
            fitted.zero_grad()
            assert [gradient() for gradient in left] == [None] * 3
    finally:
        gc.enable()


def test_little_gradients_of_a_step_that_may_be_recorded_are_not_late(monkeypatch):
    """They get a place of their own, unless the budget becomes so small that they are no longer little."""
    monkeypatch.setattr(recording, "recordable", lambda captured: True)
    torch._dynamo.reset()
    model, batch = Cnn(16, layers=8), (torch.randn(8, 16, 8, 8), torch.randint(10, (8,)))
    fitted = elbowroom.fit(model, *batch, budget="1GiB", kernels="inductor", times="estimate")
    (entry,) = fitted.elbowroom.entries.values()
    assert not entry.late
    assert not entry.plan.late_gradients
    (region,) = entry.regions
    fitted(*batch).backward()
    assert region.programs[region.current][1].fused.has_run == {"write"}
    room = 19 * sum(p.numel() * p.element_size() for p in model.parameters())
    fitted.zero_grad()
    fitted.elbowroom.set_budget(entry.plan.resident_bytes + room)
    assert entry.plan.late_gradients
    assert len(entry.late) == len(list(model.parameters()))
    with pytest.raises(BudgetTooSmall):
        fitted.elbowroom.set_budget(entry.plan.resident_bytes + 1)
    assert entry.late
    assert region.programs[region.current][1].fused.makes == "return"
    fitted.elbowroom.set_budget("1GiB")
    assert not entry.late
    assert region.programs[region.current][1].fused.makes == "write"
