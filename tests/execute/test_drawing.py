"""Random numbers drawn twice: the same, whoever draws beside, and no generator is left where it was not."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from elbowroom.capture.generator_variant import drop_out  # noqa: E402
from elbowroom.errors import ElbowroomError  # noqa: E402
from elbowroom.execute.drawing import MARK, PrivateDraws, SharedDraws, draws_from  # noqa: E402
from elbowroom.execute.region import Build  # noqa: E402
from elbowroom.measure.measured import Measured  # noqa: E402
from elbowroom.measure.memory import measure  # noqa: E402
from elbowroom.step.graph import Operator, StepGraph  # noqa: E402
from elbowroom.step.operations import Run  # noqa: E402
from elbowroom.step.program import make_program  # noqa: E402
from elbowroom.step.storages import Memory  # noqa: E402
from tracing import looked_at  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")
CPU = torch.device("cpu")


class Masked(nn.Module):
    """Where its result is zero, dropout dropped; elsewhere the gradient of the weight is 2."""

    def __init__(self, size: int = 4000) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.dropout(x * self.weight, 0.5)


def all_again(model, x):
    """The model, looked at, with a program that runs its whole forward again in its backward."""
    compiled, region, _ = looked_at(model, x, beside=True)
    graph = region.traced.graph
    region.looks.calls = None
    region.install(Build(Measured(region.traced), make_program(graph, [*graph.forward, *graph.backward])))
    assert region.program.reseeded
    return compiled


def wrong_steps(model, compiled, x, steps, between=lambda: None):
    """How many steps have gradients that are not those of the mask that the result shows."""
    wrong = 0
    for _ in range(steps):
        model.weight.grad = None
        result = compiled(x)
        between()
        result.sum().backward()
        wrong += not torch.equal(model.weight.grad, result.detach())
    return wrong


@contextmanager
def beside(work):
    """Another thread does something over and over."""
    stop, failures = threading.Event(), []

    def run():
        try:
            while not stop.is_set():
                work()
        except Exception as failure:  # said by the test, not by the thread
            failures.append(failure)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not failures


def test_two_models_in_two_threads_draw_what_each_of_them_drew():
    x = torch.ones(4000)
    (one, first), (two, second) = ((model, all_again(model, x)) for model in (Masked(), Masked()))
    wrong = []
    with beside(lambda: wrong.append(wrong_steps(two, second, x, 1))):
        assert wrong_steps(one, first, x, 300) == 0
    assert len(wrong) > 20
    assert sum(wrong) == 0


def test_a_thread_that_draws_beside_changes_no_gradient():
    x, model = torch.ones(4000), Masked()
    compiled = all_again(model, x)
    with beside(lambda: torch.rand(100)):
        assert wrong_steps(model, compiled, x, 300) == 0


def test_a_thread_that_draws_beside_never_gets_numbers_twice():
    """Nothing that a backward draws again comes out of the generator of all."""
    x, model = torch.ones(4000), Masked()
    compiled, seen = all_again(model, x), []
    with beside(lambda: seen.append(torch.randint(2**62, ()).item())):
        result = compiled(x)
        for _ in range(300):
            result.sum().backward(retain_graph=True)
    assert len(seen) > 20
    assert len(set(seen)) == len(seen)


# --- one draw ---------------------------------------------------------------------------------------------------


def test_a_first_draw_leaves_the_generator_where_plain_execution_does():
    torch.manual_seed(3)
    expected, after = torch.rand(9), torch.get_rng_state()
    torch.manual_seed(3)
    value, state = draws_from(CPU, private=True).draw(torch.rand, 9)
    assert torch.equal(value, expected)
    assert torch.equal(torch.get_rng_state(), after)
    torch.rand(3)
    now = torch.get_rng_state()
    assert torch.equal(draws_from(CPU, private=True).draw_again(state, torch.rand, 9), expected)
    assert torch.equal(torch.get_rng_state(), now)


def test_a_first_draw_during_which_somebody_else_draws_is_made_anew():
    elsewhere = []

    def disturbed(*args, generator):
        elsewhere.append(torch.rand(9))
        return torch.rand(*args, generator=generator)

    value, state = draws_from(CPU, private=True).draw(disturbed, 9)
    assert not torch.equal(value, elsewhere[0])
    assert len(elsewhere) == 2
    after = torch.get_rng_state()
    assert torch.equal(draws_from(CPU, private=True).draw_again(state, torch.rand, 9), value)
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(torch.rand(9), elsewhere[1])


def test_what_takes_no_generator_draws_from_that_of_all():
    torch.manual_seed(3)
    expected, after = torch.rand(9), torch.get_rng_state()
    torch.manual_seed(3)
    draws = draws_from(CPU, private=False)
    value, state = draws.draw(torch.rand, 9)
    assert torch.equal(value, expected)
    assert torch.equal(torch.get_rng_state(), after)
    torch.rand(3)
    now = torch.get_rng_state()
    for _ in range(2):
        assert torch.equal(draws.draw_again(state, torch.rand, 9), expected)
        assert torch.equal(torch.get_rng_state(), now)


def disturbed_rand(*args):
    torch.rand(5)  # what another thread might do at any moment
    return torch.rand(*args)


@pytest.mark.parametrize("is_first", [True, False])
def test_what_takes_no_generator_and_was_disturbed_is_found(is_first):
    operators = [disturbed_rand, torch.rand] if is_first else [torch.rand, disturbed_rand]
    draws = draws_from(CPU, private=False)
    _, state = draws.draw(operators[0], 9)
    now = torch.get_rng_state()
    with pytest.raises(ElbowroomError, match=r"another thread drew random numbers.*torch\.Generator of its own"):
        draws.draw_again(state, operators[1], 9)
    assert torch.equal(torch.get_rng_state(), now)


@pytest.mark.parametrize("kind", [PrivateDraws, SharedDraws])
def test_a_draw_that_fails_leaves_the_generator_where_it_was(kind):
    def interrupted(*args, **kwargs):
        torch.rand(3, **kwargs)
        raise KeyboardInterrupt

    draws = kind(torch.default_generator)
    _, state = draws.draw(torch.rand, 9)
    now = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        draws.draw_again(state, interrupted, 9)
    assert torch.equal(torch.get_rng_state(), now)
    value, state = draws.draw(torch.rand, 9)  # nothing is locked
    assert torch.equal(draws.draw_again(state, torch.rand, 9), value)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_that_forks_while_a_thread_draws_can_draw():
    drawing, forked = threading.Event(), threading.Event()

    def slowly(*args, generator):
        drawing.set()
        forked.wait(20)
        return torch.rand(*args, generator=generator)

    draws = draws_from(CPU, private=True)
    thread = threading.Thread(target=draws.draw, args=(slowly, 3))
    thread.start()
    drawing.wait(20)
    child = os.fork()
    if child == 0:
        threading.Timer(20, os._exit, (1,)).start()
        draws.draw(torch.rand, 3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    forked.set()
    thread.join()
    assert status == 0


# --- memory -----------------------------------------------------------------------------------------------------


def peak_of(call) -> int:
    call()
    with measure("cpu", timeline=False) as measured:
        value = call()
    del value
    return measured.peak_bytes


@pytest.mark.parametrize("size", [8, 2000, 100_000])
@pytest.mark.parametrize("is_private", [True, False])
def test_a_draw_takes_what_the_referee_counts(size, is_private):
    """One operator that draws, and draws again, played by the referee and measured."""
    values, state_bytes = torch.ones(size), torch.get_rng_state().nbytes
    made = 5 * size  # the result and its mask
    workspace = peak_of(lambda: torch.native_dropout(values, 0.5, True)) - made
    graph = StepGraph(
        ops=(Operator(0, "drop", "drop", "forward", (), (), ((0, made),), (), random=True, workspace=workspace),),
        inputs=(), arriving=(), forward=(0,), backward=(), results=(), updates=(), gradients=(),
        parameters=frozenset(), storage_bytes={0: made},
    )  # fmt: skip
    graph = replace(graph, ops=(replace(graph.ops[0], draws_privately=is_private),))
    memory = Memory(graph, state_bytes)
    first, again = memory.run(Run(0, frees=(0,)), keeps_state=True), memory.run(Run(0, again=True, frees=(0,)))
    draws, operator = draws_from(CPU, private=is_private), drop_out if is_private else torch.native_dropout
    few = 0 if is_private else 2 * MARK  # that tell where the generator was
    assert 0 <= peak_of(lambda: draws.draw(operator, values, 0.5, True)) - first <= few
    _, state = draws.draw(operator, values, 0.5, True)
    peak = state_bytes + peak_of(lambda: draws.draw_again(state, operator, values, 0.5, True))
    assert 0 <= peak - again <= few
