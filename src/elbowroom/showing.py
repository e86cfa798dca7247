"""How data is shown to people, without knowing who does it.

Plans and measurements can be printed (`plan.table()`, `measurement.picture()`), but they lie below the report, which
reads them. So the package tells this module, when it is imported, where the functions are that show each kind of
thing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Show = Callable[..., str]

_loaders: dict[str, Callable[[], Show]] = {}


def show_with(kind: str, load: Callable[[], Show]) -> None:
    """Things of a kind are shown by the function that `load` imports, once the first of them is."""
    _loaders[kind] = load


def shown_as(kind: str, *what: Any, **how: Any) -> str:
    return _loaders[kind]()(*what, **how)
