"""The referee for joins: memory is a number of slots, one per value, and values are replaced in place.

Every branch starts with its input in a slot. A forward that saves nothing overwrites its input with its output;
one that saves its input takes one more slot. The loss turns every branch's output into its gradient in the same
slot. A backward overwrites its gradient and lets go of its input (001 Table 1.1).
"""

from __future__ import annotations

from elbowroom.errors import InvalidSchedule
from elbowroom.problem import Join
from elbowroom.schedule.operations import Backward, Discard, Forward, Loss, Operation, Schedule
from elbowroom.schedule.simulation import Log, Simulation


def simulate_join(join: Join, schedule: Schedule, budget: int | None = None) -> Simulation:
    """Run a schedule; `InvalidSchedule` says which operation cannot run and why."""
    machine = _Machine(join, schedule, budget)
    for index, operation in enumerate(schedule):
        machine.step(index, operation)
    return machine.finish()


class _Machine(Log):
    def __init__(self, join: Join, schedule: Schedule, budget: int | None) -> None:
        super().__init__(schedule, budget, len(join.lengths))
        self.join = join
        self.values: list[set[int]] = [{0} for _ in join.lengths]  # the activations stored, by branch
        self.gradients: list[int] | None = None  # after the loss: the position each branch's gradient is at
        self.slots = len(join.lengths)

    def step(self, index: int, operation: Operation) -> None:
        self.index = index
        if isinstance(operation, Loss):
            self._loss()
            return
        branch, step = self._locate(operation)
        if isinstance(operation, Forward):
            self._forward(branch, step, operation)
        elif isinstance(operation, Backward):
            self._backward(branch, step)
        elif isinstance(operation, Discard):
            if operation.what != "input" or step - 1 not in self.values[branch]:
                raise self._refuse(f"the input of step {step} is not stored")
            self.values[branch].remove(step - 1)
            self.slots -= 1
        else:
            raise self._refuse("is not an operation of a join")

    def finish(self) -> Simulation:
        if self.gradients is None:
            raise InvalidSchedule("the schedule ends before the loss")
        for branch, position in enumerate(self.gradients):
            if position:
                raise InvalidSchedule(f"the schedule ends before backward [{branch + 1}, {position}]")
        return self._simulation()

    def _forward(self, branch: int, step: int, operation: Forward) -> None:
        values = self.values[branch]
        if operation.save == "all":
            raise self._refuse("in a join a forward saves 'nothing' or 'input'")
        if step - 1 not in values:
            raise self._refuse(f"the input of step {step} is not stored")
        if step in values:
            raise self._refuse(f"the output of step {step} is stored already")
        values.add(step)
        if operation.save == "input":
            self.slots += 1
        else:
            values.remove(step - 1)
        self._run(self.join.forward_time)

    def _loss(self) -> None:
        if self.gradients is not None:
            raise self._refuse("has run before")
        for branch, length in enumerate(self.join.lengths):
            if length not in self.values[branch]:
                raise self._refuse(f"the output of chain {branch + 1} is not stored")
            self.values[branch].remove(length)
        self._run(self.join.loss_time)
        self.gradients = list(self.join.lengths)
        for branch in range(len(self.gradients)):
            self._release_if_complete(branch)

    def _backward(self, branch: int, step: int) -> None:
        if self.gradients is None:
            raise self._refuse("the loss has not run")
        if self.gradients[branch] != step:
            raise self._refuse(f"the gradient of chain {branch + 1} is at step {self.gradients[branch]}")
        if step - 1 not in self.values[branch]:
            raise self._refuse(f"the input of step {step} is not stored")
        self._run(self.join.backward_time)
        self.values[branch].remove(step - 1)
        self.slots -= 1
        self.gradients[branch] = step - 1
        self._release_if_complete(branch)

    def _release_if_complete(self, branch: int) -> None:
        assert self.gradients is not None
        if self.gradients[branch] == 0 and not self.join.keep_gradients[branch]:
            self.slots -= 1

    def _run(self, duration: float) -> None:
        if self.budget is not None and self.slots > self.budget:
            raise self._refuse(f"needs {self.slots} slots, and the budget is {self.budget}")
        self._take_down(self.slots, duration)

    def _locate(self, operation: Operation) -> tuple[int, int]:
        at = getattr(operation, "at", None)
        if not isinstance(at, tuple):
            raise self._refuse("a join names its steps [chain, step]")
        branch, step = at
        if not 1 <= branch <= len(self.join.lengths) or not 1 <= step <= self.join.lengths[branch - 1]:
            raise self._refuse("there is no such step in this join")
        return branch - 1, step
