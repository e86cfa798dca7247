"""Looking at a model: traces one call of it and tells which graphs it runs and what it leaves out.

There are two ways. As a whole: one graph holds the whole step, and PyTorch raises an error if it cannot. Tracing runs
nothing of the user's, so a look changes nothing, and a call of which something new is found has not begun yet. In
parts: where the step has to be cut, PyTorch learns of a later graph only by running what is before it, so that the
step runs once, computing outputs only, and everything that it changed is put back.
"""

from __future__ import annotations

import gc
import random
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NoReturn
from weakref import finalize

import torch
from torch import nn
from torch._dynamo import convert_frame
from torch._dynamo.eval_frame import remove_from_cache
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    TorchDynamoException,
    Unsupported,
    UserError,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from elbowroom.capture.backend import make_backend
from elbowroom.capture.joint_graph import DATA_DEPENDENT
from elbowroom.capture.settings import capture_settings
from elbowroom.capture.unplanned import unplanned_nodes
from elbowroom.errors import ElbowroomError, first_line, let_go_of_values
from elbowroom.execute.passed_on import Storage
from elbowroom.execute.region import Looks, Region, Stopped, weakly
from elbowroom.measure.undisturbed import Irreversible, undisturbed

_NUMBERS = count(1)
_MOST_LOOKS = 4  # at a step in parts: after two that differ, what differs is an input


@dataclass(frozen=True)
class Sight:
    """The graphs that one call runs, in order; a graph may run twice. `left_out` says what no graph holds, if any.
    `passed_on` is what they are called with that none of them makes, and what other graphs leave in memory."""

    regions: tuple[Region, ...]
    left_out: str = ""
    passed_on: tuple[Storage, ...] = ()


class NotWhole(Exception):
    """A step was not traced as a whole. `why` is for people.

    `in_parts`: it may be in parts. `failed` is what failed in elbowroom's own reading of the graph, if that did.
    Otherwise the graph as a whole cannot be planned, or tracing itself failed, maybe because the step fails.
    """

    def __init__(self, why: str, *, in_parts: bool = False, failed: Exception | None = None) -> None:
        super().__init__(why)
        self.why, self.in_parts, self.failed = why, in_parts, failed

    def fail(self) -> NoReturn:
        """Where planning would take what failed for its own."""
        assert self.failed is not None
        raise self.failed


class _Refused(Exception):
    """A graph that cannot be planned."""


