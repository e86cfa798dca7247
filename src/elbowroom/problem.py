"""What is to be scheduled: a Chain, a Join, Towers or a Graph, as frozen data that validates itself.

Sizes are whole bytes (slots in a Join), times are seconds or any other unit used throughout. `from_json` and
`to_json` speak the machine interface; an `InputError` names the field at fault, as in
`stages[3].saved_bytes: 5 is less than output_bytes (7)`.

The notation of the docstrings is that of 001 ch. 2: a stage's output aℓ (`output_bytes`), everything its
backward needs āℓ (`saved_bytes`, aℓ included), the gradient δℓ with respect to its output (`gradient_bytes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeAlias

from elbowroom.errors import InputError
from elbowroom.units import MAX_BYTES
from elbowroom.validation import (
    Prefix,
    as_amount,
    as_count,
    as_flag,
    as_list,
    as_object,
    as_size,
    as_text,
    as_time,
    assign,
    kind_of_value,
)

MAX_STEPS = 1_000_000  # of a join: its file is small however long its schedules are

Json: TypeAlias = dict[str, Any]


# --- chain ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Saving:
    """One way for a stage to run its forward so that its backward can follow."""

    forward_time: float
    backward_time: float
    saved_bytes: int
    forward_overhead_bytes: int
    backward_overhead_bytes: int


_SAVING_FIELDS = tuple(f.name for f in fields(Saving))


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a chain. `alternatives` are other ways to save; way 0 is the stage's own."""

    name: str
    forward_time: float
    backward_time: float
    output_bytes: int
    saved_bytes: int
    gradient_bytes: int
    forward_overhead_bytes: int = 0
    backward_overhead_bytes: int = 0
    alternatives: tuple[Saving, ...] = ()

    def __post_init__(self) -> None:
        assign(self, "name", as_text(self.name, "name"))
        for field in ("output_bytes", "gradient_bytes"):
            assign(self, field, as_size(getattr(self, field), field))
        for field in _SAVING_FIELDS:
            assign(self, field, as_amount(getattr(self, field), field))
        _check_holds_output(self.saved_bytes, self.output_bytes, "saved_bytes")
        for i, way in enumerate(self.alternatives):
            with Prefix(f"alternatives[{i}]"):
                for field in _SAVING_FIELDS:
                    as_amount(getattr(way, field), field)
                _check_holds_output(way.saved_bytes, self.output_bytes, "saved_bytes")

    @property
    def ways(self) -> tuple[Saving, ...]:
        """All the ways to save, the stage's own first: a schedule's choice indexes this."""
        own = Saving(
            self.forward_time,
            self.backward_time,
            self.saved_bytes,
            self.forward_overhead_bytes,
            self.backward_overhead_bytes,
        )
        return (own, *self.alternatives)

    @classmethod
    def from_json(cls, data: Any) -> Stage:
        data = as_object(data, allowed=_STAGE_FIELDS, required=_STAGE_REQUIRED)
        own = {field: data[field] for field in _STAGE_REQUIRED}
        stage = cls(name=data.get("name", ""), **own)
        ways = []
        for i, override in enumerate(as_list(data.get("alternatives", []), "alternatives")):
            with Prefix(f"alternatives[{i}]"):
                ways.append(_alternative(stage, override))
        return cls(name=stage.name, **own, alternatives=tuple(ways)) if ways else stage

    def to_json(self) -> Json:
        data: Json = {field: getattr(self, field) for field in ("name", *_STAGE_REQUIRED)}
        if self.alternatives:
            data["alternatives"] = [
                {f: getattr(way, f) for f in _SAVING_FIELDS if getattr(way, f) != getattr(self, f)}
                for way in self.alternatives
            ]
        return data


_STAGE_REQUIRED = (
    "forward_time",
    "backward_time",
    "output_bytes",
    "saved_bytes",
    "gradient_bytes",
    "forward_overhead_bytes",
    "backward_overhead_bytes",
)
_STAGE_FIELDS = ("name", *_STAGE_REQUIRED, "alternatives")


