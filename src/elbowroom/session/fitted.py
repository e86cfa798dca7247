"""A fitted model is the model itself: same object, same class, same attributes. Only what a call of it runs differs.

`nn.Module` has one field for that, which `Module.compile` uses too: `_compiled_call_impl` is what a call runs, if it
is set. Pickles leave it out, so they hold the plain model and load where elbowroom is not installed. The session is
put there. What else a fitted model has, it has through two attributes of `nn.Module`: `model.elbowroom`, the session,
and `__deepcopy__`, which fits the copy, too. Other models have None there, which Python's `copy` takes for nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import nn

from elbowroom.session.handle import Handle

M = TypeVar("M", bound=nn.Module)

_CALL = "_compiled_call_impl"


def fitted(model: M, session: Handle) -> M:
    """The model, whose calls go to a session from now on; one that it had before is let go."""
    if is_fitted(model):
        session_of(model).end_noticing()
    model.__dict__[_CALL] = session
    session.begin_to_notice()
    return model


def is_fitted(model: nn.Module) -> bool:
    return hasattr(model.__dict__.get(_CALL), "set_budget")


def session_of(model: nn.Module) -> Handle:
    """The session of a fitted model."""
    assert is_fitted(model)
    return cast(Handle, model.__dict__[_CALL])


class _OfFitted:
    """An attribute of `nn.Module` that is None but for fitted models. An attribute of a model's own goes first.

    A model never lacks it, because PyTorch reads whatever `dir` lists. Classes do: PyTorch gives `__deepcopy__` to
    those that have none.
    """

    def __init__(self, found: Callable[[nn.Module], Any]) -> None:
        self._found = found

    def __get__(self, model: nn.Module | None, owner: type) -> Any:
        if model is None:
            raise AttributeError(f"{owner.__name__} is not a fitted model")
        return self._found(model) if is_fitted(model) else None


def _copier(model: nn.Module) -> Callable[[dict[int, Any]], nn.Module]:
    """Copies a fitted model; the copy has a session of its own, which plans when it is first called."""

    def copied(memo: dict[int, Any]) -> nn.Module:
        session = model.__dict__.pop(_CALL)
        try:
            other = copy.deepcopy(model, memo)
        finally:
            model.__dict__[_CALL] = session
        return fitted(other, session.again(other))

    return copied


for _name, _found in (("elbowroom", session_of), ("__deepcopy__", _copier)):
    setattr(nn.Module, _name, _OfFitted(_found))
