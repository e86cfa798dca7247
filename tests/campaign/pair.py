"""A fitted model and its plain twin, stepped side by side from the same state with the same random numbers."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import re
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

import elbowroom
from campaign.comparing import (
    INTERNAL,
    MEAN_OF,
    Difference,
    Failure,
    Generators,
    apart,
    largest_in,
    state_differences,
    state_of,
    tensors_in,
)
from campaign.metering import TOOK_MORE, Meter, gradients_on_host, storages

NOT_KEPT = re.compile(r"elbowroom: .* is not kept", re.S)
# How far apart planned and plain may be without being wrong, where tracing alone makes PyTorch run other kernels.
ROUNDING = {"torch": 1e-5, "inductor": 1e-3}
ROUNDING_HALF = 3e-2
REFUSALS = 3  # a branch that depends on data may need more than the one that named a budget
LITTLE_BYTES = 64  # a number or two that tracing keeps
SLOW_S = 0.15  # a step that is planned takes some milliseconds at these sizes, planning takes more than that


@dataclass(frozen=True)
class Trial:
    """One case, without its model and events: what to fit it with.

    The budget is `share` of the way from the least to what the plain step takes.
    """

    seed: int
    width: int
    length: int
    classes: int
    share: float = 0.3
    batch: int = 8
    loss_inside: bool = False
    optimizer: str = ""  # "SGD" or "Adam": that it is passed to `fit`
    strict: bool = False  # what is outside the plan is an error, and a warning is not enough
    kernels: str = "torch"
    device: str = "cpu"
    checks: int = 2  # steps after an event
    takes_scale: bool = False
    replaceable: str = ""
    draws: bool = False
    reference: str = "eager"  # or "aot_eager": the plain side is traced, without any plan
    exact: bool = False  # everything is computed in double precision
    tolerated: tuple[str, ...] = ()  # beginnings of kinds of failures that are known and looked past


@dataclass
class Situation:
    """How steps are made at present."""

    batch: int
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    backwards: int = 1
    gradients: str = "none"  # at the start of a step: "none", "zero", or "kept"
    hooks_outputs: bool = False  # a hook on the tensor that the loss reads
    number: int = 0  # of steps so far
    went_around: bool = False  # whether a step was made without a call of the model


@dataclass
class Outcome:
    """What one step did."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    failure: BaseException | None = None
    printed: str = ""
    said: list[str] = field(default_factory=list)
    peak_bytes: int = 0  # all that is allocated for the step at its highest, what is resident included
    end_bytes: int = 0
    time_s: float = 0.0
    tried: bool = False  # programs ran on trial meanwhile


@dataclass
class Side:
    """One of the two models, and what belongs to it."""

    model: Any
    criterion: Any
    is_planned: bool
    optimizer: Any = None
    hooked: list[Any] = field(default_factory=list)  # what hooks saw
    handles: list[Any] = field(default_factory=list)  # to remove hooks with

    def __post_init__(self) -> None:
        self.forward: Any = lambda *args: self.model(*args)
        self.whole_step: Any = self._whole_step

    def _whole_step(self, *args: Any) -> tuple[Any, torch.Tensor]:
        output = self.model(*args[:-1])
        return output, self.criterion(output, args[-1])

    def trace(self) -> None:
        """Run as PyTorch traces it from now on: in some layers that alone means other kernels."""
        self.forward, self.whole_step = _traced(self.forward), _traced(self.whole_step)

    def resident(self, *batch: torch.Tensor) -> dict[int, int]:
        parameters = list(self.model.parameters())
        held = [*parameters, *(p.grad for p in parameters), *self.model.buffers(), *batch]
        return storages([*held, *tensors_in(list(self.optimizer.state.values()))])


