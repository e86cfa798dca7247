"""What happens between two steps, each done to both sides of a pair. What must hold at once is judged here.

`pair.new_plan()` says that earlier warnings about the budget no longer count; `may_refuse` that the model may now
need more memory than its budget.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import select
import signal
import time
import warnings
from typing import Any

import torch
from torch import nn

import elbowroom
from campaign.bystander import Bystander, Company
from campaign.changes import (
    another_budget,
    another_dtype,
    assigned_state,
    autocast,
    backward_hook,
    deepcopy,
    evaluation_mode,
    forward_hook,
    forward_hook_that_changes,
    forward_pre_hook,
    frozen,
    loaded_state,
    output_hook,
    parameter_hook,
    pickled,
    replaced_layer,
    unhook,
)
from campaign.comparing import Failure, Generators, apart, state_differences, state_of, tensors_in
from campaign.pair import Pair

# --- nothing, and much of it ---


def nothing(pair: Pair) -> None:
    pass


def many_steps(pair: Pair) -> None:
    """Forty steps, or fewer where each takes long."""
    end = time.perf_counter() + 4
    for _ in range(40):
        pair.step()
        if pair.failures or time.perf_counter() > end:
            return


def other_batches(pair: Pair) -> None:
    """Another size for good; the larger needs another plan."""
    pair.situation.batch = 12 if pair.situation.batch == 8 else 8
    pair.may_refuse = True


def smaller_last_batch(pair: Pair) -> None:
    """One step with fewer rows, as at the end of an epoch."""
    usual, pair.situation.batch = pair.situation.batch, 5
    pair.may_refuse = True
    pair.step()
    pair.situation.batch = usual


def evaluation(pair: Pair) -> None:
    """A forward without gradients."""
    args, _ = pair.draw_batch()
    before, found = Generators.now(), []
    for side in pair.sides:
        before.put_back()
        printed = io.StringIO()
        with torch.no_grad(), contextlib.redirect_stdout(printed):
            found.append([*tensors_in(side.model(*args)), printed.getvalue()])
    share, text = apart(*found)
    if share > pair.rounding:
        pair.fail("wrong evaluation", f"without gradients, what the model answers {text}")
    _compare_state(pair, "evaluation")


def gradients_zeroed_in_place(pair: Pair) -> None:
    pair.situation.gradients = "zero"
    pair.may_refuse = True
    pair.step()
    pair.step()
    pair.situation.gradients = "none"
    pair.clear_gradients()


def accumulation(pair: Pair) -> None:
    pair.situation.gradients = "kept"
    pair.may_refuse = True
    for _ in range(3):
        if not pair.ended:
            pair.step(updates=False)
    pair.situation.gradients = "none"
    pair.clear_gradients()


def forward_without_a_call(pair: Pair) -> None:
    """`model.forward(x)` trains plainly. That must be said once, or be an error where it is strict."""
    pair.step()  # parameters that have taken the place of others are noticed by a call
    if pair.failures or pair.ended:
        return
    args, y = pair.draw_batch()
    chance, refused = Generators.now(), False
    with pair.noting(), contextlib.redirect_stdout(io.StringIO()):
        for side in pair.sides:
            chance.put_back()
            try:
                with pair.autocast():
                    loss = side.criterion(side.model.forward(*args), y)
                loss.backward()
            except elbowroom.Unplanned:
                refused = True
    if refused != pair.trial.strict or not (refused or pair.said or pair.situation.went_around):
        pair.fail("trained around the plan", "in silence" if not refused else "an error though it is not strict")
    pair.situation.went_around = True
    if not refused:
        _compare_state(pair, "forward without a call")
    pair.take_over()
    pair.clear_gradients()


def saved_on_host(pair: Pair) -> None:
    """Hooks of saved tensors around the whole model. What they take is not the plan's."""
    with torch.autograd.graph.save_on_cpu():
        pair.step(metered=False)


# --- exceptions and interrupts ---