class Looker:
    """Traces a step, a function that calls the model, and runs it as traced.

    `on_capture` is called with a graph that is traced in the middle of a step in parts, and must install a program.
    `no_backward` is what to say of a step without any gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Callable[..., Any],
        on_capture: Callable[[Region], None],
        *,
        no_backward: str,
        fused: bool,
        graph_limit: int,
    ) -> None:
        self.model = model
        self.looks, self.part_looks = Looks(), Looks()  # shared by the graphs of whole steps, and by those of parts
        self.part_looks.host_room = self.looks.host_room
        self._random: Any = None  # the state of Python's generator before the present call, where it is known
        self._draws = False  # whether a step is known to draw from it
        self._step = step
        self._on_capture = on_capture
        self._no_backward = no_backward
        self._fused = fused
        self._graph_limit = graph_limit
        self._refusals: list[str] = []
        self._traced_parts = 0
        self._generation = 0
        self._mark = compile("", "elbowroom", "exec")  # code that PyTorch will know as long as it knows ours
        self._codes: list[types.CodeType] = []
        finalize(self, _let_go, self._codes, (self.looks, self.part_looks)).atexit = False
        self.forget()

    @property
    def generation(self) -> int:
        """Of code: graphs of an earlier one never run again. `torch._dynamo.reset()` begins a new one, too."""
        if self._mark not in convert_frame.input_codes:
            convert_frame.input_codes.add(self._mark)
            self._generation += 1
        return self._generation

    def forget(self) -> None:
        """Trace afresh from now on.

        PyTorch keeps what it knows of a function with its code, for good: also that it gave up on it after an error.
        So each session has code of its own, and new code when something went wrong.
        """
        self._generation += 1

        def refuse(why: str) -> None:
            raise _Refused(why)

        looks, part_looks, inference_ran = self.looks, self.part_looks, weakly(self._inference_ran)
        whole = make_backend(
            lambda traced: Region(traced, looks),
            weakly(self._whole_captured),
            refuse,
            on_inference=partial(refuse, self._no_backward),
            fused=self._fused,
        )
        parts = make_backend(
            lambda traced: Region(traced, part_looks),
            weakly(self._part_captured),
            self._refusals.append,
            on_inference=lambda: inference_ran,
            fused=self._fused,
        )
        whole_step, step_in_parts = _with_own_code(self._step), _with_own_code(self._step)
        self._codes += [whole_step.__code__, step_in_parts.__code__]
        self._whole = _compiled_whole(whole_step, whole)
        self._parts = torch.compile(step_in_parts, backend=parts)

    # --- as a whole ---

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The step as one graph. `Stopped` if the graph may not run yet, `NotWhole` if there is none."""
        begun = self.looks.begun
        self._random = random.getstate() if self._draws else None
        try:
            with capture_settings(self._graph_limit):
                return self._whole(*args, **kwargs)
        except Stopped:
            self._put_back_random_numbers()
            raise
        except Exception as failure:
            if self.looks.begun != begun or isinstance(failure, ElbowroomError):
                raise
            refusal = self._not_whole(failure)
            let_go_of_values(failure)
        raise refusal  # here, where it is not linked to the failure, which knows the step's values

    def look(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Region:
        """The one graph of a step. Nothing of the step runs."""
        with self.looks.looking(ends=True), torch.enable_grad():
            try:
                self.run(args, kwargs)
            except Stopped as stopped:
                return stopped.region
        raise NotWhole("PyTorch did not trace it", in_parts=True)

    def _whole_captured(self, region: Region) -> None:
        self._random = self._random or random.getstate()

    def _put_back_random_numbers(self) -> None:
        """A step's numbers of Python's generator are drawn before its graph runs; if it did not, they come again."""
        if self._random is not None and self._random != random.getstate():
            self._draws = True
            random.setstate(self._random)

    def _not_whole(self, failure: Exception) -> NotWhole:
        cause = getattr(failure, "inner_exception", None)
        if isinstance(cause, ElbowroomError):
            raise cause from None
        if isinstance(cause, _Refused):
            # In parts, numbers are read out of tensors between graphs, and the shapes that they make are known.
            return NotWhole(str(cause), in_parts=str(cause) == DATA_DEPENDENT)
        if isinstance(failure, FailOnRecompileLimitHit):
            return NotWhole(f"it was traced {self._graph_limit} times, and something in it still changes every time")
        if isinstance(failure, Unsupported | UserError | GuardOnDataDependentSymNode):  # what only a run can tell
            return NotWhole(_where(failure), in_parts=True)
        self.forget()
        if isinstance(failure, BackendCompilerFailed) and isinstance(cause, Exception):
            return NotWhole(f"reading its graph failed ({_shown(cause)})", failed=cause)
        if isinstance(failure, TorchDynamoException):
            return NotWhole(f"tracing it failed ({_shown(failure)})")
        return NotWhole(f"tracing it raised {_shown(failure)}")

    # --- in parts ---

    def run_parts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The step as it was traced in parts, with the programs that are installed."""
        with capture_settings(self._graph_limit), _own_errors():
            return self._parts(*args, **kwargs)

    def look_at_parts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sight:
        """What one call runs, and what it leaves out. What the call changes is put back; if that cannot be, nothing
        runs.

        The step runs until nothing new is traced: numbers that change from step to step, as counters and random ones
        do, are known as such only once they have changed.
        """
        try:
            return self._look_undisturbed(args, kwargs)
        except Irreversible as refusal:
            return Sight((), f"it has to be run to be looked at, and holds {refusal}; stages=[…] needs no tracing")

    def raise_own_error(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """If a step fails without elbowroom, too, that is the error to be seen."""
        with suppress(Irreversible), undisturbed(self.model, self._step, args, dict(kwargs)):
            with torch.no_grad(), suppress(Exception):
                self._step(*args, **kwargs)
                return
            with torch.enable_grad():  # it may only work with gradients
                self._step(*args, **kwargs)

    def _look_undisturbed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sight:
        with undisturbed(self.model, self._step, args, dict(kwargs)), torch.enable_grad():
            for _ in range(_MOST_LOOKS):
                self._refusals[:] = []
                self._traced_parts = 0
                with self.part_looks.looking(ends=False) as calls:
                    outputs = self.run_parts(args, kwargs)
                    self.part_looks.passed_on.end()
                for region in set(calls):
                    region.note_overwritten()
                left_out = unplanned_nodes(self.model, outputs)
                del outputs
                if not self._traced_parts:
                    break
        gc.collect()  # so that what the look has made can be told from what is there before a step
        return Sight(tuple(calls), self._said_of(tuple(calls), left_out), self.part_looks.passed_on.found)

    def _inference_ran(self, outputs: list[Any]) -> None:
        if self.part_looks.now:
            self.part_looks.passed_on.made(outputs)

    def _part_captured(self, region: Region) -> None:
        self._traced_parts += 1
        region.at_first = weakly(self._on_capture)  # it may come again in a step that is planned without it
        if not self.part_looks.now:
            self._on_capture(region)

    def _said_of(self, regions: tuple[Region, ...], left_out: str) -> str:
        if self._refusals:
            return self._refusals[0]
        if not regions:
            return "PyTorch did not trace it"
        if left_out:
            return (
                f"part of it runs outside the traced graphs ({left_out}); TORCH_LOGS=graph_breaks shows where "
                "tracing stops, and stages=[…] needs no tracing"
            )
        return ""


def _let_go(codes: list[types.CodeType], looks: tuple[Looks, Looks]) -> None:
    """A session has gone. PyTorch keeps what it has compiled for a code object until somebody tells it not to."""
    for code in codes:
        remove_from_cache(code)
    for region in [region for each in looks for region in each.regions]:
        region.retire()


def _with_own_code(function: Callable[..., Any]) -> types.FunctionType:
    """The same function with code that nobody else has.

    Its name is its own, too: what PyTorch has seen change from call to call, it keeps by file, line and name.
    """
    assert isinstance(function, types.FunctionType)
    name = f"{function.__name__}_{next(_NUMBERS)}"
    own = types.FunctionType(
        function.__code__.replace(co_name=name),
        function.__globals__,
        name,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def _compiled_whole(function: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """The same as `torch.compile(…, fullgraph=True)`, which PyTorch refuses to cut, but without what PyTorch does
    around each call of it, which is for one thread at a time.

    PyTorch counts the compiled code that a call runs, and raises an error after a call that ran none, when the step
    has had its effects and its result is lost. Threads share the counter, so that one reads what another has reset.
    PyTorch 2.11 switches tracing off for everything else during a call. Threads share that, too: when two take turns,
    one puts back what the other has set, and nothing is traced in parts any more.
    """
    whole: Any = torch._dynamo.optimize(backend=backend, nopython=True)
    whole.fullgraph = False  # read at each call, for that; tracing was told above
    return whole(function)  # type: ignore[no-any-return]


def _shown(failure: Exception) -> str:
    return f"{type(failure).__name__}: {first_line(failure)}"


def _where(failure: Exception) -> str:
    """What stopped the trace, and at which line of the user's."""
    stack: Any = getattr(failure, "real_stack", None) or ()
    at = f" ({stack[-1].filename}:{stack[-1].lineno})" if len(stack) else ""
    return f"PyTorch cannot trace it in one piece: {first_line(failure)}{at}"


@contextmanager
def _own_errors() -> Iterator[None]:
    """Our errors as they are, not wrapped in PyTorch's report about a backend that failed."""
    try:
        yield
    except BackendCompilerFailed as report:
        if isinstance(report.inner_exception, ElbowroomError):
            raise report.inner_exception from None
        raise