def _alternative(stage: Stage, override: Any) -> Saving:
    """A stage's own way to save with some fields replaced.

    The output and its gradient are the same tensors however the stage saves, so an alternative may repeat
    their sizes but not change them.
    """
    override = as_object(override, allowed=("name", *_STAGE_REQUIRED))
    for field in ("output_bytes", "gradient_bytes"):
        if field in override and as_size(override[field], field) != getattr(stage, field):
            raise InputError(field, "belongs to the stage; an alternative way to save cannot change it")
    return Saving(**{f: as_amount(override.get(f, getattr(stage, f)), f) for f in _SAVING_FIELDS})


def _check_holds_output(saved_bytes: int, output_bytes: int, field: str) -> None:
    if saved_bytes < output_bytes:
        raise InputError(field, f"{saved_bytes} is less than output_bytes ({output_bytes}), which it includes")


@dataclass(frozen=True)
class Chain:
    """Stages 1..n in a row, the last one being the loss.

    `input_bytes` is a0, in memory from the start; `input_gradient_bytes` is δ0, what the last backward leaves.
    """

    input_bytes: int
    input_gradient_bytes: int
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        for field in ("input_bytes", "input_gradient_bytes"):
            assign(self, field, as_size(getattr(self, field), field))
        assign(self, "stages", tuple(self.stages))
        if not self.stages:
            raise InputError("stages", "is empty; a chain needs at least the loss")
        largest = self.input_bytes + self.input_gradient_bytes + sum(map(_stage_bytes, self.stages))
        if largest > MAX_BYTES:
            raise InputError("stages", f"sizes add up to {largest} bytes; the most a plan can hold is 2^60")

    def __len__(self) -> int:
        return len(self.stages)

    @cached_property
    def output_bytes(self) -> tuple[int, ...]:
        """aℓ for ℓ = 0..n: position 0 is the chain's input."""
        return (self.input_bytes, *(stage.output_bytes for stage in self.stages))

    @cached_property
    def gradient_bytes(self) -> tuple[int, ...]:
        """δℓ for ℓ = 0..n: position 0 is the gradient of the chain's input."""
        return (self.input_gradient_bytes, *(stage.gradient_bytes for stage in self.stages))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Chain:
        data = as_object(
            data,
            allowed=("kind", "input_bytes", "input_gradient_bytes", "stages"),
            required=("input_bytes", "input_gradient_bytes", "stages"),
        )
        stages = []
        for i, item in enumerate(as_list(data["stages"], "stages")):
            with Prefix(f"stages[{i}]"):
                stages.append(Stage.from_json(item))
        return cls(data["input_bytes"], data["input_gradient_bytes"], tuple(stages))

    def to_json(self) -> Json:
        return {
            "kind": "chain",
            "input_bytes": self.input_bytes,
            "input_gradient_bytes": self.input_gradient_bytes,
            "stages": [stage.to_json() for stage in self.stages],
        }


def _stage_bytes(stage: Stage) -> int:
    """A bound on what a stage can add to any sum a solver forms."""
    ways = max(w.saved_bytes + w.forward_overhead_bytes + w.backward_overhead_bytes for w in stage.ways)
    return stage.output_bytes + 2 * stage.gradient_bytes + ways


