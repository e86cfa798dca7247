"""A user's code that runs so that nothing of it stays: hooks of saved tensors."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.autograd.graph import saved_tensors_hooks  # noqa: E402

from elbowroom.measure.undisturbed import undisturbed  # noqa: E402


def hooks_there():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def test_nobodys_hooks_get_what_is_saved():
    saved = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        with undisturbed():
            out = torch.ones(3, requires_grad=True).exp()
        assert not saved
        out.sum().backward()


def test_there_are_none_where_nobody_has_any():
    """With hooks, autograd holds what it saves in another way, and what PyTorch traces meanwhile may keep it."""
    with undisturbed():
        assert hooks_there() is None
    assert hooks_there() is None
