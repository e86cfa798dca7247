"""Random joint graphs like those that capture makes, and a machine that runs programs with symbols for values.

The machine shares no code with the package. It knows tensors as PyTorch does: a name holds a value, a value holds
storages, and a storage is there as long as anything holds it. It refuses whatever real tensors would get wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count

from hypothesis import strategies as st

from elbowroom.step.graph import StepGraph, Kind, Operator
from elbowroom.step.program import Program
from elbowroom.step.referee import Prediction, Surroundings, predict

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
def joints(draw, most: int = 14, forms: tuple[str, ...] = FORMS, least_time: int = 0, passing: bool = True) -> StepGraph:
    """A joint graph of at most `most` forward operators. Often its steps repeat, as a network's layers do."""
    layer = draw(st.lists(steps(forms), min_size=1, max_size=max(1, most // 2)))
    if draw(st.sampled_from((False, False, True))):  # all alike but for what they read
        layer = [replace(layer[0], back=step.back) for step in layer]
    return joint_of(
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


def joint_of(
    layer: list[Step],
    *,
    most: int = 100,
    inputs: tuple[bool, bool, bool] = (True, False, False),
    results: list[tuple[int, bool]] | tuple[()] = (),
    numbering: int = 1,
) -> StepGraph:
    """The joint graph of some steps. `results`: more values to return, and whether a gradient arrives for them.

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
                reusable=numbers_of(node.reusable),
                storable=node.storable,
                time=float(node.time),
                workspace=node.workspace,
                key=node.key,
            )
            for node in order
        ]
        return StepGraph(
            ops=ops,
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


# --- the machine ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Storage:
    size: int
    written: int = 1


@dataclass(frozen=True, eq=False)
class _Tensor:
    """A symbol for what was computed, and the storages it lies in as they were written then."""

    symbol: int
    lies_in: dict[int, tuple[_Storage, int]]

    @property
    def intact(self) -> bool:
        return all(storage.written == then for storage, then in self.lies_in.values())


@dataclass
class Account:
    """Bytes counted by the machine, as in `elbowroom.step.program.Prediction`."""

    forward_bytes: list[int] = field(default_factory=list)
    backward_bytes: list[int] = field(default_factory=list)
    between_bytes: int = 0
    saved_bytes: int = 0


NOTHING_AROUND = Surroundings()


def run(graph: StepGraph, program: Program, around: Surroundings = NOTHING_AROUND) -> Account:
    """Execute a program; an AssertionError says what it gets wrong. Counts what is live at every instruction."""
    machine = _Machine(graph, program, around)
    machine.forward()
    machine.backward()
    return machine.account


def check(graph: StepGraph, program: Program, around: Surroundings = NOTHING_AROUND) -> Prediction:
    """The prediction of a program that runs right and takes exactly the bytes predicted, moment by moment."""
    account, prediction = run(graph, program, around), predict(graph, program, around)
    assert list(prediction.forward_bytes) == account.forward_bytes
    assert list(prediction.backward_bytes) == account.backward_bytes
    assert prediction.between_bytes == account.between_bytes
    assert prediction.saved_bytes == account.saved_bytes
    highest = max(*account.forward_bytes, *account.backward_bytes, account.between_bytes, 0)
    assert prediction.peak_bytes == highest
    times = [graph.ops[i.op].time for i in (*program.forward, *program.backward)]
    assert prediction.time_s == sum(times)
    return prediction


class _Machine:
    def __init__(self, graph: StepGraph, program: Program, around: Surroundings) -> None:
        self.graph, self.program, self.around = graph, program, around
        self.account = Account()
        self.symbols: dict[object, int] = {}
        self.plain = self.plain_symbols()
        self.names: dict[int, _Tensor] = {}
        self.elsewhere: list[_Tensor] = []  # held by somebody outside the program
        self.untouchable: list[_Tensor] = []  # must be intact at the end
        self.states: dict[int, int] = {}
        self.draws = 0
        self.effects: list[int] = []
        self.gradients: dict[int, _Tensor] = {}
        self.awaited = dict(around.late)  # counted as resident, though not there yet

    def symbol(self, *what: object) -> int:
        return self.symbols.setdefault(what, len(self.symbols))

    def plain_symbols(self) -> dict[int, int]:
        """What every operator computes when each runs once, in order. A norm's buffer does not change its value."""
        plain: dict[int, int] = {}
        draws = count()
        for op in (*self.graph.inputs, *self.graph.arriving, *self.graph.forward, *self.graph.backward):
            entry = self.graph.ops[op]
            drawn = next(draws) if entry.random else None
            plain[op] = self.symbol(op, drawn, *(plain[read] for read in entry.rerun_reads))
        return plain

    def forward(self) -> None:
        graph, program = self.graph, self.program
        together: dict[int, _Storage] = {}
        for op in graph.inputs:
            self.names[op] = self.outside(op, together)
        for instruction in program.forward:
            assert not instruction.again
            assert graph.ops[instruction.op].kind == "forward"
            if instruction.op in program.reseeded:
                self.states[instruction.op] = self.draws
            self.account.forward_bytes.append(self.execute(instruction))
        kept = {*graph.inputs, *graph.results, *graph.updates, *program.saved}
        assert self.names.keys() == kept, "the forward leaves exactly what goes on"
        assert self.draws == sum(graph.ops[op].random for op in graph.forward), "the random stream afterwards"
        assert sorted(self.effects) == sorted(graph.effects)
        assert self.states.keys() == set(program.reseeded)
        assert all(graph.ops[op].storable for op in program.saved), "autograd keeps tensors only"

    def backward(self) -> None:
        graph, program = self.graph, self.program
        forward = self.names
        for op in graph.updates:
            assert forward[op].intact
            assert forward[op].symbol == self.plain[op]
        self.elsewhere = [forward[op] for op in graph.results]
        self.names = {op: forward[op] for op in program.saved}
        wanted = {read for instruction in program.backward for read in self.reads(instruction)}
        wanted.update(gradient for _, gradient in graph.gradients)
        assert wanted.issuperset(program.saved), "nothing is saved for nothing"
        for op in program.saved:
            if op in graph.overwritten:
                size = graph.overwritten[op]
                self.names[op] = _Tensor(forward[op].symbol, {-1 - op: (_Storage(size), 1)})
        self.account.saved_bytes = self.live_bytes()
        for op in graph.overwritten:
            for storage, _ in forward[op].lies_in.values():
                storage.written += 1
        together: dict[int, _Storage] = {}
        arriving = {op: self.outside(op, together) for op in graph.arriving}
        self.names |= arriving
        self.untouchable = [*self.names.values(), *self.elsewhere]
        self.account.between_bytes = self.live_bytes() + self.around.outside_bytes - sum(self.awaited.values())
        if self.around.keeps_arriving:
            self.elsewhere += arriving.values()
        accumulated = {i for instruction in program.backward for i in instruction.accumulates}
        assert accumulated <= graph.parameters
        returned = {gradient for i, gradient in graph.gradients if i not in accumulated}
        read = {read for instruction in program.backward for read in self.reads(instruction)}
        for op in graph.arriving:
            if op not in read | returned:
                del self.names[op]
        for instruction in program.backward:
            assert instruction.again == (graph.ops[instruction.op].kind == "forward")
            self.account.backward_bytes.append(self.execute(instruction))
        saved_inputs = {op for op in program.saved if graph.ops[op].kind == "input"}
        assert self.names.keys() == returned | saved_inputs, "the backward leaves exactly its gradients"
        assert not self.states, "every generator state is let go"
        for i, gradient in graph.gradients:
            if i not in accumulated:
                self.gradients[i] = self.names[gradient]
            assert self.gradients[i].symbol == self.plain[gradient], f"gradient of {i}"
            assert self.gradients[i].intact, f"the gradient of {i} was overwritten"
        assert all(tensor.intact for tensor in self.untouchable), "what came from outside was overwritten"
        for op in graph.results:
            assert forward[op].symbol == self.plain[op]

    def execute(self, instruction) -> int:
        """Run one instruction; returns the bytes that are live while it runs."""
        graph, op = self.graph, instruction.op
        entry = graph.ops[op]
        reads = self.reads(instruction)
        for read in reads:
            assert read in self.names, f"{op} reads {read}, which is not there"
            assert self.names[read].intact, f"{op} reads {read}, which was overwritten"
        drawn = None
        if entry.random:
            drawn = self.states[op] if instruction.again else self.draws
            self.draws += not instruction.again
        if not instruction.again and entry.reads != entry.rerun_reads:
            self.effects.append(op)
        symbol = self.symbol(op, drawn, *(self.names[read].symbol for read in entry.rerun_reads))
        lies_in: dict[int, tuple[_Storage, int]] = {}
        for read in reads:
            for number, (storage, then) in self.names[read].lies_in.items():
                if number in entry.shares:
                    lies_in[number] = storage, then
        assert lies_in.keys() == set(entry.shares)
        if instruction.reuses is None:
            lies_in |= {number: (_Storage(size), 1) for number, size in entry.makes}
        else:
            assert instruction.reuses in entry.reusable
            ((number, size),) = entry.makes
            ((storage, _),) = self.names[instruction.reuses].lies_in.values()
            assert storage.size == size
            storage.written += 1
            lies_in[number] = storage, storage.written
        assert op not in self.names, f"{op} runs again while its value is still there"
        self.names[op] = _Tensor(symbol, lies_in)
        for i in instruction.accumulates:
            assert i not in self.gradients, f"{i} gets its gradient twice"
            self.gradients[i] = self.names[op]
        during = self.live_bytes() + entry.workspace - sum(self.awaited.values())
        for i in instruction.accumulates:
            size = self.awaited.pop(i, 0)
            during += size if i in self.around.copied else 0
        if instruction.again and entry.random:
            during += self.around.state_bytes
        for freed in instruction.frees:
            assert graph.ops[freed].kind != "input"
            del self.names[freed]
        if instruction.last_draw:
            del self.states[op]
        return during

    def live_bytes(self) -> int:
        live = {
            id(storage): storage.size
            for tensor in (*self.names.values(), *self.elsewhere)
            for storage, _ in tensor.lies_in.values()
        }
        return sum(live.values()) + len(self.states) * self.around.state_bytes

    def outside(self, op: int, together: dict[int, _Storage]) -> _Tensor:
        """A value that comes from outside; those that come together may share storages."""
        for number, size in self.graph.ops[op].makes:
            together.setdefault(number, _Storage(size))
        return _Tensor(self.plain[op], {number: (together[number], 1) for number, _ in self.graph.ops[op].makes})

    def reads(self, instruction) -> tuple[int, ...]:
        entry = self.graph.ops[instruction.op]
        return entry.rerun_reads if instruction.again else entry.reads