# --- join ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Join:
    """K chains of equal steps that meet at the loss; memory counts in slots, one per value (000, 001 ch. 1).

    `keep_gradients[k]` says whether the gradient of branch k's input must still be there at the end
    (the vector b of 001; all ones in 000).
    """

    lengths: tuple[int, ...]
    forward_time: float
    backward_time: float
    loss_time: float
    keep_gradients: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = tuple(as_count(n, f"lengths[{k}]") for k, n in enumerate(as_list(self.lengths, "lengths")))
        keep = tuple(
            as_flag(b, f"keep_gradients[{k}]") for k, b in enumerate(as_list(self.keep_gradients, "keep_gradients"))
        )
        if not lengths:
            raise InputError("lengths", "is empty; a join needs at least one branch")
        if sum(lengths) > MAX_STEPS:
            raise InputError("lengths", f"add up to {sum(lengths)} steps; the most is {MAX_STEPS}")
        if len(keep) != len(lengths):
            raise InputError("keep_gradients", f"has {len(keep)} entries for {len(lengths)} branches")
        assign(self, "lengths", lengths)
        assign(self, "keep_gradients", keep)
        for field in ("forward_time", "backward_time", "loss_time"):
            assign(self, field, as_time(getattr(self, field), field))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Join:
        names = tuple(f.name for f in fields(cls))
        data = as_object(data, allowed=("kind", *names), required=names)
        return cls(**{name: data[name] for name in names})

    def to_json(self) -> Json:
        return {
            "kind": "join",
            "lengths": list(self.lengths),
            "forward_time": self.forward_time,
            "backward_time": self.backward_time,
            "loss_time": self.loss_time,
            "keep_gradients": list(self.keep_gradients),
        }


