"""The demonstration: two models trained for a few steps, plainly and in less memory, with the same gradients.

Each model trains from the same parameters, batches and random state every time. What is compared is every step's
loss and the gradient of every parameter, and the buffers in the end, bit by bit; parameters change in between, so
a difference in one step would show in the next ones too. On a GPU the models are larger and run in bfloat16.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from torch import Tensor

from elbowroom.api import fit
from elbowroom.capture.settings import capture_settings
from elbowroom.demo.models import SEED, STEPS, Subject, cnn_subject, transformer_subject
from elbowroom.errors import BudgetTooSmall
from elbowroom.execute.verification import same_bits
from elbowroom.measure.memory import Measurement, measure
from elbowroom.report.picture import Lines
from elbowroom.schedule.timeline import TimeLine
from elbowroom.session.fitted import session_of
from elbowroom.session.handle import Handle
from elbowroom.solve import Progress
from elbowroom.units import MAX_BYTES, format_bytes, format_seconds

SHARES = (1 / 2, 1 / 4)  # of what plain execution allocates during the step
_FRACTIONS = {1 / 2: "½", 1 / 4: "¼"}

Call = Callable[..., Tensor]


@dataclass(frozen=True)
class Run:
    """A model trained in one way. `share` is of the plain step's activations; None is plain execution."""

    model: str
    share: float | None
    least: bool  # the budget asked for was too small, and this is the least there is
    budget_bytes: int | None
    predicted_peak_bytes: int | None
    measured_peak_bytes: int
    step_time_s: float
    time_ratio: float
    identical: bool
    against: str  # "eager", or "aot_eager" where tracing alone changes the bits
    loss: float
    line: TimeLine

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "line"}


def run_training_demo(report: Progress) -> list[Run]:
    """Train both models in all ways, on the GPU if there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    subjects = (transformer_subject(device), cnn_subject(device))
    runs: list[Run] = []
    for number, subject in enumerate(subjects):

        def report_part(part: float, done: int = number) -> None:
            report((done + part) / len(subjects))

        with _repeatable(device):
            runs.extend(train_all_ways(subject, report_part))
    return runs


def training_table(runs: Sequence[Run]) -> Group:
    """One row per way, below its model, and what the columns mean in the end. Eighty columns are enough."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("\nbudget", no_wrap=True)
    for title in ("", "predicted\npeak", "measured\npeak", "\ntime", "gradients\nidentical"):
        table.add_column(title, justify="right", no_wrap=True)
    previous = ""
    for run in runs:
        if run.model != previous:
            if previous:
                table.add_row()
            table.add_row(f"[bold]{run.model}")
        table.add_row(
            f"  {_share_text(run)}",
            "" if run.budget_bytes is None else format_bytes(run.budget_bytes),
            "" if run.predicted_peak_bytes is None else format_bytes(run.predicted_peak_bytes),
            format_bytes(run.measured_peak_bytes),
            f"× {run.time_ratio:.2f}",
            _identity_text(run),
        )
        previous = run.model
    plain = ", ".join(f"{run.model} {format_seconds(run.step_time_s)}" for run in runs if run.share is None)
    note = (
        f"\n{STEPS} steps each on {_device_name()}; plain steps take: {plain}. Budgets and peaks count parameters, "
        "gradients, momentum and batch too; ½ and ¼ are of what plain execution allocates beyond those. Compared bit "
        "by bit with plain execution: every loss, the gradient of every parameter in every step, the buffers."
    )
    return Group(table, note)


def training_json(runs: Sequence[Run]) -> dict[str, Any]:
    return {"device": _device_name(), "steps": STEPS, "runs": [run.to_json() for run in runs]}


def demo_lines(runs: Sequence[Run]) -> dict[str, Lines]:
    """Memory over the step as measured, one panel per model."""
    panels: dict[str, dict[str, tuple[TimeLine, int | None]]] = {}
    for run in runs:
        panels.setdefault(run.model, {})[_share_text(run)] = (run.line, run.budget_bytes)
    return dict(panels)


# --- training ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """What training left behind: everything that is compared (on the CPU), and what it took."""

    values: Mapping[str, Tensor]
    loss: float
    step_time_s: float
    taken: Measurement


def train_all_ways(subject: Subject, report: Progress) -> Iterator[Run]:
    """Plainly, then within each share of the plain step's activations."""
    start = {name: value.detach().cpu().clone() for name, value in subject.model.state_dict().items()}
    plain = train(subject, subject.model, start)
    report(0.2)
    session = _session(subject)
    report(0.6)
    plan = _plan(session, subject)
    resident = plan.resident_bytes
    activations = _total(plain.taken, resident) - resident
    yield _run(subject, None, None, plain, plain, session, start)
    for number, share in enumerate(SHARES, start=1):
        least = _set_budget(session, resident + int(activations * share))
        trained = train(subject, session, start)
        budget = _plan(session, subject).budget_bytes
        yield _run(
            subject, (budget - resident) / activations if least else share, least, plain, trained, session, start
        )
        report(0.6 + 0.4 * number / len(SHARES))