def exception_in_the_model(pair: Pair) -> None:
    _broken_step(pair, [side.model.gate for side in pair.sides])


def exception_in_the_loss(pair: Pair) -> None:
    _broken_step(pair, [side.criterion for side in pair.sides])


def _broken_step(pair: Pair, parts: list[Any]) -> None:
    for part in parts:
        part.broken = True
    pair.step(updates=False)
    for part in parts:
        part.broken = False


def exception_in_the_optimizer(pair: Pair) -> None:
    def refuse(*_: Any) -> None:
        raise ArithmeticError("planted in the optimizer")

    handles = [side.optimizer.register_step_pre_hook(refuse) for side in pair.sides]
    with contextlib.suppress(ArithmeticError):
        pair.step()
    for handle in handles:
        handle.remove()
    pair.plain.optimizer.zero_grad()
    pair.planned.optimizer.zero_grad()


def wrong_input(pair: Pair) -> None:
    """A batch whose last dimension does not fit: both must complain in the same way."""
    (x, *others), y = pair.draw_batch()
    outcomes = [pair.run(side, (x[..., :-1], *others), y) for side in pair.sides]
    plain, planned = (outcome.failure for outcome in outcomes)
    if type(plain) is not type(planned):
        text = f"{type(planned).__name__} ({str(planned)[:100]}), plainly {type(plain).__name__}"
        pair.fail("exception differs", f"a wrong input raises {text}")
    pair.take_over()
    pair.clear_gradients()


def interrupt(pair: Pair) -> None:
    """Ctrl-C at a random moment of a step, a few times. No generator may be left rewound."""
    chance = random.Random(pair.trial.seed + pair.situation.number)
    _, usual = pair.step()
    for _ in range(8):
        if pair.failures or pair.ended:
            return
        args, y = pair.draw_batch()
        _interrupted_step(pair, args, y, chance.uniform(0.0, 1.1) * usual.time_s)
        pair.take_over()
        pair.clear_gradients()


def _interrupted_step(pair: Pair, args: tuple[Any, ...], y: torch.Tensor, delay_s: float) -> None:
    after_forward: list[Generators] = []

    def raise_it(*_: object) -> None:
        raise KeyboardInterrupt

    def run() -> None:
        try:
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, delay_s))
            with pair.autocast():
                answer = pair.planned.model(*(*args, y) if pair.trial.loss_inside else args)
                loss = answer if pair.trial.loss_inside else pair.planned.criterion(answer, y)
            after_forward.append(Generators.now())
            loss.backward()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    usual = signal.signal(signal.SIGALRM, raise_it)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(KeyboardInterrupt, elbowroom.Unplanned, elbowroom.OverBudget):
            run()
            time.sleep(0)  # a signal that came when the timer was stopped is handled here
    signal.signal(signal.SIGALRM, usual)
    pair.note_said(str(each.message) for each in caught)
    for before in after_forward:
        for each in before.differences(Generators.now()):
            pair.fail("generator after an interrupt", f"{each.where} state is not that after the forward")


# --- others in the process ---


def thread_that_draws(pair: Pair) -> None:
    """Random numbers drawn by a thread meanwhile. A model that draws none must not notice."""

    def work() -> None:
        torch.rand(8)

    other = Bystander(pair.trial.kernels, pair.trial.device)
    with Company(work):
        _steps_in_company(pair, other)


def thread_that_trains(pair: Pair) -> None:
    """Another fitted model with dropout is trained by a thread meanwhile; its gradients must be right."""
    first, second = (Bystander(pair.trial.kernels, pair.trial.device) for _ in range(2))
    with Company(first.step) as company:
        _steps_in_company(pair, second)
    pair.failures += [each for each in company.failures if not each.kind.startswith(pair.trial.tolerated)][:1]


