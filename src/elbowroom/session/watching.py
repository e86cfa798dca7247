"""Watches the first steps of a plan: what the allocator says that they took, against the budget.

A plan knows what its programs take. It does not know what is around them: a loss outside, what a part of the model
that is not traced takes while it runs, what somebody else allocates in between. The allocator does.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from elbowroom.measure.memory import allocated_storages
from elbowroom.measure.resident import rounded
from elbowroom.measure.step_peak import StepPeak
from elbowroom.plan.plan import Plan

OUTSIDE = "outside the plan"  # among what is resident: what was seen to be taken besides, and is left free
BETWEEN = "between graphs"  # among what is resident: what a step makes before and between its planned graphs
WATCHED_STEPS = 3  # of each plan: the second may begin with gradients or an optimizer's state that the first made


class Watch:
    """Measures one step at a time, from its first forward to the end of its backward.

    `on_end` is called there, with the bytes that were in use when it began and at the most.
    """

    def __init__(self, model: nn.Module, on_end: Callable[[Any, int, int], None]) -> None:
        self._model = model
        self._on_end = on_end
        self._peak: StepPeak | None = None
        self._of: Any = None
        self._base_bytes = 0
        self._thread = 0
        self._in_backward = False
        self._outputs: list[
            Callable[[], torch.UntypedStorage | None]
        ] = []  # of the latest forward, if they are there
        self._step: _Step | None = None  # until the step's first graph holds it
        self._held: Callable[[], _Step | None] = lambda: None  # the same, seen from here, from then on

    def begin(self, of: Any, plan: Plan, device: torch.device, optimizer: Any, waiting_bytes: int = 0) -> None:
        """A forward of `of` begins; if an earlier one of it still waits for its backward, both are one step.

        A step that was not watched so far may be under way: then something waits for its backward.
        """
        if self._peak is not None and self._of is of:
            return
        if torch._C._current_graph_task_id() >= 0:
            return  # a checkpoint around the model runs its forward again, and no profiler could be ended there
        self.give_up()
        base_bytes = _base_bytes(self._model, plan, device, optimizer, waiting_bytes)
        peak = StepPeak()
        limit = plan.budget_bytes - base_bytes
        earlier = [storage for known in self._outputs if (storage := known()) is not None]
        if peak.start(device, limit_bytes=limit, watched=list(self._model.parameters()), uncounted=earlier):
            self._peak, self._of, self._base_bytes, self._thread = peak, of, base_bytes, threading.get_ident()
            self._step = _Step()
            self._held = weakref.ref(self._step, self._nothing_holds)
            _WATCHES.add(self)

    def note_outputs(self, outputs: Any) -> None:
        """What a watched forward has returned may go in the middle of the next, and counts in neither. Where no graph
        has run, as PyTorch may do with all of a model, there is nothing to wait for."""
        if self._step is not None:
            self.give_up()
        if self._peak is not None:
            tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
            self._outputs = [weakref.ref(storage) for storage in allocated_storages(tensors)]

    def hold(self) -> _Step | None:
        """What every graph of the step keeps for its backward. When nobody keeps it, no backward comes any more."""
        if self._peak is None:
            return None
        step, self._step = self._held(), None
        return step

    def _nothing_holds(self, _: object) -> None:
        if not self._in_backward:
            self.give_up()

    def paused(self) -> AbstractContextManager[None]:
        """What the block allocates is no part of the step that is watched."""
        return self._peak.paused() if self._peak is not None else nullcontext()

    def backward_begins(self) -> None:
        """Called in the backward, as often as graphs have one."""
        self._in_backward = self._peak is not None

    def backward_ends(self) -> None:
        """Called in the thread that started a backward, whichever model it was of."""
        if self._in_backward and self._thread == threading.get_ident():
            peak, of = self._peak, self._of
            taken = peak.stop() if peak is not None else None
            self.give_up()
            if taken is not None:
                self._on_end(of, self._base_bytes, self._base_bytes + taken)

    def give_up(self) -> None:
        if self._peak is not None:
            self._peak.stop()
            self._peak = self._of = self._step = None
            self._in_backward = False
            self._held = lambda: None
            _WATCHES.remove(self)


class _Step:
    """Stands for a step that is under way."""


class _Watches:
    """Those that wait for the end of a backward.

    PyTorch has callbacks for that, but they run inside of the backward, where what belongs to a thread, as a profiler
    does, cannot be ended. So the function that starts backwards is wrapped, as long as somebody waits. Backwards may
    start others, as those of stages do: a step ends with the one that began first in its thread.
    """

    def __init__(self) -> None:
        self._waiting: list[Watch] = []
        self._inside = threading.local()
        self._start: Callable[..., Any] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def add(self, watch: Watch) -> None:
        self._waiting.append(watch)
        torch.autograd._engine_run_backward = self._run_backward  # type: ignore[attr-defined]

    def remove(self, watch: Watch) -> None:
        self._waiting = [each for each in self._waiting if each is not watch]
        if not self._waiting:
            torch.autograd._engine_run_backward = self._start  # type: ignore[attr-defined]

    def _run_backward(self, *args: Any, **kwargs: Any) -> Any:
        is_inner = getattr(self._inside, "backward", False)
        self._inside.backward = True
        try:
            result = self._start(*args, **kwargs)
        except BaseException:
            for watch in self._waiting:
                if watch._in_backward:
                    watch.give_up()
            raise
        finally:
            self._inside.backward = is_inner
        if not is_inner:
            for watch in self._waiting:
                watch.backward_ends()
        return result


_WATCHES = _Watches()


def _base_bytes(model: nn.Module, plan: Plan, device: torch.device, optimizer: Any, waiting_bytes: int) -> int:
    """What counts against the budget now.

    On CUDA the allocator knows, but for state that an optimizer will make at its first step. On the CPU it is what
    the plan counts as resident, without the gradients that are not there yet, and what waits for its backward.
    """
    state_bytes = plan.resident.get("optimizer", 0)
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) + (0 if optimizer is None or optimizer.state else state_bytes)
    missing = [p for p in model.parameters() if p.requires_grad and p.grad is None and p.device.type == device.type]
    gradients = sum(rounded(p.numel() * p.element_size(), device) for p in missing)
    return max(0, _known_bytes(plan.resident) - gradients) + waiting_bytes


def _known_bytes(resident: Mapping[str, int]) -> int:
    """Without what is not there yet when a step begins."""
    return sum(size for name, size in resident.items() if name not in (OUTSIDE, BETWEEN))


def more_outside(plan: Plan, excess_bytes: int) -> int:
    """Bytes to leave free in the next plan for what happens outside, after a step that took so much too much.

    What this plan did not use of the budget, what is outside has taken, too.
    """
    unused_bytes = max(0, plan.budget_bytes - plan.peak_bytes)
    varies_bytes = max(1024, excess_bytes // 8)  # from step to step, a little
    return plan.resident.get(OUTSIDE, 0) + unused_bytes + excess_bytes + varies_bytes
