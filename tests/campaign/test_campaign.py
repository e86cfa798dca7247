"""The campaign finds faults that were planted, and a small part of it runs with every test."""

from __future__ import annotations

import ast
import builtins
import contextlib
import itertools
import os
import subprocess
import symtable
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import numpy  # noqa: E402

import elbowroom  # noqa: E402
from campaign.bystander import Bystander, gradients_plainly  # noqa: E402
from campaign.cases import Case, judge_case, random_case  # noqa: E402
from campaign.features import FEATURES, LOSSES, OUTPUTS  # noqa: E402
from campaign.metering import Meter  # noqa: E402
from campaign.models import Block, Recipe, forget, load, source  # noqa: E402
from campaign.shrink import script, shrink, write_script  # noqa: E402
from campaign.working import Result, Worker  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

# Chosen because they hold at present and take about a second each. The others are `make campaign`'s.
SEEDS = (27, 49, 59, 83, 87, 102, 106, 124, 140, 180, 201, 202, 212, 216, 217, 219, 235)


@pytest.fixture(scope="module")
def bystander(one_thread):
    return Bystander()


@pytest.mark.parametrize("seed", [*SEEDS[:8], *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[8:])])
def test_a_case_of_the_campaign(seed, bystander):
    verdict = judge_case(random_case(seed), bystander)
    assert not verdict.failures, "\n".join(map(str, verdict.failures))


# --- what it is made of ---


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("nested", [False, True])
def test_every_feature_makes_a_model_that_trains(feature, nested):
    recipe = Recipe((Block("tanh"), Block(feature, nested), Block("skip", nested)))
    text = load(source(recipe))
    with contextlib.redirect_stdout(None):
        output = text.Model()(torch.randn(4, recipe.length, recipe.width))
    text.Criterion()(output, torch.randn(4, recipe.length, recipe.classes)).backward()
    forget(text)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_output_goes_with_every_loss(output, loss):
    recipe = Recipe((Block("tanh"),), output, loss)
    text = load(source(recipe))
    model = text.Model()
    text.Criterion()(model(torch.randn(4, 16, 16)), torch.randn(4, 16, 4)).backward()
    assert model.plain0.weight.grad.abs().sum() > 0
    forget(text)


def test_a_layer_that_may_be_replaced_is_found_where_it_is():
    for nested in (False, True):
        recipe = Recipe((Block("print"), Block("skip", nested)))
        text = load(source(recipe))
        assert isinstance(text.Model().get_submodule(recipe.replaceable), torch.nn.Linear)
        forget(text)


def test_the_meter_knows_peak_and_end():
    older = torch.zeros(1000)
    with Meter("cpu") as meter:
        kept = torch.zeros(256)
        torch.zeros(512)
        del older
    assert (meter.peak_bytes, meter.end_bytes, kept.numel()) == (3072, 1024, 256)


# --- planted faults ---


class Handle:
    """Keeps to no budget at all."""

    def set_budget(self, budget):
        if budget == 1:
            raise elbowroom.BudgetTooSmall("planted", 1, 1000, [])


def plain_fit(model, *example, loss=None, **wishes):
    """An elbowroom that does nothing: right, if the budget is what the plain step takes."""
    model.elbowroom = Handle()
    return model


class Nobody:
    def check(self, when):
        return []


CASE = Case(
    seed=1,
    recipe=Recipe((Block("convolution"), Block("print"), Block("dropout"), Block("observer"), Block("linear"))),
    share=1.0,
)


def kinds_found(monkeypatch, fit, case=CASE) -> list[str]:
    monkeypatch.setattr(elbowroom, "fit", fit)
    return [each.kind for each in judge_case(case, Nobody()).failures]


@pytest.mark.parametrize("events", [(), ("nothing", "deepcopy"), ("exception_in_the_model", "accumulation")])
def test_it_finds_nothing_where_nothing_is_wrong(monkeypatch, events):
    assert kinds_found(monkeypatch, plain_fit, replace(CASE, events=events)) == []


def test_nothing_is_judged_after_a_strict_model_has_refused(monkeypatch):
    """The step that it refused has left the two sides apart."""
    calls = itertools.count()

    def refuse(model, _):
        if next(calls) == 4:
            raise elbowroom.Unplanned("planted")

    def refusing_fit(model, *example, **wishes):
        model.register_forward_pre_hook(refuse)
        return plain_fit(model)

    assert kinds_found(monkeypatch, refusing_fit, replace(CASE, strict=True, events=("many_steps",))) == []


