"""Hooks, changes of the model, another budget, copies: what the user does to a model between two steps."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import random

import torch
from torch import nn

from campaign.comparing import Generators, apart, state_differences, state_of, tensors_in
from campaign.judging import measure_plainly, set_share
from campaign.pair import Pair

# --- hooks ---


def forward_hook(pair: Pair) -> None:
    for side in pair.sides:
        seen = side.hooked
        side.handles.append(
            side.model.gate.register_forward_hook(lambda _, __, out, seen=seen: seen.append(tuple(out.shape)))
        )
    pair.may_refuse = True


def forward_hook_that_changes(pair: Pair) -> None:
    for side in pair.sides:
        side.handles.append(side.model.gate.register_forward_hook(lambda _, __, out: out * 0.5))
    pair.may_refuse = True


def forward_pre_hook(pair: Pair) -> None:
    for side in pair.sides:
        seen = side.hooked
        side.handles.append(
            side.model.head.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(len(args)))
        )
    pair.may_refuse = True


def backward_hook(pair: Pair) -> None:
    for side in pair.sides:
        seen = side.hooked
        side.handles.append(
            side.model.head.register_full_backward_hook(lambda _, __, out, seen=seen: seen.append(len(out)))
        )
    pair.may_refuse = True


def parameter_hook(pair: Pair) -> None:
    for side in pair.sides:
        weight = next(side.model.head.parameters())  # which may have been replaced by several layers
        side.handles.append(weight.register_hook(lambda gradient: gradient * 2))
    pair.may_refuse = True


def output_hook(pair: Pair) -> None:
    """A hook on what the model answers with, for a step. A loss inside is another tensor, with another hook."""
    if not pair.trial.loss_inside:
        pair.situation.hooks_outputs = True
        pair.step()
        pair.situation.hooks_outputs = False


def unhook(pair: Pair) -> None:
    """A hook on the whole model is there for a step and then removed, with all others."""
    for side in pair.sides:
        seen = side.hooked
        side.handles.append(side.model.register_forward_hook(lambda _, __, ___, seen=seen: seen.append("whole")))
    pair.may_refuse = True
    pair.step()
    for side in pair.sides:
        for handle in side.handles:
            handle.remove()
        side.handles.clear()


# --- the model changes ---


def replaced_layer(pair: Pair) -> None:
    """A layer makes room for a wider one of the same outer shape."""
    path = pair.trial.replaceable or "head"
    width, last = pair.trial.width, pair.trial.width if pair.trial.replaceable else pair.trial.classes
    chance = Generators.now()
    for side in pair.sides:
        chance.put_back()
        wide = nn.Sequential(nn.Linear(width, 3 * width), nn.ReLU(), nn.Linear(3 * width, last))
        parent, _, name = path.rpartition(".")
        setattr(side.model.get_submodule(parent), name, wide.to(pair.trial.device, pair.situation.dtype))
    pair.new_plan()
    pair.new_optimizers()


def another_dtype(pair: Pair) -> None:
    if pair.trial.exact:
        return
    pair.situation.dtype = torch.float32 if pair.situation.dtype is torch.float64 else torch.float64
    for side in pair.sides:
        side.model.to(pair.situation.dtype)
    pair.new_plan()
    pair.new_optimizers()


def frozen(pair: Pair) -> None:
    """A parameter is frozen, or thawed."""
    for side in pair.sides:
        parameter = next(side.model.parameters())
        parameter.requires_grad_(not parameter.requires_grad)
    pair.may_refuse = True


def evaluation_mode(pair: Pair) -> None:
    for side in pair.sides:
        side.model.train(not side.model.training)
    pair.may_refuse = True


def loaded_state(pair: Pair) -> None:
    state = {name: value.detach().clone() * 1.01 for name, value in pair.plain.model.state_dict().items()}
    state = {name: value.to(pair.plain.model.state_dict()[name].dtype) for name, value in state.items()}
    for side in pair.sides:
        side.model.load_state_dict(state)


def assigned_state(pair: Pair) -> None:
    """Parameters that are other tensors than before."""
    for side in pair.sides:
        state = {name: value.detach().clone() for name, value in side.model.state_dict().items()}
        side.model.load_state_dict(state, assign=True)
    pair.new_optimizers()
    pair.may_refuse = True


def autocast(pair: Pair) -> None:
    pair.situation.autocast = not pair.situation.autocast
    pair.may_refuse = True


# --- elbowroom is told, the model is copied ---


def another_budget(pair: Pair) -> None:
    chance = random.Random(pair.trial.seed + pair.situation.number)
    set_share(pair, measure_plainly(pair), chance.choice([0.0, 0.1, 0.6, 1.2]))


def deepcopy(pair: Pair) -> None:
    """A copy of each goes on."""
    for side in pair.sides:
        side.model = copy.deepcopy(side.model)
    pair.new_plan()
    pair.new_optimizers()
    gc.collect()


def pickled(pair: Pair) -> None:
    """What comes out of a pickle is the plain model, and works."""
    try:
        pickle.dumps(pair.plain.model)
    except (pickle.PicklingError, AttributeError, TypeError):  # a hook is there that no pickle can hold
        return
    made = pickle.loads(pickle.dumps(pair.planned.model))
    if type(made) is not type(pair.plain.model):
        pair.fail("wrong pickle", f"it holds a {type(made).__name__}, not a {type(pair.plain.model).__name__}")
        return
    for each in list(state_differences(state_of(pair.plain.model), state_of(made)))[:2]:
        if each.kind != "gradient":
            pair.fail("wrong pickle", f"{each.kind} {each.where} {each.text}")
    args, _ = pair.draw_batch()
    chance = Generators.now()
    answers = []
    for model in (copy.deepcopy(pair.plain.model), made):
        chance.put_back()
        with pair.autocast(), contextlib.redirect_stdout(io.StringIO()):
            answers.append(tensors_in(model(*args)))
    chance.put_back()
    share, text = apart(*answers)
    if share > pair.rounding:
        pair.fail("wrong pickle", f"what the unpickled model answers {text}")
