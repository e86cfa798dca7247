"""The referee for chains: a machine with one memory, one computing unit and one host link.

Memory holds activations aℓ on their own ("plain"), saved sets āℓ (which contain aℓ), and the current gradient,
from δn at the start to δ0 at the end. While an operation runs, memory is everything stored, plus the operation's
outputs, plus its overhead (001 Table 2.1). A saved set āℓ needs aℓ₋₁ until backward ℓ, so that cannot be dropped.

Transfers run beside computation. An offloaded value leaves memory when its transfer has ended and the last
operation that reads it before it is prefetched again has ended; a prefetched one takes its room when its
transfer starts and can be read when it ends. On the host it takes room from the start of its offload to the end of
its prefetch, or until it is used up if the prefetch keeps the copy. With a budget, computation waits for offloads
that make room and prefetches wait for computations that do, and so offloads wait for room on the host; what no
waiting can mend is refused.
"""

from __future__ import annotations

from typing import cast

from elbowroom.errors import InvalidSchedule
from elbowroom.problem import Chain, Platform, Saving
from elbowroom.schedule.link import Link, Transfer
from elbowroom.schedule.operations import (
    Backward,
    Discard,
    Forward,
    Offload,
    Operation,
    Prefetch,
    Schedule,
)
from elbowroom.schedule.simulation import Simulation, refusal, total
from elbowroom.schedule.timeline import Span

Key = tuple[str, int]  # ("plain", ℓ) is aℓ on its own, ("saved", ℓ) is āℓ


def simulate_chain(
    chain: Chain, schedule: Schedule, budget: int | None = None, platform: Platform | None = None
) -> Simulation:
    """Run a schedule; `InvalidSchedule` says which operation cannot run and why."""
    machine = _Machine(chain, schedule, budget, platform or Platform())
    for index, operation in enumerate(schedule):
        machine.step(index, operation)
    return machine.finish()