def test_a_budget_that_is_ignored_is_found(monkeypatch):
    assert kinds_found(monkeypatch, plain_fit, replace(CASE, share=0.5)) == ["over budget in silence"]


def test_training_around_the_plan_in_silence_is_found(monkeypatch):
    case = replace(CASE, events=("forward_without_a_call",))
    assert kinds_found(monkeypatch, plain_fit, case) == ["trained around the plan"]


def warning_fit(model, *example, **wishes):
    """Plans nothing, and says so at every call."""

    def say(*_):
        warnings.warn("elbowroom: Model is not planned, so its budget of 1 KiB is not kept: planted", stacklevel=2)

    model.register_forward_hook(say)
    return plain_fit(model)


def test_a_budget_that_is_not_kept_but_said_so_is_no_fault(monkeypatch):
    assert kinds_found(monkeypatch, warning_fit, replace(CASE, share=0.5)) == []


def test_a_warning_is_not_enough_where_it_is_strict(monkeypatch):
    assert kinds_found(monkeypatch, warning_fit, replace(CASE, share=0.5, strict=True)) == ["over budget in silence"]


def scaled_gradient(model):
    model.head.weight.register_hook(lambda gradient: gradient * 1.001)


def doubled_print(model):
    model.gate.register_forward_hook(lambda *_: print("block1 sees (8, 16, 16)"))


def buffer_not_updated(model):
    def put_back(*_):
        model.ema3.zero_()

    model.register_forward_hook(put_back)


def changed_output(model):
    model.head.register_forward_hook(lambda _, __, out: out * (1 + 1e-4))


def attribute_changed(model):
    model.register_forward_hook(lambda *_: setattr(model.gate, "count", 1))


def generator_rewound(model):
    def rewind(*_):
        torch.manual_seed(0)

    model.register_forward_hook(rewind)


def numpy_drawn(model):
    def draw(*_):
        numpy.random.rand()

    model.register_forward_hook(draw)


def zeros_for_none(model):
    def put_zeros(_):
        model.unused5.weight.grad = torch.zeros(16, 16)

    model.head.weight.register_hook(put_zeros)


def output_kept(model):
    kept = []
    model.gate.register_forward_hook(lambda _, __, out: kept.append(out.detach().clone()))


def other_exception(model):
    def fail(*_):
        if model.gate.broken:
            raise LookupError("planted")

    model.gate.register_forward_pre_hook(fail)


FAULTS = [
    (scaled_gradient, "wrong gradient"),
    (doubled_print, "wrong print"),
    (buffer_not_updated, "wrong buffer"),
    (changed_output, "wrong output"),
    (attribute_changed, "wrong attribute"),
    (generator_rewound, "wrong generator"),
    (numpy_drawn, "wrong generator"),
    (zeros_for_none, "wrong gradient"),
    (output_kept, "memory kept"),
    (other_exception, "exception differs"),
]


@pytest.mark.parametrize(("fault", "kind"), FAULTS)
def test_a_planted_fault_is_found(monkeypatch, fault, kind):
    def fit(model, *example, **wishes):
        fault(model)
        return plain_fit(model)

    recipe = replace(CASE.recipe, blocks=(*CASE.recipe.blocks, Block("unused parameters")))
    case = replace(CASE, recipe=recipe, events=("exception_in_the_model",), share=2.0)
    assert kind in kinds_found(monkeypatch, fit, case)


def fit_that_prints(model, *example, **wishes):
    print("planted")
    return plain_fit(model)


def fit_that_trains(model, *example, **wishes):
    with contextlib.redirect_stdout(None):
        model(example[0])
    return plain_fit(model)


def fit_that_raises(model, *example, **wishes):
    raise IndexError("planted")


@pytest.mark.parametrize(
    ("fit", "kinds"),
    [
        (fit_that_prints, {"fit printed"}),
        (fit_that_trains, {"fit changed buffer", "fit changed generator"}),
        (fit_that_raises, {"fit raised IndexError"}),
    ],
)
def test_a_fit_that_leaves_traces_is_found(monkeypatch, fit, kinds):
    assert set(kinds_found(monkeypatch, fit)) == kinds


def test_steps_that_are_planned_again_and_again_are_found(monkeypatch):
    def fit(model, *example, **wishes):
        model.register_forward_hook(lambda *_: time.sleep(0.2))
        return plain_fit(model)

    assert kinds_found(monkeypatch, fit) == ["planned in every step"]


