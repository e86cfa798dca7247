"""What `fit` returns: the model itself, but for how it is called."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from elbowroom.session.protocol import AnySession


class Fitted:
    """Mixed into the class of a fitted model, which shares everything with the original but how it is called.

    The two have one `__dict__`: parameters, buffers, hooks, `train()` and `state_dict()` are the same. The session
    lives in a slot, so that copies and pickles of the original know nothing of it.
    """

    elbowroom: AnySession

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.elbowroom(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the original under a session of its own, planned when first called."""
        original = copy.deepcopy(_original(self), memo)
        return fitted(original, self.elbowroom.again(original))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the original: a plan belongs to one process and one device."""
        return _as_it_is, (_original(self),)


def fitted(model: nn.Module, session: AnySession) -> Any:
    """The model under a session."""
    original = type(model)
    kind = type(f"Fitted{original.__name__}", (Fitted, original), {"__slots__": ("elbowroom",)})
    made: Any = object.__new__(kind)
    made.__dict__ = model.__dict__
    object.__setattr__(made, "elbowroom", session)
    return made


def session_of(model: nn.Module) -> AnySession:
    """The session of a fitted model."""
    assert isinstance(model, Fitted)
    return model.elbowroom


def _as_it_is(model: nn.Module) -> nn.Module:
    return model


def _original(model: Fitted) -> nn.Module:
    return model.elbowroom.model