# --- towers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a tower. Without `saved_bytes` its backward needs its input alone, as in a join; with them, a
    saved set that a forward makes, as in a chain. `weight_bytes` (weights, their gradients) are always there."""

    name: str
    forward_time: float
    backward_time: float
    output_bytes: int
    gradient_bytes: int
    saved_bytes: int | None = None
    forward_overhead_bytes: int = 0
    backward_overhead_bytes: int = 0
    weight_bytes: int = 0

    def __post_init__(self) -> None:
        assign(self, "name", as_text(self.name, "name"))
        for field in ("forward_time", "backward_time"):
            assign(self, field, as_time(getattr(self, field), field))
        for field in _STEP_SIZES:
            assign(self, field, as_size(getattr(self, field), field))
        if self.saved_bytes is not None:
            assign(self, "saved_bytes", as_size(self.saved_bytes, "saved_bytes"))
            _check_holds_output(self.saved_bytes, self.output_bytes, "saved_bytes")

    @classmethod
    def from_json(cls, data: Any) -> Step:
        names = tuple(f.name for f in fields(cls))
        data = as_object(data, allowed=names, required=names[1:])
        return cls(**{"name": "", **data})

    def to_json(self) -> Json:
        return {f.name: getattr(self, f.name) for f in fields(self)}


_STEP_SIZES = (
    "output_bytes", "gradient_bytes", "forward_overhead_bytes", "backward_overhead_bytes", "weight_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Tower:
    """A row of steps that ends at the loss. Its input is in memory from the start; the gradient of that input stays
    to the end if it is to be kept."""

    input_bytes: int
    input_gradient_bytes: int
    steps: tuple[Step, ...]
    keep_gradient: int = 0

    def __post_init__(self) -> None:
        for field in ("input_bytes", "input_gradient_bytes"):
            assign(self, field, as_size(getattr(self, field), field))
        assign(self, "keep_gradient", as_flag(self.keep_gradient, "keep_gradient"))
        assign(self, "steps", tuple(self.steps))

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def output_bytes(self) -> tuple[int, ...]:
        """Of every position: 0 is the input, ℓ what step ℓ makes."""
        return (self.input_bytes, *(step.output_bytes for step in self.steps))

    @property
    def gradient_bytes(self) -> tuple[int, ...]:
        return (self.input_gradient_bytes, *(step.gradient_bytes for step in self.steps))

    @classmethod
    def from_json(cls, data: Any) -> Tower:
        names = tuple(f.name for f in fields(cls))
        data = as_object(data, allowed=names, required=names)
        steps = []
        for i, item in enumerate(as_list(data["steps"], "steps")):
            with Prefix(f"steps[{i}]"):
                steps.append(Step.from_json(item))
        return cls(**{**data, "steps": tuple(steps)})

    def to_json(self) -> Json:
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**data, "steps": [step.to_json() for step in self.steps]}


@dataclass(frozen=True)
class Towers:
    """Unequal chains that meet at the loss: a Join with times and sizes of its own for every step.

    With `in_place`, an operation writes over what it reads for the last time, as the papers on joins have it. With
    `shared_weights`, steps of the same number in all towers share theirs: a Siamese network.
    """

    towers: tuple[Tower, ...]
    loss_time: float
    loss_overhead_bytes: int = 0
    in_place: int = 0
    shared_weights: int = 0

    def __post_init__(self) -> None:
        assign(self, "towers", tuple(self.towers))
        assign(self, "loss_time", as_time(self.loss_time, "loss_time"))
        assign(self, "loss_overhead_bytes", as_size(self.loss_overhead_bytes, "loss_overhead_bytes"))
        for field in ("in_place", "shared_weights"):
            assign(self, field, as_flag(getattr(self, field), field))
        if not self.towers:
            raise InputError("towers", "is empty; there must be at least one")
        if self.shared_weights:
            self._check_shared()
        largest = sum(map(_tower_bytes, self.towers)) + self.loss_overhead_bytes
        if largest > MAX_BYTES:
            raise InputError("towers", f"sizes add up to {largest} bytes; the most a plan can hold is 2^60")

    def _check_shared(self) -> None:
        for k, tower in enumerate(self.towers):
            for i, (own, first) in enumerate(zip(tower.steps, self.towers[0].steps, strict=False)):
                if own.weight_bytes != first.weight_bytes:
                    raise InputError(
                        f"towers[{k}].steps[{i}].weight_bytes",
                        f"{own.weight_bytes} cannot be shared with the first tower's {first.weight_bytes}",
                    )

    @property
    def resident_bytes(self) -> int:
        """Weights, which are there all the time: shared ones once."""
        counted: tuple[Tower, ...] = (max(self.towers, key=len),) if self.shared_weights else self.towers
        return sum(step.weight_bytes for tower in counted for step in tower.steps)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Towers:
        names = tuple(f.name for f in fields(cls))
        data = as_object(data, allowed=("kind", *names), required=names)
        towers = []
        for k, item in enumerate(as_list(data["towers"], "towers")):
            with Prefix(f"towers[{k}]"):
                towers.append(Tower.from_json(item))
        return cls(tuple(towers), *(data[name] for name in names[1:]))

    def to_json(self) -> Json:
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"kind": "towers", **data, "towers": [tower.to_json() for tower in self.towers]}


def _tower_bytes(tower: Tower) -> int:
    """A bound on what a tower can add to any sum a solver forms."""
    steps = sum(
        step.output_bytes + 2 * step.gradient_bytes + (step.saved_bytes or 0) + step.weight_bytes
        + step.forward_overhead_bytes + step.backward_overhead_bytes
        for step in tower.steps
    )  # fmt: skip
    return tower.input_bytes + tower.input_gradient_bytes + steps


# --- graph ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Node:
    """One computation of a graph and the value it leaves."""

    name: str
    time: float
    bytes: int

    def __post_init__(self) -> None:
        assign(self, "name", as_text(self.name, "name"))
        assign(self, "time", as_time(self.time, "time"))
        assign(self, "bytes", as_size(self.bytes, "bytes"))


@dataclass(frozen=True)
class Graph:
    """Computations with dependencies: `edges` holds (producer, consumer) pairs of node positions from 0."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        assign(self, "nodes", tuple(self.nodes))
        if not self.nodes:
            raise InputError("nodes", "is empty")
        edges = tuple(self._edge(pair, f"edges[{i}]") for i, pair in enumerate(as_list(self.edges, "edges")))
        assign(self, "edges", edges)
        if len(set(edges)) != len(edges):
            seen: set[tuple[int, int]] = set()
            twice = next(i for i, edge in enumerate(edges) if edge in seen or seen.add(edge))  # type: ignore[func-returns-value]
            raise InputError(f"edges[{twice}]", f"{list(edges[twice])} is given twice")
        if sum(node.bytes for node in self.nodes) * 4 > MAX_BYTES:
            raise InputError("nodes", "sizes add up to more than a plan can hold (2^58 bytes)")
        if len(self.order) < len(self.nodes):
            stuck = min(set(range(len(self.nodes))) - set(self.order))
            raise InputError("edges", f"form a cycle through node {stuck}")

    def _edge(self, pair: Any, field: str) -> tuple[int, int]:
        pair = as_list(pair, field)
        if len(pair) != 2:
            raise InputError(field, f"must be a [producer, consumer] pair, got {len(pair)} entries")
        source, target = (as_count(end, f"{field}[{i}]") for i, end in enumerate(pair))
        for i, end in enumerate((source, target)):
            if end >= len(self.nodes):
                raise InputError(f"{field}[{i}]", f"names node {end}, but there are {len(self.nodes)} nodes")
        if source == target:
            raise InputError(field, f"joins node {source} to itself")
        return source, target

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.nodes]
        for source, target in self.edges:
            found[target].append(source)
        return tuple(map(tuple, found))

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.nodes]
        for source, target in self.edges:
            found[source].append(target)
        return tuple(map(tuple, found))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The nodes in a topological order (shorter than `nodes` only while a cycle is being refused)."""
        waiting = [len(p) for p in self.predecessors]
        ready = [v for v in range(len(self.nodes) - 1, -1, -1) if waiting[v] == 0]
        order = []
        while ready:
            v = ready.pop()
            order.append(v)
            for w in reversed(self.successors[v]):
                waiting[w] -= 1
                if waiting[w] == 0:
                    ready.append(w)
        return tuple(order)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Graph:
        data = as_object(data, allowed=("kind", "nodes", "edges"), required=("nodes", "edges"))
        nodes = []
        for i, item in enumerate(as_list(data["nodes"], "nodes")):
            with Prefix(f"nodes[{i}]"):
                item = as_object(item, allowed=("name", "time", "bytes"), required=("time", "bytes"))
                nodes.append(Node(item.get("name", ""), item["time"], item["bytes"]))
        return cls(tuple(nodes), data["edges"])

    def to_json(self) -> Json:
        nodes = [{"name": v.name, "time": v.time, "bytes": v.bytes} for v in self.nodes]
        return {"kind": "graph", "nodes": nodes, "edges": [list(edge) for edge in self.edges]}


# --- any problem ---------------------------------------------------------------------------------------------

Problem: TypeAlias = Chain | Join | Towers | Graph
KINDS: dict[str, type[Chain] | type[Join] | type[Towers] | type[Graph]] = {
    "chain": Chain,
    "join": Join,
    "towers": Towers,
    "graph": Graph,
}


@dataclass(frozen=True, slots=True)
class Platform:
    """Where a schedule runs, beyond computing: the host link, in bytes per unit of time (None: no link)."""

    bandwidth: float | None = None

    def __post_init__(self) -> None:
        if self.bandwidth is not None:
            assign(self, "bandwidth", as_time(self.bandwidth, "bandwidth"))
            if self.bandwidth == 0:
                raise InputError("bandwidth", "must be positive")


def kind_of(problem: Problem) -> str:
    return next(kind for kind, cls in KINDS.items() if isinstance(problem, cls))


def problem_from_json(data: Any) -> Problem:
    """A validated problem from the decoded JSON of the machine interface."""
    if not isinstance(data, Mapping):
        raise InputError("problem", f"must be a JSON object with a 'kind', not {kind_of_value(data)}")
    if "kind" not in data:
        raise InputError("kind", f"missing; one of {', '.join(KINDS)}")
    kind = data["kind"]
    if not isinstance(kind, str) or kind not in KINDS:
        raise InputError("kind", f"must be one of {', '.join(KINDS)}, not {kind!r:.40}")
    return KINDS[kind].from_json(data)
