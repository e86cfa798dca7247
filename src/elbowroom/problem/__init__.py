"""What is to be scheduled: a Chain, a Join, Towers or a Graph, as frozen data that validates itself.

Sizes are whole bytes (slots in a Join), times are seconds or any other unit used throughout. `from_json` and
`to_json` speak the machine interface; an `InputError` names the field at fault, as in
`stages[3].saved_bytes: 5 is less than output_bytes (7)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from elbowroom.errors import InputError
from elbowroom.problem.chain import Chain, Saving, Stage
from elbowroom.problem.graph import Graph, Node
from elbowroom.problem.join import Join
from elbowroom.problem.platform import Platform
from elbowroom.problem.towers import Step, Tower, Towers
from elbowroom.problem.validation import kind_of_value

__all__ = [
    "KINDS",
    "Chain",
    "Graph",
    "Join",
    "Node",
    "Platform",
    "Problem",
    "Saving",
    "Stage",
    "Step",
    "Tower",
    "Towers",
    "kind_of",
    "problem_from_json",
]

Problem: TypeAlias = Chain | Join | Towers | Graph
KINDS: dict[str, type[Chain] | type[Join] | type[Towers] | type[Graph]] = {
    "chain": Chain,
    "join": Join,
    "towers": Towers,
    "graph": Graph,
}


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
