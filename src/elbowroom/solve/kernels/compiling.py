"""The switch between numba and plain Python, and where compiled code is kept.

numba's own cache looks only at the file a function is in. Our kernels are compiled together with the primitives they
call from other files, so a change there would leave stale code behind, after an upgrade as well as while developing.
The cache therefore lies in a folder named after the content of all kernels.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
FOLDER = Path(__file__).parent


def _numba_wanted() -> bool:
    if os.environ.get("ELBOWROOM_NUMBA", "1") == "0":
        return False
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


def fingerprint(folder: Path) -> str:
    """A name for the content of all kernels."""
    digest = hashlib.sha256()
    for source in sorted(folder.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _cache_folder() -> Path:
    """Beside the sources if that can be written to, in the user's cache otherwise; numba's own setting wins."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    if given:
        base = Path(given)
    elif os.access(FOLDER, os.W_OK):
        base = FOLDER / "__pycache__"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elbowroom"
    return base / f"kernels-{fingerprint(FOLDER)}"


HAVE_NUMBA = _numba_wanted()

if HAVE_NUMBA:
    import numba

    _CACHE = str(_cache_folder())
    _config: Any = numba.config

    def compiled(function: F) -> F:
        """Compile to machine code on first use and keep the result on disk."""
        before, _config.CACHE_DIR = _config.CACHE_DIR, _CACHE  # read while decorating, and only then
        try:
            return numba.njit(cache=True, nogil=True)(function)  # type: ignore[no-any-return, return-value]
        finally:
            _config.CACHE_DIR = before

else:

    def compiled(function: F) -> F:
        return function
