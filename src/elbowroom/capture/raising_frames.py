"""A function that raised while PyTorch traced it is traced again the next time.

By default PyTorch gives it up for good, and with it everybody whose code it is: another model of the same class, too.
But an exception belongs to one call. A batch was wrong, or somebody pressed a key; the next call is as before.

What PyTorch knew of the call while it traced, values of the step among it, refers to itself in a circle. Until Python
collects garbage it would stay; it is let go at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo import convert_frame
from torch._dynamo.exc import Unsupported
from torch._dynamo.types import FrameAction, FrameExecStrategy  # type: ignore[attr-defined]

from elbowroom.errors import let_go_of_values

_compile: Callable[..., Any] = convert_frame._compile
# An exception whose class has an `__init__` of its own, which PyTorch 2.11 cannot trace, nor say so without a fault.
_UNKNOWN_EXCEPTION = "Failed to raise exception"


@contextmanager
def raising_frames_traced_again() -> Iterator[None]:
    """Inside, PyTorch forgets that a function raised; the call that did so runs untraced."""
    before = convert_frame._compile
    convert_frame._compile = _compile_or_run_once
    try:
        yield
    finally:
        convert_frame._compile = before


def _compile_or_run_once(*args: Any, **kwargs: Any) -> Any:
    try:
        return _compile(*args, **kwargs)
    except Unsupported as failure:
        if getattr(failure, "gb_type", None) == "Observed exception":
            failure.frame_exec_strategy = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)
        let_go_of_values(failure)
        raise
    except AssertionError as failure:
        refusal = failure.__context__
        let_go_of_values(failure)
        if not isinstance(refusal, Unsupported) or refusal.gb_type != _UNKNOWN_EXCEPTION:
            raise
        refusal.frame_exec_strategy = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)
    raise refusal
