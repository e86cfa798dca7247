"""A model under a budget: plans each new graph of it, runs the planned programs, and plans again where it must.

A session belongs to one fitted model. PyTorch tells which graph a call runs (`looking.py`); a graph that is new is
measured and planned within the budget (`planning.py`) before the call goes on. A step that cannot be one graph is
planned as several, call by call, and what no graph holds is said.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from threading import RLock
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from elbowroom.capture.unplanned import UnseenHooks, unplanned_nodes
from elbowroom.errors import BudgetTooSmall, ElbowroomError, first_line
from elbowroom.execute.region import Region, Stopped, weakly
from elbowroom.measure.random_state import random_state_kept
from elbowroom.measure.resident import device_bytes, give_back_cached
from elbowroom.session.calls import call_key
from elbowroom.session.handle import Handle
from elbowroom.session.inputs import check_optimizer
from elbowroom.session.looking import Looker, NotWhole, Sight
from elbowroom.session.options import Options
from elbowroom.session.planning import fused_or_plain
from elbowroom.session.row import Row
from elbowroom.session.saying import no_backward, ran_without_program, say_fallback, too_many_shapes
from elbowroom.session.steps import Entry, StepPlanner, release_others, reserve_host
from elbowroom.session.traces import MOST_TRACES, Traces
from elbowroom.units import format_bytes, parse_bytes

_STALE = -1  # the generation of entries some of whose graphs never run again


class Session(Handle):
    """Runs a step, a function of the batch that calls the model, within a budget.

    `entries` has one for each graph that holds a whole step, under that graph; other calls are under their key.
    """

    def __init__(
        self, model: nn.Module, make_step: Callable[[nn.Module], Callable[..., Any]], options: Options
    ) -> None:
        super().__init__(model, make_step, options)
        self.entries: dict[Any, Entry] = {}
        self._keyed = False  # whether some entry is under a key
        self._running: Entry | None = None
        self._replaced: WeakSet[Region] = WeakSet()  # graphs that another one of the same key has taken the place of
        self._alternating: set[Any] = set()  # keys for which several graphs take turns
        self._traced_midway = False  # whether a graph was traced in the middle of the present step
        self._midway: WeakSet[Region] = WeakSet()  # graphs that were, each with a plan of its own
        self._instead: Session | None = None
        self._hooks = UnseenHooks(model)
        self._planning = RLock()
        self._planner = StepPlanner(model, options)
        self._row = Row(self._planner, self._watch, self._say_unplanned)
        self._looker = Looker(
            model,
            self.step,
            self._plan_midway,
            no_backward=no_backward(options.loss is not None),
            fused=options.fuses,
            graph_limit=(MOST_TRACES + 1) * (options.max_shapes + 1),
        )
        self._traces = Traces(self._looker)
        whole, parts = self._looker.looks, self._looker.part_looks
        whole.may_run, parts.may_run = weakly(self._may_run), weakly(self._row.comes)
        for looks in (whole, parts):
            looks.on_backward, looks.hold = weakly(self._backward_begins), weakly(self._watch.hold)

    # --- running ---

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if hook := self._hooks.found():
            self._say_unplanned(hook)
            return self._run_plainly(args, kwargs)
        if self._keyed:
            key = call_key(self.model, args, kwargs)
            entry = self._known(key)
            if entry is None and self._is_full(key):
                entry = self._remember(Entry(key, unplanned=too_many_shapes(self.options.max_shapes)))
            if entry is not None:
                return self._run_apart(entry, args, kwargs)
        looks = self._looker.looks
        while True:
            begun = looks.begun
            try:
                outputs = self._looker.run(args, kwargs)
            except Stopped as stopped:
                region = stopped.region
            except NotWhole as refusal:
                why = refusal.with_traceback(None)  # which knows this variable, and the step's values
                break
            else:
                if looks.begun == begun:
                    self._say_unplanned("PyTorch ran it without tracing it; is that switched off, as by set_stance?")
                    self._gradients.expect_one()
                self._after_forward(self._running, outputs)
                return outputs
            entry = self._planned(region, args, kwargs)
            if not entry.graphs:
                return self._run_apart(entry, args, kwargs)
        return self._run_not_whole(why, args, kwargs)

    def _may_run(self, region: Region) -> bool:
        """Whether a graph may run now as planned. If not, `_planned` sees to it."""
        entry = self.entries.get(region)
        if entry is None or entry.begins_with_gradients or entry.excess_bytes:
            return False
        self._begin(entry)
        return True

    def _begin(self, entry: Entry) -> None:
        """A planned step begins."""
        if entry is not self._running:
            release_others(self.entries.values(), entry)
            self._running = self._latest = entry
        entry.watch_kept_gradients()
        if entry.unwatched and entry.plan is not None:
            self._watch.begin(entry, entry.plan, entry.graphs[0].device, self.options.optimizer)

    def _run_not_whole(self, refusal: NotWhole, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if refusal.in_parts or self.options.strict or (refusal.failed is not None and self.options.fuses):
            try:
                entry = self._prepare_apart(refusal, args, kwargs)
            except (ElbowroomError, torch.OutOfMemoryError):
                raise
            except Exception:  # the step fails: it does so once more, and what it does before that stays done
                return self._run_plainly(args, kwargs)
            return self._run_apart(entry, args, kwargs)
        outputs = self._run_plainly(args, kwargs)  # if it is the step that fails, it does so here, as without a plan
        self._remember(Entry(call_key(self.model, args, kwargs), unplanned=refusal.why))
        return outputs

    def _run_apart(self, entry: Entry, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A step that is not one graph: in parts, by another session, or unplanned."""
        if entry.begins_with_gradients:
            entry = self._plan_again(entry, lambda: self._plan_parts(args, kwargs))
        if entry.excess_bytes:
            self._leave_room(entry)
        self._latest = entry
        if entry.instead is not None:
            return entry.instead(*args, **kwargs)
        if not entry.graphs:
            return self._run_plainly(args, kwargs)
        self._begin(entry)
        looks, expected = self._looker.part_looks, len(entry.regions) // self.options.forwards
        begun = looks.begun
        try:
            with self._row.follow(entry, entry.regions[:expected], (args, kwargs)):
                outputs = self._looker.run_parts(args, kwargs)
        except BaseException:
            self._watch.give_up()  # maybe nothing is there yet that would tell it so
            raise
        self._traces.step_ends(entry.key, planned_midway=self._traced_midway)
        if self._traced_midway:  # the model has changed under this shape: look at it afresh before the next step
            self._traced_midway = False
            entry.generation = _STALE
            gc.collect()  # tracing leaves rings with the step's values, of which PyTorch collects the young
        elif looks.begun - begun < expected:  # data led the step elsewhere, or PyTorch runs some of it as it is
            if left_out := unplanned_nodes(self.model, outputs):
                self._say_unplanned(ran_without_program(left_out))
            if looks.begun == begun:
                self._gradients.expect_one()
        self._after_forward(entry, outputs)
        return outputs

    # --- watching ---

    def _awaits_backward(self) -> bool:
        waits = self._looker.looks.await_backward or self._looker.part_looks.await_backward
        return waits or (self._instead is not None and self._instead._awaits_backward())

    def _leave_room(self, entry: Entry) -> None:
        """Plan a step again that took more than its budget; if that does not fit, the plan stays and it is said."""
        self._planner.leave_room(entry)
        reserve_host(self._looker.looks.host_room, self.entries.values())
        if entry.shortfall:
            self._say_unplanned(entry.shortfall)

    def _after_forward(self, entry: Entry | None, outputs: Any) -> None:
        self._watch.note_outputs(outputs)
        for region in dict.fromkeys(entry.regions) if entry is not None else ():
            if len(region.tickets.waiting) > entry.regions.count(region):  # type: ignore[union-attr]
                self._say_unplanned(
                    f"more than {self.options.forwards} of its forwards wait for their backward; pass forwards=…"
                )

    # --- planning ---

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        """The entry of this call, planned now if it is new."""
        if hook := self._hooks.found():
            self._say_unplanned(hook)
            return Entry(call_key(self.model, args, kwargs), unplanned=hook)
        with random_state_kept():
            self._latest = entry = self._prepare(args, kwargs)
        return entry

    def _prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        entry = self._known(call_key(self.model, args, kwargs)) if self._keyed else None
        if entry is not None:
            return entry
        try:
            region = self._looker.look(args, kwargs)
        except NotWhole as refusal:
            why = refusal.with_traceback(None)
        else:
            return self._planned(region, args, kwargs)
        return self._prepare_apart(why, args, kwargs)

    def _known(self, key: Any) -> Entry | None:
        """The entry of a key. A stale one is forgotten: its step is looked at once more, before it begins.

        In a backward, a checkpoint around the model runs its forward again, with the programs that it ran then.
        """
        entry = self.entries.get(key)
        if entry is not None and self._is_stale(entry) and torch._C._current_graph_task_id() < 0:
            self._forget(entry)
            return None
        return entry

    def _is_stale(self, entry: Entry) -> bool:
        """Whether some of its graphs never run again, because all is traced anew or something in it has changed."""
        return bool(entry.graphs) and entry.generation != self._looker.generation

    def _planned(self, region: Region, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        """The entry of a graph that holds a whole step, planned so that it may run."""

        def plan_new() -> Entry:
            key = call_key(self.model, args, kwargs)
            return self._plan_new(key, lambda: self._planner.plan(key, Sight((region,)), args, kwargs), args, kwargs)

        with self._planning:
            entry = self.entries.get(region)
            if entry is None:
                return plan_new()
            if entry.begins_with_gradients:
                return self._plan_again(entry, plan_new)
            if entry.excess_bytes:
                self._leave_room(entry)
            return entry

    def _prepare_apart(self, refusal: NotWhole, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        """The entry of a step that was not traced as a whole."""
        key = call_key(self.model, args, kwargs)
        if refusal.in_parts:
            return self._plan_parts(args, kwargs)
        self._looker.raise_own_error(args, kwargs)
        if refusal.failed is not None and self.options.fuses:
            return self._plan_new(key, refusal.fail, args, kwargs)
        return self._remember(Entry(key, unplanned=refusal.why))

    def _plan_parts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        key = call_key(self.model, args, kwargs)

        def plan() -> Entry:
            try:
                sight = self._looker.look_at_parts(args, kwargs)
            except TorchDynamoException as failure:
                self._looker.forget()
                self._looker.raise_own_error(args, kwargs)
                sight = Sight((), f"tracing it failed ({type(failure).__name__}: {first_line(failure)})")
            return self._planner.plan(key, sight, args, kwargs)

        with self._planning:
            return self._plan_new(key, plan, args, kwargs)

    def _plan_new(
        self, key: Any, plan: Callable[[], Entry], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Entry:
        release_others(self.entries.values(), None)
        self._running = None
        self._traces.count(key)
        if self._is_full(key):
            entry = Entry(key, unplanned=too_many_shapes(self.options.max_shapes))
        elif self._traces.too_many(key):
            entry = Entry(key, unplanned="something in it, such as a list that grows, makes each step another one")
        elif self.options.fuses:
            entry = fused_or_plain(
                plan,
                lambda: self._plan_unfused(key, args, kwargs),
                lambda why: say_fallback(type(self.model).__name__, why, self.said),
            )
        else:
            entry = plan()
        entry.generation = self._looker.generation
        give_back_cached()
        reserve_host(self._looker.looks.host_room, [*self.entries.values(), entry])
        self._remember(entry)
        reserve_host(self._looker.looks.host_room, self.entries.values())  # another one's place may have been taken
        return entry

    def _is_full(self, key: Any) -> bool:
        shapes = {entry.key for entry in self.entries.values() if entry.graphs or entry.instead is not None}
        return key not in shapes and len(shapes) >= self.options.max_shapes

    def _remember(self, entry: Entry) -> Entry:
        """Say what is not planned of it, then keep an entry for the calls that follow."""
        self._say_what_is_not(entry)
        whole = entry.regions[0] if len(set(entry.regions)) == 1 else None
        if whole is None or whole.looks is not self._looker.looks:
            self.entries[entry.key] = entry
            self._keyed = True
            return entry
        if whole in self._replaced:
            self._alternating.add(entry.key)
        elif entry.key not in self._alternating:
            for region in [k for k, e in self.entries.items() if e.key == entry.key and isinstance(k, Region)]:
                # A number that changes is an input of the new graph; as a rule, the old one never comes again.
                self._replaced.add(region)
                del self.entries[region]
        self.entries[whole] = entry
        return entry

    def _say_what_is_not(self, entry: Entry) -> None:
        """What is not planned of an entry, or not within the budget."""
        for why in (entry.unplanned, entry.shortfall):
            if why:
                self._say_unplanned(why)

    def _forget(self, entry: Entry) -> None:
        self.entries = {key: other for key, other in self.entries.items() if other is not entry}

    def _plan_unfused(self, key: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        """The same with PyTorch's kernels, in a session of its own."""
        if self._instead is None:
            self._instead = Session(self.model, self.make_step, replace(self.options, kernels="torch"))
            self._instead._gradients = self._gradients
        entry = self._instead.prepare(args, kwargs)
        return Entry(key, plan=entry.plan, unplanned=entry.unplanned, instead=self._instead, instead_entry=entry)

    def _plan_midway(self, region: Region) -> None:
        """A graph is traced in the middle of a step in parts: something else than the shape has changed.

        If it does not fit, the step goes on all the same, because what it did so far stays done; the next step is
        refused before it begins.
        """
        self._midway.add(region)
        self._row.was_fitted(region)
        self._traced_midway = True
        least = ""
        with self._watch.paused():
            try:
                waiting_bytes = self._planner.plan_midway(region, self._running)
            except BudgetTooSmall as refusal:
                waiting_bytes = self._planner.plan_midway(region, self._running, refusal.least_budget)
                least = format_bytes(refusal.least_budget)
            give_back_cached()
        if least:
            self._say_unplanned(f"something in it changed in the middle of a step, and it needs at least {least} now")
        entry = self._running
        if entry is not None and entry.plan is not None:
            self._watch.begin(entry, entry.plan, region.traced.device, self.options.optimizer, waiting_bytes)

    # --- planning again ---

    def _plan_again(self, entry: Entry, plan: Callable[[], Entry]) -> Entry:
        """Gradients of an earlier backward are there, whose memory the plan uses: plan without it from now on.

        Where they are kept once, they will be again. If that does not fit, the plan stays and it is said.
        """
        if self.options.plan is not None:
            return self._plan_stays(
                entry, "its plan is for steps that begin without; set them to None, or plan again"
            )
        known = self.entries
        self._forget(entry)
        try:
            return plan()
        except BudgetTooSmall as refusal:
            self.entries = known
            least = format_bytes(refusal.least_budget)
            return self._plan_stays(entry, f"set them to None before each step, or allow {least}, to keep them")
        except BaseException:
            self.entries = known
            raise

    def _plan_stays(self, entry: Entry, remedy: str) -> Entry:
        entry.late, entry.unwatched = [], 0  # said once
        self._say_unplanned(f"a step began with the gradients of an earlier backward; {remedy}")
        return entry

    def set_budget(self, budget: int | str) -> None:
        """Plan every shape seen so far within another budget; if one cannot, nothing changes."""
        size = parse_bytes(budget, device_bytes=device_bytes(self.model))
        self._replan(replace(self.options, budget=size, plan=None), lambda instead: instead.set_budget(size))

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the state of an optimizer that was made after `fit`, and plan every shape seen so far again.

        If one does not fit with it, nothing changes.
        """
        check_optimizer(self.model, optimizer)
        self._replan(
            replace(self.options, optimizer=optimizer, plan=None), lambda instead: instead.set_optimizer(optimizer)
        )

    def _replan(self, options: Options, tell_instead: Callable[[Session], None]) -> None:
        for entry in [entry for entry in self.entries.values() if entry.generation == _STALE]:
            self._forget(entry)
        entries = [entry for entry in self.entries.values() if entry.plan is not None and entry.instead is None]
        old = self.options
        self._watch.give_up()
        self._planner.replan(entries, options)
        for region in self._midway - {region for entry in entries for region in entry.regions}:
            region.uninstall()
        try:
            reserve_host(self._looker.looks.host_room, self.entries.values())
            if self._instead is not None:
                tell_instead(self._instead)
        except BaseException:
            self._planner.replan(entries, old)
            reserve_host(self._looker.looks.host_room, self.entries.values())
            raise
        give_back_cached()
        self.options = options
        self.said.clear()  # what is not planned is said again, of the new budget
        for entry in self.entries.values():
            if entry.instead is not None:
                assert entry.instead_entry is not None
                entry.plan = entry.instead_entry.plan
            self._say_what_is_not(entry)

    # --- what others ask ---

    def fuses(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether fused kernels run this shape of input, or some of it: if part is traced anew, no entry is left."""
        entry = self.entries.get(call_key(self.model, args, kwargs))
        return self.options.fuses and (entry is None or bool(entry.graphs))

    def again(self, model: nn.Module) -> Session:
        """A session with the same options for another copy of the model."""
        return Session(model, self.make_step, self.options)
