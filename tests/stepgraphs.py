"""Random graphs of training steps, like those that capture makes, and orders in which their backwards may run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations, count

from hypothesis import strategies as st

from elbowroom.step.graph import Kind, Operator, StepGraph
from elbowroom.step.referee import Surroundings

# --- forwards ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One step of a forward and how autograd goes back through it.

    `view`, `split`: of what it reads. `tuple`: two tensors in new storages; `mixed`: a new one and a view. `norm`
    updates a buffer as it runs, `counts` reads one that is overwritten after the forward. `aside` is read by the
    next step's backward only.
    """

    form: str
    back: tuple[int, ...]  # how far back the values were made that it reads
    sizes: tuple[int, int]
    time: int
    backward_time: int
    workspace: int
    parameter: bool
    random: bool
    passes: bool  # the gradient goes on as it is, as an addition's does
    together: bool  # one operator makes all gradients, as a convolution's does
    reads_inputs: bool
    reads_outputs: bool


@dataclass(eq=False)
class _Node:
    kind: Kind
    reads: list[_Node] = field(default_factory=list)
    makes: list[tuple[int, int]] = field(default_factory=list)
    shares: list[int] = field(default_factory=list)
    extra: list[_Node] = field(default_factory=list)  # read by the first run only
    size: int = 0
    differentiable: bool = False
    key: str = ""
    sequence: int | None = None
    random: bool = False
    reusable: list[_Node] = field(default_factory=list)
    storable: bool = True
    time: int = 0
    workspace: int = 0

    @property
    def storages(self) -> list[int]:
        return [*(storage for storage, _ in self.makes), *self.shares]


FORMS = ("plain", "plain", "plain", "view", "tuple", "split", "mixed", "norm", "counts", "aside")


def steps(forms: tuple[str, ...] = FORMS) -> st.SearchStrategy[Step]:
    size, flag = st.integers(1, 6), st.booleans()
    return st.builds(
        Step,
        form=st.sampled_from(forms),
        back=st.lists(st.sampled_from((1, 1, 1, 2, 3, 5)), min_size=1, max_size=2).map(tuple),
        sizes=st.tuples(size, size),
        time=st.integers(0, 4),
        backward_time=st.integers(0, 4),
        workspace=st.integers(0, 3),
        parameter=st.sampled_from((True, True, False)),
        random=st.sampled_from((False, False, True)),
        passes=flag,
        together=flag,
        reads_inputs=flag,
        reads_outputs=flag,
    )


