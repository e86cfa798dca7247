"""The referee for graphs: values and gradients of nodes, computed one node at a time.

A forward needs the values of the node's predecessors. A backward needs the node's gradient (complete once every
successor's backward has run), its value and its predecessors' values, and leaves a gradient for each predecessor.
A gradient is as large as its value. A node's time is that of its forward; backward counts as zero, because the
format gives nodes one time and 002 measures overhead in recomputed forwards.
"""

from __future__ import annotations

from elbowroom.errors import InvalidSchedule
from elbowroom.problem import Graph
from elbowroom.schedule.operations import Backward, Discard, Forward, Operation, Schedule
from elbowroom.schedule.simulation import Log, Simulation


def simulate_graph(graph: Graph, schedule: Schedule, budget: int | None = None) -> Simulation:
    """Run a schedule; `InvalidSchedule` says which operation cannot run and why."""
    machine = _Machine(graph, schedule, budget)
    for index, operation in enumerate(schedule):
        machine.step(index, operation)
    return machine.finish()


class _Machine(Log):
    def __init__(self, graph: Graph, schedule: Schedule, budget: int | None) -> None:
        super().__init__(schedule, budget, 0)
        self.graph = graph
        self.values: set[int] = set()
        self.gradients: set[int] = set()
        self.done: set[int] = set()  # nodes whose backward has run
        self.stored = 0

    def step(self, index: int, operation: Operation) -> None:
        self.index = index
        v = getattr(operation, "at", None)
        if not isinstance(v, int) or not 0 <= v < len(self.graph):
            raise self._refuse(f"there is no node {v} in a graph of {len(self.graph)}")
        if isinstance(operation, Forward):
            self._forward(v)
        elif isinstance(operation, Backward):
            self._backward(v)
        elif isinstance(operation, Discard):
            if v not in self.values:
                raise self._refuse(f"the value of node {v} is not in memory")
            self._drop(v)
        else:
            raise self._refuse("is not an operation of a graph")

    def finish(self) -> Simulation:
        left = set(range(len(self.graph))) - self.done
        if left:
            raise InvalidSchedule(f"the schedule ends before backward {max(left)}")
        return self._simulation()

    def _forward(self, v: int) -> None:
        if v in self.values:
            raise self._refuse(f"the value of node {v} is in memory already")
        self._need_values(self.graph.predecessors[v])
        self._run(self.graph.nodes[v].bytes, self.graph.nodes[v].time)
        self.values.add(v)
        self.stored += self.graph.nodes[v].bytes

    def _backward(self, v: int) -> None:
        if v in self.done:
            raise self._refuse("has run before")
        waiting = [w for w in self.graph.successors[v] if w not in self.done]
        if waiting:
            raise self._refuse(f"the gradient of node {v} still misses its part from node {waiting[0]}")
        self._need_values((v, *self.graph.predecessors[v]))
        new = {u for u in self.graph.predecessors[v] if u not in self.gradients}
        if v not in self.gradients:  # a sink: its gradient starts here
            new.add(v)
        room = sum(self.graph.nodes[u].bytes for u in new)
        self._run(room, 0)
        self.gradients |= new
        self.stored += room - self.graph.nodes[v].bytes
        self.gradients.remove(v)
        self.done.add(v)
        self._drop(v)

    def _need_values(self, nodes: tuple[int, ...]) -> None:
        for u in nodes:
            if u not in self.values:
                raise self._refuse(f"the value of node {u} is not in memory")

    def _drop(self, v: int) -> None:
        self.values.remove(v)
        self.stored -= self.graph.nodes[v].bytes

    def _run(self, room: int, duration: float) -> None:
        level = self.stored + room
        self._check_bytes(level)
        self._take_down(level, duration)