def _steps_in_company(pair: Pair, other: Bystander) -> None:
    """Steps of the pair, and of another model whose gradients tell which random numbers it used."""
    found = []
    for _ in range(3):
        _step_in_company(pair)
        for _ in range(8):
            found += other.step()
    pair.failures += [each for each in found if not each.kind.startswith(pair.trial.tolerated)][:1]


def _step_in_company(pair: Pair) -> None:
    """Values are compared where nothing is drawn; where numbers are drawn, both threads take from one stream."""
    chance = Generators.now()
    if pair.trial.draws:
        pair.step(compare=False, updates=False, metered=False)
    else:
        before = len(pair.failures)
        pair.step(updates=False, metered=False)
        others = [f"{of}'s is in another state" for of in ("torch", "cuda")]  # where the other thread draws
        pair.failures[before:] = [each for each in pair.failures[before:] if each.text not in others]
    pair.take_over()
    chance.put_back()


def other_fits(pair: Pair) -> None:
    """Other models are fitted, one of them in vain, one that raises."""
    chance = Generators.now()

    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("planted in another model")

    x = torch.randn(16, 8).to(pair.trial.device)
    chance.put_back()
    for number in range(3):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2 + number)), nn.Tanh()).to(pair.trial.device)
        chance.put_back()
        other = elbowroom.fit(model, x, budget="1GiB", kernels=pair.trial.kernels)
        other(x).sum().backward()
    with contextlib.suppress(elbowroom.BudgetTooSmall):
        elbowroom.fit(nn.Linear(8, 8).to(pair.trial.device), x, budget=10, kernels=pair.trial.kernels)
    with contextlib.suppress(ArithmeticError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        elbowroom.fit(Broken(), x, budget="1GiB", kernels=pair.trial.kernels)
    chance.put_back()


def dynamo_reset(pair: Pair) -> None:
    torch._dynamo.reset()


def user_profiler(pair: Pair) -> None:
    """The user's profiler runs around a step with a new size of batch: planning must not end it."""
    usual, pair.situation.batch = pair.situation.batch, 6
    pair.may_refuse = True
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pair.step()
        with torch.profiler.record_function("campaign: afterwards"):
            torch.zeros(1)
    pair.situation.batch = usual
    if not any(event.name == "campaign: afterwards" for event in profile.events() or ()):
        pair.fail("profiler ended", "the user's torch.profiler session did not live to its end")


def fork(pair: Pair) -> None:
    """A child takes a step, and must get it right. The parent goes on. No child can use its parent's GPU."""
    if pair.trial.device != "cpu":
        return
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            pair.step()
            os.write(writing, ("\n".join(map(str, pair.failures)) or "right").encode())
        except BaseException as failure:
            os.write(writing, f"{type(failure).__name__}: {failure}"[:300].encode())
        finally:
            os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], 30)
    said = os.read(reading, 10_000).decode() if ready else "nothing for 30 seconds"
    os.close(reading)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if said != "right":
        pair.fail("fork", f"the child says: {said or 'nothing'}"[:300])


def _compare_state(pair: Pair, when: str) -> None:
    for each in list(state_differences(state_of(pair.plain.model), state_of(pair.planned.model)))[:2]:
        if each.share > pair.rounding:
            pair.failures.append(Failure(f"wrong {each.kind}", f"{each.where} {each.text} ({when})"))


EVENTS = {
    event.__name__: event
    for event in (
        nothing, many_steps, other_batches, smaller_last_batch, evaluation, gradients_zeroed_in_place, accumulation,
        forward_without_a_call, saved_on_host,
        exception_in_the_model, exception_in_the_loss, exception_in_the_optimizer, wrong_input, interrupt,
        thread_that_draws, thread_that_trains, other_fits, dynamo_reset, user_profiler, fork,
        forward_hook, forward_hook_that_changes, forward_pre_hook, backward_hook, parameter_hook, output_hook, unhook,
        replaced_layer, another_dtype, frozen, evaluation_mode, loaded_state, assigned_state, autocast,
        another_budget, deepcopy, pickled,
    )
}  # fmt: skip