@st.composite
def graphs(draw, most: int = 14, forms: tuple[str, ...] = FORMS) -> StepGraph:
    """The graph of a step with at most `most` forward operators. Often its steps repeat, as a network's layers do."""
    layer = draw(st.lists(steps(forms), min_size=1, max_size=max(1, most // 2)))
    if draw(st.sampled_from((False, False, True))):  # all alike but for what they read
        layer = [replace(layer[0], back=step.back) for step in layer]
    return graph_of(
        layer * draw(st.sampled_from((1, 2, 3, 6))),
        most=most,
        inputs=draw(st.tuples(st.sampled_from((True, True, False)), st.booleans(), st.booleans())),
        results=draw(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=2)),
        numbering=draw(st.sampled_from((1, 1, 0, 3))),
    )


def surroundings() -> st.SearchStrategy[Surroundings]:
    """Gradients that come late have any number here; those of no parameter never come."""
    small, number = st.integers(0, 4), st.integers(0, 12)
    return st.builds(
        Surroundings,
        outside_bytes=small,
        keeps_arriving=st.booleans(),
        state_bytes=small,
        late=st.one_of(st.just({}), st.dictionaries(number, small, max_size=8)),
        copied=st.frozensets(number, max_size=4),
    )


def graph_of(
    layer: list[Step],
    *,
    most: int = 100,
    inputs: tuple[bool, bool, bool] = (True, False, False),
    results: list[tuple[int, bool]] | tuple[()] = (),
    numbering: int = 1,
) -> StepGraph:
    """The graph of a step. `results`: more values to return, and whether a gradient arrives for them.

    `inputs`: whether the batch gets a gradient, whether there is a second tensor, and whether it views the first.
    `numbering`: 1 as autograd numbers the steps, 0 not at all, others make the backward's numbers wrong.
    """
    return _Builder(numbering).build(layer, most, inputs, results)


class _Builder:
    def __init__(self, numbering: int) -> None:
        self.numbering = numbering
        self.storage = count()
        self.inputs: list[_Node] = []
        self.arriving: list[_Node] = []
        self.forward: list[_Node] = []
        self.backward: list[_Node] = []
        self.effects: list[_Node] = []
        self.updates: list[_Node] = []
        self.overwritten: dict[_Node, int] = {}
        self.parameters: set[_Node] = set()
        self.gradients: dict[_Node, list[_Node]] = {}

    def build(self, layer, most, inputs, results) -> StepGraph:
        differentiable, second, same = inputs
        batch = self.input(3, differentiable)
        values = [batch]
        if second:
            values.append(self.input(3, False, batch if same else None))
        undo = []
        kinds = [replace(step, back=()) for step in layer]
        aside: list[_Node] = []
        for number, step in enumerate(layer):
            if len(self.forward) + 3 > most and self.forward:
                break
            undo.append(self.step(step, f"{kinds.index(replace(step, back=()))}", number, values, aside))
        made = [value for value in values if value.kind == "forward"] or self.forward[-1:]
        returned = {made[-1]: True}
        for back, arrives in results:
            returned.setdefault(made[max(0, len(made) - 1 - back)], arrives)
        for value, arrives in returned.items():
            if arrives and value.differentiable:
                tangent = _Node("gradient", makes=[self.new(value.size)], size=value.size)
                self.arriving.append(tangent)
                self.gradients[value] = [tangent]
        for go_back in reversed(undo):
            go_back()
        pairs = [(i, self.total(i, None)) for i in self.inputs if i in self.gradients]
        self.sweep([*returned, *self.effects, *self.updates, *(gradient for _, gradient in pairs)])
        return self.numbers(list(returned), pairs)

    # --- forward ---

    def new(self, size: int) -> tuple[int, int]:
        return next(self.storage), size

    def input(self, size: int, differentiable: bool, views: _Node | None = None) -> _Node:
        storage = views.makes[0] if views else self.new(0)
        node = _Node("input", makes=[storage], size=size, differentiable=differentiable)
        self.inputs.append(node)
        return node

    def op(self, kind: Kind, key: str, reads: list[_Node], sizes: tuple[int, ...] = (), **rest) -> _Node:
        reads = list(dict.fromkeys(reads))
        made = [self.new(size) for size in sizes]
        node = _Node(kind, reads, made, size=sizes[0] if sizes else 0, **rest)
        node.differentiable = any(read.differentiable for read in reads)
        if len(sizes) == 1 and node.storable and not node.shares:
            node.reusable = [r for r in reads if len(r.storages) == 1 and r.size == node.size and r.storable]
        shown = ",".join(str([r.size, len(r.storages)]) for r in reads)
        node.key = f"{key}({shown})->{sizes},{len(node.shares)},{node.time},{node.workspace},{node.random}"
        (self.forward if kind == "forward" else self.backward).append(node)
        return node

    def view(self, kind: Kind, key: str, of: _Node, storage: int, size: int, sequence: int | None) -> _Node:
        node = self.op(kind, key, [of], shares=[storage], sequence=sequence)
        node.size = size
        return node

    def step(self, step: Step, key: str, number: int, values: list[_Node], aside: list[_Node]):
        """Append one step's operators; returns the function that appends its backward."""
        sequence = number if self.numbering else None
        reads = list(dict.fromkeys(values[max(0, len(values) - back)] for back in step.back))
        base = reads[0]
        if step.form in ("view", "split"):
            reads = [base]
        elif step.parameter:
            reads.append(self.input(step.sizes[1], True))
            self.parameters.add(reads[-1])
        rest = {"sequence": sequence, "time": step.time, "workspace": step.workspace, "random": step.random}
        only_backward = list(aside)
        aside.clear()
        if step.form == "view":
            outputs = [self.view("forward", f"{key}view", base, base.storages[0], base.size, sequence)]
            values += outputs
        elif step.form == "split":
            several = self.op("forward", f"{key}split", [base], shares=list(base.storages), storable=False)
            outputs = [
                self.view("forward", f"{key}item", several, base.storages[0], base.size, sequence) for _ in "ab"
            ]
            values += outputs
        elif step.form in ("tuple", "mixed", "norm"):
            sizes = step.sizes[:1] if step.form == "mixed" else step.sizes
            shares = list(base.storages) if step.form == "mixed" else []
            several = self.op("forward", key + step.form, reads, sizes, shares=shares, storable=False, **rest)
            if step.form == "norm":
                buffer = self.input(2, False)
                several.extra = [buffer]
                self.effects.append(several)
                self.updates.append(buffer)
                self.overwritten[buffer] = 2
            item, other = several.storages
            outputs = [self.view("forward", f"{key}item", several, item, step.sizes[0], sequence)]
            size = base.size if step.form == "mixed" else step.sizes[1]
            only_backward.append(self.view("forward", f"{key}item", several, other, size, sequence))
            if step.form == "mixed":
                values.append(only_backward[-1])
            values += outputs
        else:
            if step.form == "counts":
                counter = self.input(step.sizes[1], False)
                self.overwritten[counter] = step.sizes[1]
                self.updates.append(self.op("forward", f"{key}count", [counter], (step.sizes[1],), time=1))
                reads.append(counter)
            outputs = [self.op("forward", key + step.form, reads, step.sizes[:1], **rest)]
            (aside if step.form == "aside" else values).extend(outputs)
        back = number * self.numbering % 5 if self.numbering > 1 else sequence
        return lambda: self.undo(step, key, back, reads, outputs, only_backward)

    # --- backward ---

    def total(self, value: _Node, sequence: int | None) -> _Node:
        """The sum of a value's gradients: added up two by two where there are several."""
        parts = self.gradients[value]
        while len(parts) > 1:
            a, b, *others = parts
            parts = [self.op("backward", "add", [a, b], (value.size,), time=1, sequence=sequence), *others]
        self.gradients[value] = parts
        return parts[0]

    def undo(self, step, key, sequence, reads, outputs, only_backward) -> None:
        arrived = [self.total(o, None) for o in (*outputs, *only_backward) if o in self.gradients]
        targets = [read for read in reads if read.differentiable]
        if not arrived or not targets:
            return
        if step.form == "view":
            (gradient,) = arrived
            back = self.view("backward", f"{key}unview", gradient, gradient.storages[0], gradient.size, sequence)
            self.gradients.setdefault(reads[0], []).append(back)
            return
        if step.passes and step.form in ("plain", "counts") and len(arrived) == 1:
            for target in targets:
                self.gradients.setdefault(target, []).append(arrived[0])
            return
        seen = [*arrived, *only_backward]
        seen += reads if step.reads_inputs else []
        seen += outputs if step.reads_outputs else []
        rest = {"time": step.backward_time, "workspace": step.workspace, "sequence": sequence}
        sizes = tuple(target.size for target in targets)
        if step.together and len(targets) > 1:
            several = self.op("backward", f"{key}grads", seen, sizes, storable=False, **rest)
            for target, (storage, size) in zip(targets, several.makes, strict=True):
                item = self.view("backward", f"{key}item", several, storage, size, sequence)
                self.gradients.setdefault(target, []).append(item)
            return
        for target, size in zip(targets, sizes, strict=True):
            gradient = self.op("backward", f"{key}grad", seen, (size,), **rest)
            self.gradients.setdefault(target, []).append(gradient)

    # --- the end ---

    def sweep(self, roots: list[_Node]) -> None:
        """Leave out what nothing needs, as tracing does."""
        needed: set[_Node] = set()
        waiting = list(roots)
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += node.reads
        self.forward = [node for node in self.forward if node in needed]
        self.backward = [node for node in self.backward if node in needed]

    def numbers(self, results: list[_Node], pairs: list[tuple[_Node, _Node]]) -> StepGraph:
        order = [*self.inputs, *self.arriving, *self.forward, *self.backward]
        number = {node: i for i, node in enumerate(order)}

        def numbers_of(nodes) -> tuple[int, ...]:
            return tuple(number[node] for node in nodes)

        ops = [
            Operator(
                index=number[node],
                name=f"{node.kind}{number[node]}",
                target=node.key,
                kind=node.kind,
                reads=numbers_of([*node.reads, *node.extra]),
                rerun_reads=numbers_of(node.reads),
                makes=tuple(node.makes),
                shares=tuple(node.shares),
                sequence=node.sequence,
                random=node.random,
                draws_privately=node.random and node.workspace % 2 == 0,
                reusable=numbers_of(node.reusable),
                storable=node.storable,
                time=float(node.time),
                workspace=node.workspace,
                key=node.key,
            )
            for node in order
        ]
        return StepGraph(
            ops=tuple(ops),
            inputs=numbers_of(self.inputs),
            arriving=numbers_of(self.arriving),
            forward=numbers_of(self.forward),
            backward=numbers_of(self.backward),
            results=numbers_of(results),
            updates=numbers_of(self.updates),
            gradients=tuple((number[i], number[gradient]) for i, gradient in pairs),
            parameters=frozenset(number[i] for i, _ in pairs if i in self.parameters),
            effects=numbers_of(self.effects),
            overwritten={number[node]: size for node, size in self.overwritten.items()},
            storage_bytes={storage: size for node in order for storage, size in node.makes},
        )


@st.composite
def orders(draw, graph: StepGraph) -> list[int]:
    """An order for the backward: its operators, each after what it misses, given that values are lost at any time.

    Which values are there at first is drawn; so is what is lost on the way, and what runs again for no reason.
    """
    storable = [op for op in graph.forward if graph.ops[op].storable]
    some = st.lists(st.sampled_from(storable), max_size=4) if storable else st.just([])
    have = {op for op in storable if draw(st.booleans())}
    forgetful = draw(st.booleans())
    order: list[int] = []
    for op in graph.backward:
        if forgetful and draw(st.booleans()):
            lost = draw(some)
            have.difference_update(lost, (op for op in graph.forward if not graph.ops[op].storable))
            order += missing(graph, lost[:1], have)
        again = missing(graph, graph.ops[op].reads, have)
        order += again
        have.update(again)
        order.append(op)
    return order


def missing(graph: StepGraph, wanted, have) -> list[int]:
    """The forward operators that must run, in order, before `wanted` are all there."""
    again: set[int] = set()

    def need(op: int) -> None:
        if graph.ops[op].kind == "forward" and op not in have and op not in again:
            again.add(op)
            for read in graph.ops[op].rerun_reads:
                need(read)

    for op in wanted:
        need(op)
    return sorted(again)


def every_single_recomputation(graph: StepGraph) -> Iterator[list[int]]:
    """An order for every set of values to keep; the others are computed again once, when first needed."""
    storable = [op for op in graph.forward if graph.ops[op].storable]
    for size in range(len(storable) + 1):
        for kept in combinations(storable, size):
            have, order = set(kept), []
            for op in graph.backward:
                again = missing(graph, graph.ops[op].reads, have)
                order += [*again, op]
                have.update(again)
            yield order