class _Machine:
    def __init__(self, chain: Chain, schedule: Schedule, budget: int | None, platform: Platform) -> None:
        self.chain = chain
        self.schedule = schedule
        self.budget = budget
        self.activation = chain.output_bytes
        self.gradient = chain.gradient_bytes
        self.device: dict[Key, int] = {("plain", 0): chain.input_bytes}
        self.ways: dict[int, Saving] = {}  # how each live saved set was made, wherever it is
        self.host: dict[Key, int] = {}  # copies that are there
        self.held: dict[Key, int] = {}  # room on the host, taken also by what is on its way
        self.incoming: dict[Key, Transfer] = {}  # prefetches not yet arrived
        self.staying: set[Key] = set()  # of these, the ones whose copy on the host stays
        self.deferred: dict[int, list[Transfer]] = {}  # prefetches by the operation with which they start
        self.leaving: dict[Key, Transfer] = {}  # offloads whose device copy is not yet released
        self.position = len(chain)  # the current gradient is δ of this stage's output
        self.stored = chain.input_bytes + self.gradient[-1]
        self.transient = 0
        self.now: float = 0
        self.durations: list[float] = []
        self.stall: float = 0
        self.spans: list[Span] = []
        self.span_start: float = 0
        self.index = 0
        self.done = False  # whether the operation `index` has run
        self.peak = -1
        self.peak_index = 0
        self.transfers: list[Span] = []
        self.host_bytes = platform.host_bytes
        self.host_now = self.host_peak = 0
        self.link: Link | None = None
        if platform.has_link:
            self.link = Link(platform, self._may_start, self._transfer_started, self._transfer_ended)
        self.last_reader = _last_readers(schedule) if self.link else {}

    # --- operations ------------------------------------------------------------------------------------------

    def step(self, index: int, operation: Operation) -> None:
        self.index, self.done = index, False
        at = getattr(operation, "at", None)
        if not isinstance(at, int) or not 1 <= at <= len(self.chain):
            raise self._refuse(f"there is no stage {at} in a chain of {len(self.chain)}")
        if isinstance(operation, Forward):
            self._forward(at, operation)
        elif isinstance(operation, Backward):
            self._backward(at)
        elif isinstance(operation, Discard):
            self._discard(at, operation)
        elif isinstance(operation, Offload):
            self._offload(at, operation)
        elif isinstance(operation, Prefetch):
            self._prefetch(at, operation)
        else:
            raise self._refuse("is not an operation of a chain")
        if index in self.deferred:  # which starts with an operation that computes nothing
            self._submit_deferred(self.now)
            self._settle()

    def _forward(self, at: int, operation: Forward) -> None:
        stage = self.chain.stages[at - 1]
        self._check_at_rest(("plain", at))
        self._check_at_rest(("saved", at))
        if operation.save == "all":
            ways = stage.ways
            if operation.way >= len(ways):
                raise self._refuse(f"stage {at} has {len(ways)} ways to save, and this asks for {operation.way}")
            way = ways[operation.way]
            produced, size = ("saved", at), way.saved_bytes
            self._run([self._input_of(at)], size, way.forward_overhead_bytes, way.forward_time)
            self.ways[at] = way
            self._drop(("plain", at))  # the saved set contains the output
        else:
            produced, size = ("plain", at), stage.output_bytes
            if ("plain", at) in self.device or ("saved", at) in self.device:
                raise self._refuse(f"the output of stage {at} is in memory already")
            self._run([self._input_of(at)], size, stage.forward_overhead_bytes, stage.forward_time)
        self._drop(produced)
        self._store(produced, size)
        if operation.save == "nothing":
            self._check_input_is_free(at)
            # A copy on the host stays there; one that is being offloaded leaves by itself.
            if ("plain", at - 1) in self.device and ("plain", at - 1) not in self.leaving:
                self.stored -= self.device.pop(("plain", at - 1))
        self._settle()

    def _backward(self, at: int) -> None:
        if at != self.position:
            raise self._refuse(f"the gradient in memory is that of stage {self.position}'s output")
        way = self.ways.get(at)
        if way is None:
            raise self._refuse(f"nothing is saved for the backward of stage {at}")
        needs = [("saved", at), self._input_of(at)]
        for key in (("saved", at), ("plain", at - 1)):  # what this backward uses up
            if key in self.leaving and key not in self.incoming:
                raise self._refuse(f"{_describe(key)} was offloaded and no prefetch brings it back")
        self._run(needs, self.gradient[at - 1], way.backward_overhead_bytes, way.backward_time)
        self._drop(("saved", at))
        self._drop(("plain", at - 1))
        del self.ways[at]
        self.position = at - 1
        self.stored += self.gradient[at - 1] - self.gradient[at]
        self._settle()

    def _discard(self, at: int, operation: Discard) -> None:
        self._check_at_rest(_key_of(operation))
        if operation.what == "input":
            if ("plain", at - 1) not in self.device and ("plain", at - 1) not in self.host:
                raise self._refuse(f"the input of stage {at} is not stored on its own")
            self._check_input_is_free(at)
            self._drop(("plain", at - 1))
        else:
            if ("saved", at) not in self.device and ("saved", at) not in self.host:
                raise self._refuse(f"nothing is saved for stage {at}")
            if at + 1 in self.ways and ("plain", at) not in self.device:
                raise self._refuse(f"stage {at + 1}'s saved set needs the output of stage {at}")
            self._drop(("saved", at))
            self.ways.pop(at, None)
        self._settle()

    def _offload(self, at: int, operation: Offload) -> None:
        key = self._movable(at, operation)
        if self.link is None:
            raise self._refuse("there is no host link; give the platform a bandwidth")
        if key not in self.device or key in self.leaving or key in self.incoming:
            raise self._refuse(f"{_describe(key)} is not in memory")
        last_reader = self.last_reader.get(self.index, -1)
        self.leaving[key] = Transfer(key, "to host", self.device[key], self.index, last_reader=last_reader)
        if key not in self.host:
            self.link.submit(self.leaving[key], self.now)
        elif last_reader < self.index:  # its copy on the host has stayed, so that nothing needs to be copied
            self._close_span(self.now)
            self._release(key)
        self._settle()

    def _prefetch(self, at: int, operation: Prefetch) -> None:
        key = self._movable(at, operation)
        if self.link is None:
            raise self._refuse("there is no host link; give the platform a bandwidth")
        if key in self.incoming:
            raise self._refuse(f"{_describe(key)} is on its way already")
        if key not in self.leaving and (key not in self.host or key in self.device):
            raise self._refuse(f"{_describe(key)} was not offloaded")
        size = self.host[key] if key in self.host else self.device[key]
        self.incoming[key] = transfer = Transfer(key, "from host", size, self.index)
        if operation.keep:
            self.staying.add(key)
        if operation.start is None:
            self.link.submit(transfer, self.now)
        elif self.index < operation.start < len(self.schedule):
            self.deferred.setdefault(operation.start, []).append(transfer)
        else:
            raise self._refuse(f"there is no later operation {operation.start} for it to start with")
        self._settle()

    def finish(self) -> Simulation:
        if self.position != 0:
            raise InvalidSchedule(f"the schedule ends before backward {self.position}")
        time = self.now if self.stall else total(self.durations)
        link_time = self.link.busy_time if self.link else 0
        moved = self.link.running if self.link else []
        transfers = (*self.transfers, *(transfer.span(self.stored) for transfer in moved))
        spans, peak = tuple(self.spans), self.peak_index
        return Simulation(
            self.schedule, time, self.peak, peak, spans, self.stall, link_time, transfers, self.host_peak
        )

    # --- time ------------------------------------------------------------------------------------------------

    def _run(self, needs: list[Key], output: int, overhead: int, duration: float) -> None:
        """Wait for inputs and room, then compute with the outputs and the overhead in memory."""
        start = self._wait(needs, output + overhead) if self.link else self.now
        level = self.stored + output + overhead
        if self.budget is not None and level > self.budget:
            raise self._refuse(f"needs {level - self.budget} bytes more than the budget of {self.budget}")
        self._close_span(start)
        self.stall += start - self.now
        self.now = start + duration
        self.durations.append(duration)
        self.transient = output + overhead
        self._note_peak()
        if self.link:
            self._submit_deferred(start)
            self.link.advance(self.now)
        self.spans.append(Span(self.span_start, self.now, self.stored + self.transient, self.index))
        self.span_start = self.now
        self.transient = 0
        self.done = True
        for key in [k for k, out in self.leaving.items() if out.last_reader == self.index and k in self.host]:
            self._release(key)

    def _wait(self, needs: list[Key], room: int) -> float:
        assert self.link is not None
        time = self.now
        self.link.advance(time)
        while True:
            missing = [k for k in needs if k not in self.device or k in self.incoming]
            if not missing and (self.budget is None or self.stored + room <= self.budget):
                return time
            for key in missing:
                if key not in self.incoming:
                    raise self._refuse(f"{_describe(key)} is on the host and no prefetch brings it back")
            event = self.link.next_event()
            if event is None:
                why = f"{_describe(missing[0])} never arrives" if missing else "no pending offload makes room"
                limit = "" if self.budget is None else f" within the budget of {self.budget}"
                raise self._refuse(f"waits for ever: {why}{limit}")
            time = max(time, event)
            self.link.advance(time)

    def _submit_deferred(self, now: float) -> None:
        """An operation begins, and with it the prefetches that were to wait for that."""
        assert self.link is not None
        for transfer in self.deferred.pop(self.index, []):
            self.link.submit(transfer, now)

    def _settle(self) -> None:
        """Memory has changed between operations: let waiting transfers see it."""
        if self.link:
            self.link.memory_freed(self.now)
            self.link.advance(self.now)

    # --- memory ----------------------------------------------------------------------------------------------

    def _store(self, key: Key, size: int) -> None:
        self.device[key] = size
        self.stored += size

    def _drop(self, key: Key) -> None:
        """Forget a value wherever it is; none is dropped while it moves."""
        assert key not in self.leaving
        self._drop_from_host(key)
        size = self.device.pop(key, None)
        if size is not None:
            self.stored -= size

    def _drop_from_host(self, key: Key) -> None:
        self.host.pop(key, None)
        self.host_now -= self.held.pop(key, 0)

    def _check_input_is_free(self, at: int) -> None:
        if at in self.ways:
            raise self._refuse(f"the saved set of stage {at} still needs its input")

    def _check_at_rest(self, key: Key) -> None:
        if key in self.incoming:
            raise self._refuse(f"{_describe(key)} is on its way back from the host")
        if key in self.leaving:
            raise self._refuse(f"{_describe(key)} is on its way to the host")

    def _input_of(self, at: int) -> Key:
        """Where stage `at` finds its input: on its own, or inside the saved set of the stage before."""
        plain, saved = ("plain", at - 1), ("saved", at - 1)
        for place in (self.device, self.incoming, self.host):
            for key in (plain, saved):
                if key in place:
                    return key
        raise self._refuse(f"the input of stage {at} is not in memory")

    def _movable(self, at: int, operation: Offload | Prefetch) -> Key:
        """What an operation moves: not an input that exists only inside the saved set before it."""
        key, inside = _key_of(operation), ("saved", at - 1)
        alone = operation.what == "all" or key in self.device or key in self.host
        if not alone and (inside in self.device or inside in self.host):
            raise self._refuse(f"the input of stage {at} is part of stage {at - 1}'s saved set; move that")
        return key

    def _may_start(self, transfer: Transfer) -> bool:
        """Whether there is room for it now. What is on its way to the host comes back only when it has left."""
        if transfer.direction == "to host":
            return self.host_bytes is None or self.host_now + transfer.bytes <= self.host_bytes
        room = None if self.budget is None else self.budget - self.stored - self.transient
        return transfer.key not in self.leaving and (room is None or transfer.bytes <= room)

    def _transfer_started(self, transfer: Transfer) -> None:
        key = cast(Key, transfer.key)
        if transfer.direction == "to host":
            self.held[key] = transfer.bytes
            self.host_now += transfer.bytes
            self.host_peak = max(self.host_peak, self.host_now)
        else:
            self._close_span(transfer.start)
            self._store(key, transfer.bytes)
            self._note_peak()

    def _transfer_ended(self, transfer: Transfer) -> None:
        key = cast(Key, transfer.key)
        self.transfers.append(transfer.span(self.stored + self.transient))
        if transfer.direction == "to host":
            self.host[key] = transfer.bytes
            if transfer.last_reader < self.index + self.done:  # its last reader has run
                self._close_span(transfer.end)
                self._release(key)
            return
        del self.incoming[key]
        if key in self.staying:
            self.staying.discard(key)
        else:
            self._drop_from_host(key)

    def _release(self, key: Key) -> None:
        self.stored -= self.device.pop(key)
        del self.leaving[key]

    def _note_peak(self) -> None:
        if self.stored + self.transient > self.peak:
            self.peak, self.peak_index = self.stored + self.transient, self.index

    def _close_span(self, time: float) -> None:
        """End a stretch of the time line because memory changes now."""
        if time > self.span_start:
            level, waits = self.stored + self.transient, time > self.now  # computing has not come so far
            self.spans.append(Span(self.span_start, time, level, self.index, waits=waits))
            self.span_start = time

    def _refuse(self, reason: str) -> InvalidSchedule:
        return refusal(self.schedule, self.index, reason)


def _last_readers(schedule: Schedule) -> dict[int, int]:
    """For each offload (its index), the last operation that reads the value before it is brought back."""
    pending: dict[Key, int] = {}
    last: dict[int, int] = {}
    for index, op in enumerate(schedule):
        at = getattr(op, "at", 0)
        if not isinstance(at, int):
            continue
        if isinstance(op, Offload):
            pending[_key_of(op)] = index
        elif isinstance(op, Prefetch):
            pending.pop(_key_of(op), None)
        elif isinstance(op, Forward | Backward):
            reads: list[Key] = [("plain", at - 1), ("saved", at - 1)]
            if isinstance(op, Backward):
                reads.append(("saved", at))
            for key in reads:
                if key in pending:
                    last[pending[key]] = index
    return last


def _key_of(operation: Discard | Offload | Prefetch) -> Key:
    """The value that an operation names: a stage's saved set, or its input, which is the output before it."""
    assert isinstance(operation.at, int)
    return ("saved", operation.at) if operation.what == "all" else ("plain", operation.at - 1)


def _describe(key: Key) -> str:
    kind, position = key
    if kind == "saved":
        return f"the saved set of stage {position}"
    return f"the input of stage {position + 1}"