def test_a_bystander_that_suffers_is_found(bystander):
    sound, bystander.fitted = bystander.fitted, bystander.plain
    try:
        assert [each.kind for each in bystander.check("now")] == ["bystander over budget"]
    finally:
        bystander.fitted = sound
    assert bystander.check("again") == []


def test_a_gradient_of_other_random_numbers_is_found(bystander, monkeypatch):
    assert bystander.step() == []

    def other_numbers(model, x, dropped):
        return gradients_plainly(model, x, [gone.roll(1, 0) for gone in dropped])

    monkeypatch.setattr("campaign.bystander.gradients_plainly", other_numbers)
    assert [each.kind for each in bystander.step()] == ["thread: wrong gradient"]


# --- making failures smaller ---


class Failing:
    """Stands for a worker: a case fails if it has dropout and a fork."""

    def judge(self, case):
        features = [block.feature for block in case.recipe.blocks]
        fails = "dropout" in features and "fork" in case.events
        return Result((("planted", "of course"),) if fails else ())


def test_a_failure_becomes_as_small_as_it_can():
    blocks = tuple(Block(name, True) for name in ("tanh", "skip", "dropout", "queue", "print"))
    case = Case(1, Recipe(blocks, "dict", "sum", 24), ("nothing", "fork", "autocast"), loss_inside=True)
    smaller, result = shrink(case, Result((("planted", ""),)), Failing())
    assert smaller == Case(1, Recipe((Block("dropout"),), width=8, length=8), ("fork",))
    assert result.kind == "planted"


STUB = """
class ElbowroomError(Exception):
    pass

class BudgetTooSmall(ElbowroomError):
    least_budget = 1000

class Unplanned(ElbowroomError):
    pass

class Handle:
    def set_budget(self, budget):
        if budget == 1:
            raise BudgetTooSmall

def fit(model, *example, **wishes):
    model.elbowroom = Handle()
    return model
"""


@pytest.mark.parametrize(
    ("share", "status", "said"),
    [
        (0.5, 1, "over budget in silence"),
        pytest.param(1.0, 0, "nothing is wrong", marks=pytest.mark.slow),
    ],
)
def test_a_failure_is_a_script_that_runs_on_its_own(tmp_path, share, status, said):
    (tmp_path / "elbowroom.py").write_text(STUB)
    case = replace(CASE, share=share, events=("interrupt", "deepcopy") if share == 0.5 else ())
    path = write_script(case, Result((("planted", "of course"),)), tmp_path)
    ran = subprocess.run(
        [sys.executable, path], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert said in ran.stdout, ran.stderr[-2000:]
    assert ran.returncode == status


@pytest.mark.parametrize("seed", range(60))
def test_scripts_hold_all_that_they_name(seed):
    """Every name that is used somewhere in it is defined, imported, or Python's own."""
    text = script(random_case(seed), Result((("planted", ""),)))
    assert not unknown_names(text)


def unknown_names(text: str) -> list[str]:
    tree = ast.parse(text)
    top = {name.id for name in ast.walk(tree) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
    top |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            top |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}

    def used(table) -> set[str]:
        own = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()}
        return own.union(*(used(child) for child in table.get_children()))

    known = {*top, *dir(builtins), "__name__"}
    return sorted(used(symtable.symtable(text, "script", "exec")) - known)


# --- processes that do not survive ---


class Deadly:
    """Ends the process that it is sent to."""

    def __reduce__(self):
        return os._exit, (3,)


class Endless:
    def __reduce__(self):
        return time.sleep, (100,)


def test_a_process_that_dies_or_hangs_is_a_failure_and_the_next_one_goes_on():
    worker = Worker(limit_s=1.0, start_s=0.0)
    assert worker.judge(Endless()).kind == "takes too long"
    worker.limit_s = 60.0
    result = worker.judge(Deadly())
    assert (result.kind, result.failures[0][1]) == ("crash", "the process ended with status 3")
    assert worker.judge(None).kind == "event raised AttributeError"
    worker.end()


def test_the_command_counts_and_answers_by_its_status(tmp_path):
    (tmp_path / "elbowroom.py").write_text(STUB)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[1]}"}
    command = [sys.executable, "-m", "campaign", "--runs", "1", "--jobs", "1", "--seed", "4", "--shrink", "0"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 1, ran.stderr[-2000:]
    assert "1 cases, 1 failed" in ran.stdout
    assert "over budget in silence  (seeds 4)" in ran.stdout