def train(subject: Subject, call: Call, start: Mapping[str, Tensor]) -> Trained:
    """A few steps from the given state; then one more while its memory is measured."""
    model, device = subject.model, subject.device
    model.load_state_dict(start)
    optimizer = subject.optimizer()
    values: dict[str, Tensor] = {}
    times: list[float] = []
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.manual_seed(SEED)
    for number, batch in enumerate(subject.batches):
        with _timed(device, times):
            loss = _step(subject, call, batch, optimizer)
        values[f"loss {number}"] = loss.cpu()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            values[f"gradient {number} {name}"] = parameter.grad.cpu().clone()
    values.update((f"buffer {name}", buffer.cpu().clone()) for name, buffer in model.named_buffers())
    with measure(device) as taken:
        _step(subject, call, subject.batches[0], optimizer)
    return Trained(values, float(loss), min(times), taken)


def _step(subject: Subject, call: Call, batch: tuple[Tensor, ...], optimizer: torch.optim.Optimizer) -> Tensor:
    """One training step. Gradients keep their memory, so that it is the same in every step."""
    optimizer.zero_grad(set_to_none=False)
    with subject.precision():
        loss = call(*batch)
    torch.autograd.backward(loss)
    optimizer.step()
    return loss.detach()


def _session(subject: Subject) -> Handle:
    """The model fitted to more than it needs; budgets follow, and nothing is captured again for them."""
    with subject.precision():
        # PyTorch's own kernels, so that every bit can be compared.
        optimizer, example = subject.optimizer(), subject.batches[0]
        fitted = fit(
            subject.model, *example, budget=MAX_BYTES, optimizer=optimizer, kernels="torch", accumulates=True
        )
    return session_of(fitted)


def _plan(session: Handle, subject: Subject) -> Any:
    with subject.precision():
        plan = session.prepare(subject.batches[0], {}).plan
    assert plan is not None
    return plan


def _set_budget(session: Handle, budget: int) -> bool:
    """Plan within the budget, or the least there is; whether it had to be that."""
    try:
        session.set_budget(budget)
    except BudgetTooSmall as refusal:
        session.set_budget(refusal.least_budget)
        return True
    return False


def _run(
    subject: Subject,
    share: float | None,
    least: bool | None,
    plain: Trained,
    trained: Trained,
    session: Handle,
    start: Mapping[str, Tensor],
) -> Run:
    plan = _plan(session, subject)
    against = "eager"
    identical = _same(plain, trained)
    if not identical:
        with capture_settings(64):
            traced = train(subject, torch.compile(subject.model, backend="aot_eager", dynamic=False), start)
        if not _same(plain, traced) and _same(traced, trained):
            identical, against = True, "aot_eager"
    return Run(
        model=subject.title,
        share=share,
        least=bool(least),
        budget_bytes=None if share is None else plan.budget_bytes,
        predicted_peak_bytes=None if share is None else plan.peak_bytes,
        measured_peak_bytes=_total(trained.taken, plan.resident_bytes),
        step_time_s=trained.step_time_s,
        time_ratio=trained.step_time_s / plain.step_time_s,
        identical=identical,
        against=against,
        loss=trained.loss,
        line=_line(trained.taken, plan.resident_bytes),
    )


def _same(a: Trained, b: Trained) -> bool:
    return all(same_bits(value, b.values[name]) for name, value in a.values.items())


def _total(taken: Measurement, resident: int) -> int:
    """A step's peak with what is there all the time, which only CUDA's allocator can tell."""
    return taken.peak_bytes + (resident if taken.device == "cpu" else taken.start_bytes)


def _line(taken: Measurement, resident: int) -> TimeLine:
    assert taken.timeline is not None
    return taken.timeline.above(_total(taken, resident) - taken.peak_bytes)


@contextmanager
def _repeatable(device: torch.device) -> Iterator[None]:
    """Steps that can be compared: the same bits every time, and times that mean something."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # on models so small, several would mostly wait for one another
        try:
            yield
        finally:
            torch.set_num_threads(threads)
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    deterministic: Any = torch.utils.deterministic
    before, filling = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True)  # attention's backward is not by default, nor with a mere warning
        deterministic.fill_uninitialized_memory = False  # takes time and proves nothing here
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        deterministic.fill_uninitialized_memory = filling


@contextmanager
def _timed(device: torch.device, times: list[float]) -> Iterator[None]:
    _wait(device)
    began = time.perf_counter()
    yield
    _wait(device)
    times.append(time.perf_counter() - began)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- words ---------------------------------------------------------------------------------------------------


def _share_text(run: Run) -> str:
    if run.share is None:
        return "plain"
    if run.least:
        return f"least there is ({run.share:.0%})"
    return f"{_FRACTIONS[run.share]} of activations"


def _identity_text(run: Run) -> str:
    if run.share is None:
        return ""
    return "NO" if not run.identical else "yes" if run.against == "eager" else f"yes, to {run.against}"


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "one CPU thread"