class Pair:
    """Both sides, and the budget. `failures` fills as things go wrong."""

    def __init__(self, trial: Trial, plain: Side, planned: Side) -> None:
        self.trial, self.plain, self.planned = trial, plain, planned
        self.situation = Situation(trial.batch, torch.float64 if trial.exact else torch.float32)
        self.data = torch.Generator().manual_seed(trial.seed)
        self.budget = self.budget_before = 0
        # On a GPU whatever else is allocated there counts, too: now, and when the plan in force was made.
        self.others_now = self.others_bytes = 0
        self.said: list[str] = []  # warnings about the budget since the last new plan
        self.may_refuse = False  # something has changed since the last step that may need more memory
        self.ended = False  # it was refused for good, which `strict` asks for
        self.rounded = False  # whether bits differed, by no more than rounding
        self.failures: list[Failure] = []
        self.plans: list[Any] = []  # that some step had
        self.new_optimizers()
        if trial.reference == "aot_eager":
            plain.trace()

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.plain, self.planned

    def fail(self, kind: str, text: str, share: float = math.inf) -> None:
        if not kind.startswith(self.trial.tolerated):
            self.failures.append(Failure(kind, text, share))

    def new_optimizers(self) -> None:
        """Both sides get one for the parameters as they are now; whoever was told of the old one is told."""
        for side in self.sides:
            side.optimizer = make_optimizer(self.trial, side.model)
        if self.trial.optimizer and self.budget:
            session = self.planned.model.elbowroom
            with self.noting():
                try:
                    session.set_optimizer(self.planned.optimizer)
                except elbowroom.BudgetTooSmall as refusal:
                    self._raise_budget(refusal)
                    session.set_optimizer(self.planned.optimizer)

    def new_plan(self) -> None:
        """What was said before does not count any more."""
        self.said, self.may_refuse = [], True

    def note_said(self, texts: Iterable[str]) -> None:
        """A warning that the budget is not kept holds until there is another plan."""
        self.said += [text for text in texts if NOT_KEPT.match(text)]

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """What is said in the block, of the budget, is noted."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        self.note_said(str(each.message) for each in caught)

    # --- steps ---

    def draw_batch(self) -> tuple[tuple[Any, ...], torch.Tensor]:
        t, now = self.trial, self.situation
        now.number += 1
        x = torch.randn(now.batch, t.length, t.width, generator=self.data).to(t.device, now.dtype)
        y = torch.randn(now.batch, t.length, t.classes, generator=self.data).to(t.device, now.dtype)
        return ((x, 1.0 + 0.05 * now.number) if t.takes_scale else (x,)), y

    def step(self, *, metered: bool = True, compare: bool = True, updates: bool = True) -> tuple[Outcome, Outcome]:
        """One step on both sides, compared; then the optimizers' update. Over budget it may be only if it says so, or
        if it was said before that the budget is not kept; with `strict` not at all. None where the pair has ended."""
        if self.ended:
            return Outcome(), Outcome()
        args, y = self.draw_batch()
        earlier, before = state_of(self.planned.model), Generators.now()
        plain = self.run(self.plain, args, y, metered=metered)
        after_plain = Generators.now()
        before.put_back()
        with gradients_on_host(self.plain.model):
            self._look_at_others(args, y)
            planned = self.run(self.planned, args, y, metered=metered)
        after_planned = Generators.now()
        self.note_said(planned.said)
        if isinstance(planned.failure, elbowroom.BudgetTooSmall) and plain.failure is None:
            self._refused(planned.failure, earlier)
            return plain, planned
        if self.trial.strict and isinstance(planned.failure, elbowroom.Unplanned | elbowroom.OverBudget):
            self.ended = True
            return plain, planned
        if type(plain.failure) is not type(planned.failure):
            self._exceptions_differ(plain.failure, planned.failure)
        elif compare:
            found = list(after_plain.differences(after_planned)) + list(self._differences(plain, planned))
            self._judge(found, " after an exception" if plain.failure else "")
        if metered and planned.failure is None:
            self._judge_peak(planned)
        if updates and not self.failures:
            for side in self.sides:
                side.optimizer.step()
        if self.situation.gradients != "kept":
            self.clear_gradients()
        return plain, planned

    def _look_at_others(self, args: tuple[Any, ...], y: torch.Tensor) -> None:
        """If more of a GPU is in use by others than was when the budget was chosen, a refusal may be due."""
        if self.trial.device == "cpu":
            return
        held = self.planned.resident(*self._held(args, y))
        self.others_now = torch.cuda.memory_allocated() - sum(held.values())
        if self.budget != self.budget_before:
            self.others_bytes, self.budget_before = self.others_now, self.budget
        self.may_refuse |= self.others_now > self.others_bytes

    def clear_gradients(self) -> None:
        for side in self.sides:
            side.optimizer.zero_grad(set_to_none=self.situation.gradients != "zero")

    def _held(self, args: tuple[Any, ...], y: torch.Tensor) -> list[torch.Tensor]:
        """The batch, as far as it is known: nobody knows of a target that only a loss outside reads. On CUDA all that
        is allocated counts, and it is among the others."""
        return [*tensors_in(args), *([y] if self.trial.loss_inside else [])]

    def run(self, side: Side, args: tuple[Any, ...], y: torch.Tensor, *, metered: bool = False) -> Outcome:
        """One step of one side: forward, loss, backward. The caller keeps the output meanwhile, as people do."""
        outcome, printed = Outcome(), io.StringIO()
        held = self._held(args, y)
        before = side.resident(*held)
        meter: Any = Meter(self.trial.device) if metered else contextlib.nullcontext()
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
            warnings.simplefilter("always")
            with meter:
                began = time.perf_counter()
                try:
                    outcome.outputs = self._train(side, args, y)
                except Exception as failure:
                    outcome.failure = failure.with_traceback(None)
                    outcome.failure.__context__ = outcome.failure.__cause__ = None  # they would keep what they hold
                outcome.time_s = time.perf_counter() - began
        outcome.printed = printed.getvalue()
        outcome.said = [str(each.message) for each in caught if str(each.message).startswith("elbowroom")]
        if metered:
            died = before.keys() - side.resident(*held).keys()
            outcome.peak_bytes = sum(before.values()) - sum(before[address] for address in died) + meter.peak_bytes
            outcome.end_bytes = meter.end_bytes
        outcome.outputs = [tensor.cpu() for tensor in outcome.outputs]
        tries = self.trial.kernels == "inductor" or self.trial.device != "cpu"
        outcome.tried = side.is_planned and tries and self._has_new_plan()
        if outcome.tried:
            self.others_bytes = self.others_now
        return outcome

    def _has_new_plan(self) -> bool:
        """Whether the step that has just ended was planned. With fused kernels, and on a GPU, programs ran
        on trial then.

        What they take is known only afterwards. The steps that follow tell whether the plan is kept.
        """
        try:
            plan = self.planned.model.elbowroom.plan
        except elbowroom.ElbowroomError:  # there is none
            return False
        is_new = all(plan is not known for known in self.plans)
        self.plans += [plan] * is_new
        return is_new

    def _train(self, side: Side, args: tuple[Any, ...], y: torch.Tensor) -> list[torch.Tensor]:
        outputs = []
        for _ in range(self.situation.backwards):
            with self.autocast():
                if side.is_planned and self.trial.loss_inside:
                    output = loss = side.model(*args, y)
                elif self.trial.loss_inside:
                    output, loss = side.whole_step(*args, y)
                else:
                    output = side.forward(*args)
                    loss = side.criterion(output, y)
            if self.situation.hooks_outputs:  # the one that the loss reads: tracing calls others' hooks with None
                tensors_in(output)[0].register_hook(lambda gradient: side.hooked.append(tuple(gradient.shape)))
            loss.backward()
            # Gradients and graphs go with the tensors; what is compared must hold neither.
            outputs += [tensor.detach() for tensor in (tensors_in(output) if output is not loss else ())]
            outputs.append(loss.detach())
        return outputs

    def autocast(self) -> Any:
        return torch.autocast(self.trial.device, torch.bfloat16, enabled=self.situation.autocast)

    # --- judging a step ---

    def _differences(self, plain: Outcome, planned: Outcome) -> Iterator[Difference]:
        expected, actual = plain.outputs, planned.outputs
        if self.trial.loss_inside:  # the planned side answers with the loss alone
            each = len(expected) // max(1, self.situation.backwards)
            expected = expected[each - 1 :: each] if each else []
        # A mean that cancels out is as exact as the numbers that it is made of, which are among the outputs.
        share, text = apart(list(expected), list(actual), largest_in(expected))
        if text:
            yield Difference("output", "what the step returns", share, text)
        share, text = apart(self.plain.hooked, self.planned.hooked)
        if text:
            yield Difference("hook", "what hooks saw", share, text)
        if plain.printed != planned.printed and not self._prints_numbers(plain.printed, planned.printed):
            yield Difference(
                "print", "what is printed", math.inf, f"is {planned.printed!r:.80}, not {plain.printed!r:.80}"
            )
        yield from state_differences(state_of(self.plain.model), state_of(self.planned.model))

    def _prints_numbers(self, plain: str, planned: str) -> bool:
        """Whether the two texts differ by the rounding of numbers alone."""
        number = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?")
        numbers = [[float(n) for n in number.findall(text)] for text in (plain, planned)]
        return number.sub("", plain) == number.sub("", planned) and apart(*numbers, MEAN_OF)[0] <= self.rounding

    @property
    def rounding(self) -> float:
        if self.situation.autocast:
            return ROUNDING_HALF
        on_gpu = self.trial.device != "cpu"  # where some kernels add in no fixed order
        return max(ROUNDING[self.trial.kernels], 1e-4 if on_gpu else 0.0)

    def _judge(self, found: list[Difference], when: str) -> None:
        wrong = [each for each in found if each.share > self.rounding]
        for each in wrong[:3]:
            self.fail(f"wrong {each.kind}{when}", f"{each.where} {each.text}", each.share)
        if found and not wrong:
            self.rounded = True
            self.take_over()

    def _judge_peak(self, planned: Outcome) -> None:
        over = planned.peak_bytes + min(self.others_now, self.others_bytes) - self.budget
        due = bool(self.said) or any(TOOK_MORE.match(text) for text in planned.said)
        if over > 0 and not planned.tried and (self.trial.strict or not due):
            self.fail("over budget in silence", f"{over} bytes more than {self.budget}, {over / self.budget:.1%}")

    def _exceptions_differ(self, plain: BaseException | None, planned: BaseException | None) -> None:
        def said(failure: BaseException | None) -> str:
            if failure is None:
                return "nothing"
            return f"{type(failure).__name__} ({(str(failure).splitlines() or [''])[0]:.160})"

        kind = "exception differs" if plain is not None else f"step raised {type(planned).__name__}"
        self.fail(kind, f"the planned step raises {said(planned)}, the plain one {said(plain)}")

    def _refused(self, refusal: elbowroom.BudgetTooSmall, earlier: dict[Any, Any]) -> None:
        """No plan fits any more: that must be due, must change nothing, and what it names must be enough."""
        if not self.may_refuse and not self.said:  # a step that needed more in its middle says so and goes on
            self.fail("refused without reason", f"nothing has changed that needs memory: {refusal}"[:200])
            return
        for each in state_differences(earlier, state_of(self.planned.model)):
            self.fail(f"refusal changed {each.kind}", f"{each.where} {each.text}")
        self.take_over()
        self.clear_gradients()
        self._raise_budget(refusal)

    def _raise_budget(self, refusal: elbowroom.BudgetTooSmall) -> None:
        """To what a refusal names."""
        try:
            self.planned.model.elbowroom.set_budget(refusal.least_budget)
            self.budget = refusal.least_budget
        except elbowroom.BudgetTooSmall as other:  # another shape of input, seen before, may need more
            self.budget = max(other.least_budget, refusal.least_budget)
            try:
                self.planned.model.elbowroom.set_budget(self.budget)
            except elbowroom.BudgetTooSmall as again:
                self.fail("least budget is not enough", f"{self.budget} was named, then {again.least_budget}")
        self.said = []

    def take_over(self) -> None:
        """The plain side gets the state of the planned one: after what may leave the two apart without a fault."""
        mine, others = self.plain.model, self.planned.model
        for module, other in zip(mine.modules(), others.modules(), strict=True):
            for name, parameter in other._parameters.items():
                if parameter is not None:
                    with torch.no_grad():
                        module._parameters[name].copy_(parameter)
                    gradient = None if parameter.grad is None else parameter.grad.detach().clone()
                    module._parameters[name].grad = gradient
            for name, buffer in other._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.detach().clone()
            for name, value in vars(other).items():
                if name not in INTERNAL and not isinstance(value, nn.Module):
                    setattr(module, name, copy.deepcopy(value))
        self.plain.optimizer.load_state_dict(copy.deepcopy(self.planned.optimizer.state_dict()))
        self.plain.hooked[:] = self.planned.hooked

    # --- after an event ---

    def check(self, when: str) -> None:
        """Some steps, each of which must be right and within the budget."""
        for _ in range(self.trial.checks):
            for _ in range(REFUSALS):
                named = self.budget
                plain, planned = self.step()
                if not isinstance(planned.failure, elbowroom.BudgetTooSmall):
                    break
            else:
                self.fail("least budget is not enough", f"{named} was named last and refused: {planned.failure}")
            if self.failures or self.ended:
                return self._end_check(when)
        kept = planned.end_bytes - plain.end_bytes
        replays = self.trial.device != "cpu" and self.trial.kernels == "inductor"  # recordings hold their memory
        if kept > LITTLE_BYTES and not replays:  # of the last step: an earlier one may have traced something
            self.fail("memory kept", f"{kept} bytes more than plainly are there when a step has ended")
        return self._end_check(when)

    def _end_check(self, when: str) -> None:
        self.may_refuse = False
        self.failures[:] = [replace(each, text=f"{each.text} ({when})") for each in self.failures]


def _traced(function: Any) -> Any:
    """A function as PyTorch traces it alone: traced again for every hook, and as often as something changes."""
    traced = torch.compile(function, backend="aot_eager", dynamic=False)
    often = {"skip_nnmodule_hook_guards": False, "recompile_limit": 1000, "accumulated_recompile_limit": 10_000}

    def run(*args: Any) -> Any:
        with torch._dynamo.config.patch(often):
            return traced(*args)

    return run


def make_optimizer(trial: Trial, model: nn.Module) -> torch.optim.Optimizer:
    if trial.optimizer == "Adam":
        return torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
    return torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
