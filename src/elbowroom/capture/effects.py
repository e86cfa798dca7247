"""What tracing must not take for useless: operators that compute nothing and may raise an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._higher_order_ops import effects

_INVERTIBLE = "aten::_linalg_check_errors"  # raises where a matrix has no inverse, or no factors


@contextmanager
def errors_are_effects() -> Iterator[None]:
    """From 2.13 on PyTorch knows it. Before, it drops the check, and goes on with an inverse that there is not."""
    if effects._get_effect(_INVERTIBLE) is not None:
        yield
        return
    handle = effects._register_effectful_op(_INVERTIBLE, effects._EffectType.ORDERED)
    try:
        yield
    finally:
        handle.destroy()
