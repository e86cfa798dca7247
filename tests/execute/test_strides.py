"""Tensors get back the strides that were theirs, whatever hooks of saved tensors have made of them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from elbowroom.execute.layouts import strides_in, with_strides  # noqa: E402


def samples():
    base = torch.arange(48.0).view(2, 4, 6)
    return [
        base[..., 1:3],
        base.transpose(0, 2),
        base[:, :1].expand(2, 5, 6),
        torch.ones(()).expand(3, 2),
        torch.tensor(2.0),
        base.flatten().unfold(0, 4, 2),
        torch.empty(0, 3),
        base.to(torch.complex64)[..., ::2].conj(),
    ]


@pytest.mark.parametrize("put_away", [lambda t: t.contiguous().clone(), lambda t: t.clone(), lambda t: t])
def test_values_and_strides_are_as_they_were(put_away):
    values = [7, None, *samples()]
    found = with_strides([put_away(v) if isinstance(v, torch.Tensor) else v for v in values], strides_in(values))
    assert found[:2] == values[:2]
    for ours, theirs in zip(found[2:], values[2:], strict=True):
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours, theirs)


def test_what_lies_as_it_did_is_not_copied():
    values = samples()
    assert all(a is b for a, b in zip(with_strides(values, strides_in(values)), values, strict=True))
