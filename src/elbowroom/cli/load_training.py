"""What to train, named on the command line: `PACKAGE.MODULE:FACTORY`, a function that builds the model and a batch.

The factory takes no arguments and returns `(model, batch)`, `(model, batch, loss)` or `(model, batch, loss,
optimizer)`. The batch is a tuple of positional arguments or a mapping of keyword arguments; `loss` and `optimizer`
mean what they mean to `elbowroom.fit`, and may be None.

This module imports torch only when a factory is loaded, so that the command line starts without it.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from elbowroom.errors import ElbowroomError, InputError
from elbowroom.units import MAX_BYTES

if TYPE_CHECKING:
    import torch
    from torch import nn

    from elbowroom.session.handle import Handle

FORM = "PACKAGE.MODULE:FACTORY"
_RETURNS = "must return (model, batch), (model, batch, loss) or (model, batch, loss, optimizer)"


class Moves(TypedDict, total=False):
    """What the command line says of values that move to the host, as `elbowroom.fit` takes it."""

    offload: str
    host_budget: str | None
    link: str | None


@dataclass(frozen=True)
class Training:
    """What a factory returned, checked. `name` is how the user named the factory."""

    name: str
    model: nn.Module
    batch: tuple[Any, ...] | Mapping[str, Any]
    loss: Callable[..., torch.Tensor] | None
    optimizer: torch.optim.Optimizer | None

    @property
    def args(self) -> tuple[Any, ...]:
        return () if isinstance(self.batch, Mapping) else self.batch

    @property
    def kwargs(self) -> Mapping[str, Any]:
        return self.batch if isinstance(self.batch, Mapping) else {}

    def fit(
        self, budget: int | str, times: str = "measure", kernels: str = "torch", **moves: Unpack[Moves]
    ) -> Handle:
        """The model under a budget, its batch planned already."""
        from elbowroom.api import fit
        from elbowroom.session.fitted import session_of

        example = (self.batch,) if isinstance(self.batch, Mapping) else self.batch
        with self._blaming():
            fitted = fit(
                self.model,
                *example,
                budget=budget,
                loss=self.loss,
                optimizer=self.optimizer,
                times=times,
                kernels=kernels,
                **moves,
            )
        return session_of(fitted)

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """Tell a model that does not run from a capture that does not: the first is the factory's to mend."""
        try:
            yield
        except ElbowroomError:
            raise
        except Exception:
            if (failure := self._plain_failure()) is not None:
                raise InputError(self.name, f"its step fails without elbowroom too: {_shown(failure)}") from failure
            raise

    def _plain_failure(self) -> Exception | None:
        """What plain execution of the same step raises, if it does."""
        import torch

        from elbowroom.api import fit

        plain = fit(self.model, budget=MAX_BYTES, loss=self.loss)  # without an example, nothing is captured
        try:
            with torch.no_grad():  # where a fitted model runs as it is
                plain(*self.args, **self.kwargs)
        except Exception as failure:
            return failure
        return None


def load_training(name: str) -> Training:
    """Import a factory, call it, and check what it returns; every complaint starts with the factory's name."""
    require_torch()
    factory = _import_factory(name)
    try:
        returned = factory()
    except (Exception, SystemExit) as failure:
        raise InputError(name, f"the factory raised {_shown(failure)}") from failure
    return _checked(name, returned)


def require_torch() -> None:
    """Refuse in one line where PyTorch is missing; where it is not, keep its profiler's notes off the terminal."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "7")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        import torch  # noqa: F401
    except ImportError as failure:
        raise InputError(
            "torch",
            f"this command needs it ({failure}); install elbowroom with torch: pip install 'elbowroom[torch]'",
        ) from None


# --- from a name to a function -------------------------------------------------------------------------------


def _import_factory(name: str) -> Callable[[], Any]:
    module_name, colon, attribute = name.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise InputError("FACTORY", f"must be {FORM}, such as train:build, not {name!r:.80}")
    found: Any = _import_module(name, module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, dir(found), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InputError(name, f"{module_name} has no {attribute!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(name, f"is not callable: it is {_kind(found)}")
    return found  # type: ignore[no-any-return]


def _import_module(name: str, module_name: str) -> Any:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()  # the file may be younger than what the importer remembers of its folder
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as failure:
        missing = failure.name or ""
        if missing == module_name or module_name.startswith(f"{missing}."):
            raise InputError(name, f"there is no module {missing!r} in {here} or among those installed") from None
        raise InputError(name, f"importing {module_name} raised {_shown(failure)}") from failure
    except (Exception, SystemExit) as failure:
        raise InputError(name, f"importing {module_name} raised {_shown(failure)}") from failure


# --- from what it returned to a training ---------------------------------------------------------------------


def _checked(name: str, returned: Any) -> Training:
    import torch
    from torch import nn

    if not isinstance(returned, tuple) or not 2 <= len(returned) <= 4:
        length = f" of {len(returned)}" if isinstance(returned, tuple) else ""
        raise InputError(name, f"{_RETURNS}, not {_kind(returned)}{length}")
    model, batch, loss, optimizer = (*returned, None, None)[:4]
    if not isinstance(model, nn.Module):
        raise InputError(name, f"{_RETURNS}; its model is {_kind(model)}, not a torch.nn.Module")
    if not isinstance(batch, tuple | Mapping):
        hint = "; a single tensor goes as (x,)" if isinstance(batch, torch.Tensor) else ""
        raise InputError(name, f"its batch must be a tuple or a mapping of arguments, not {_kind(batch)}{hint}")
    if not batch:
        raise InputError(name, "its batch is empty: it must hold what the model is called with")
    if loss is not None and not callable(loss):
        raise InputError(name, f"its loss must be callable or None, not {_kind(loss)}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(name, f"its optimizer must be a torch.optim.Optimizer or None, not {_kind(optimizer)}")
    return Training(name, model, batch, loss, optimizer)


def _kind(value: Any) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _shown(failure: BaseException) -> str:
    """`ValueError: what it said`, in one line of bearable length."""
    said = " ".join(str(failure).split())
    said = said if len(said) <= 300 else f"{said[:300]} …"
    return f"{type(failure).__name__}: {said}" if said else type(failure).__name__
