"""Exhaustive search over the class of schedules of 001 ch. 4, operation by operation, for chains of a few stages.

Every persistent schedule is written out as a list of operations, and every set of the inputs that it keeps until
after the loss is moved. What the link carries is a number of bytes: while operations before the loss run they leave,
at the loss all must have left, and afterwards they come back as late as possible; that half is played backwards.
"""

from __future__ import annotations

from itertools import chain as joined
from itertools import product


def best_time(chain, budget, to_host, from_host):
    """The least time of any schedule within the budget; infinite if there is none."""
    best = float("inf")
    for out, back, kept in whole_schedules(chain):
        for moved in product((False, True), repeat=len(kept)):
            gone = [value for value, goes in zip(kept, moved, strict=True) if goes]
            best = min(best, time_of(chain, out, back, gone, budget, to_host, from_host))
    return best


def whole_schedules(chain):
    """Operations before the loss's backward, those after that, and the values that are kept in between.

    A value is what it is and its first reader after the loss (its place among the later operations).
    """
    n = len(chain.stages)

    def from_stage(s, inside):
        """The same for stages s to n, whose input is inside a saved set or not."""
        for way in range(len(chain.stages[s - 1].ways)):
            here = ("saved", s - 1) if inside else ("plain", s - 1)
            if s == n:
                yield [("forward", s, "all", way)], [("backward", s)], []
            else:
                for out, back, kept in from_stage(s + 1, True):
                    yield [("forward", s, "all", way), *out], [*back, ("backward", s)], [(here, len(back)), *kept]
        for t in range(s, n):
            walk = [("forward", k, "input" if k == s else "nothing", 0) for k in range(s, t + 1)]
            here = ("saved", s - 1) if inside else ("plain", s - 1)
            for out, back, kept in from_stage(t + 1, False):
                for again in recomputations(chain, s, t):
                    yield [*walk, *out], [*back, *again], [(here, len(back)), *kept]

    return from_stage(1, False)


def recomputations(chain, s, t):
    """All persistent ways to run backwards t to s from the input of s."""
    for way in range(len(chain.stages[s - 1].ways)):
        for rest in recomputations(chain, s + 1, t) if t > s else ([],):
            yield [("forward", s, "all", way), *rest, ("backward", s)]
    for split in range(s, t):
        walk = [("forward", k, "input" if k == s else "nothing", 0) for k in range(s, split + 1)]
        for right in recomputations(chain, split + 1, t):
            for left in recomputations(chain, s, split):
                yield [*walk, *right, *left]


def time_of(chain, out, back, gone, budget, to_host, from_host):
    """The time of a schedule some of whose values go to the host; infinite if it does not fit."""
    returns = {}
    for value, reader in gone:
        returns.setdefault(reader, []).append(value)
    needs, sizes = needs_of(chain, [*out, *back], len(out), dict(gone), returns)
    durations, ways = [], {}
    for operation in joined(out, back):
        stage = chain.stages[operation[1] - 1]
        if operation[0] == "forward":
            saving = stage.ways[operation[3]]
            durations.append(saving.forward_time if operation[2] == "all" else stage.forward_time)
            ways[operation[1]] = operation[3]
        else:
            durations.append(stage.ways[ways[operation[1]]].backward_time)
    time, leaving = 0.0, 0.0
    readers = {forward: value for value, forward in first_readers(out, gone)}
    for index in range(len(out)):
        wait = max(0.0, needs[index] + leaving - budget)
        if wait > leaving:
            return float("inf")
        time += wait / to_host + durations[index]
        leaving += sizes[readers[index]] if index in readers else 0
        leaving = max(0.0, leaving - wait - durations[index] * to_host)
    time += leaving / to_host
    coming = 0.0
    for place in range(len(back) - 1, -1, -1):
        index = len(out) + place
        wait = max(0.0, needs[index] + coming - budget)
        if wait > coming:
            return float("inf")
        time += wait / from_host + durations[index]
        coming = max(0.0, coming - wait - durations[index] * from_host)
        coming += sum(sizes[value] for value in returns.get(place, ()))
    return time + coming / from_host


def first_readers(out, gone):
    """For each value that goes, the operation that reads it last before the loss: there is only one."""
    for value, _ in gone:
        forwards = [index for index, operation in enumerate(out) if operation[1] == value[1] + 1]
        assert len(forwards) == 1
        yield value, forwards[0]


def needs_of(chain, operations, before_loss, gone, returns):
    """Bytes in use in each operation, without what is on its way, and the size of every value."""
    stored = {("plain", 0): chain.input_bytes}
    sizes = dict(stored)
    gradient = chain.stages[-1].gradient_bytes
    needs, overheads = [], {}
    for index, operation in enumerate(operations):
        for value in returns.get(index - before_loss, ()):
            stored[value] = sizes[value]
        at = operation[1]
        stage = chain.stages[at - 1]
        if operation[0] == "forward":
            saving = stage.ways[operation[3]]
            all_of_it = operation[2] == "all"
            made = ("saved", at) if all_of_it else ("plain", at)
            sizes[made] = saving.saved_bytes if all_of_it else stage.output_bytes
            overhead = saving.forward_overhead_bytes if all_of_it else stage.forward_overhead_bytes
            overheads[at] = saving.backward_overhead_bytes
            assert ("plain", at - 1) in stored or ("saved", at - 1) in stored
            needs.append(sum(stored.values()) + gradient + sizes[made] + overhead)
            stored[made] = sizes[made]
            if operation[2] == "nothing":
                stored.pop(("plain", at - 1), None)
            for value in gone:
                if value[1] == at - 1 and index < before_loss:
                    stored.pop(value, None)
        else:
            after = chain.stages[at - 2].gradient_bytes if at > 1 else chain.input_gradient_bytes
            assert ("saved", at) in stored
            assert ("plain", at - 1) in stored or ("saved", at - 1) in stored
            needs.append(sum(stored.values()) + gradient + after + overheads[at])
            del stored["saved", at]
            stored.pop(("plain", at - 1), None)
            gradient = after
    return needs, sizes
