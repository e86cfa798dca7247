"""The referee for towers: chains of unequal steps that meet at the loss, their sizes in bytes.

Memory holds weights, activations on their own ("plain"), saved sets (each contains its step's output), and after the
loss one gradient per tower. While an operation runs, memory is everything stored, what the operation makes, and its
overhead; in place, it makes only what is larger than what it reads for the last time.
"""

from __future__ import annotations

from elbowroom.errors import InvalidSchedule
from elbowroom.problem import Step, Towers
from elbowroom.schedule.operations import Backward, Discard, Forward, Loss, Operation, Schedule
from elbowroom.schedule.simulation import Log, Simulation


def simulate_towers(towers: Towers, schedule: Schedule, budget: int | None = None) -> Simulation:
    """Run a schedule; `InvalidSchedule` says which operation cannot run and why."""
    machine = _Machine(towers, schedule, budget)
    for index, operation in enumerate(schedule):
        machine.step(index, operation)
    return machine.finish()


class _Machine(Log):
    def __init__(self, problem: Towers, schedule: Schedule, budget: int | None) -> None:
        self.problem = problem
        self.activation = [tower.output_bytes for tower in problem.towers]
        self.gradient = [tower.gradient_bytes for tower in problem.towers]
        self.plain: list[set[int]] = [{0} for _ in problem.towers]  # activations on their own, by tower
        self.saved: list[set[int]] = [set() for _ in problem.towers]  # steps with a saved set
        self.at: list[int] | None = None  # after the loss: the position each tower's gradient is at
        self.stored = problem.resident_bytes + sum(tower.input_bytes for tower in problem.towers)
        super().__init__(schedule, budget, self.stored)

    def step(self, index: int, operation: Operation) -> None:
        self.index = index
        if isinstance(operation, Loss):
            self._loss()
            return
        k, number = self._locate(operation)
        if isinstance(operation, Forward):
            self._forward(k, number, operation)
        elif isinstance(operation, Backward):
            self._backward(k, number)
        elif isinstance(operation, Discard):
            self._discard(k, number, operation)
        else:
            raise self._refuse("is not an operation of towers")

    def finish(self) -> Simulation:
        if self.at is None:
            raise InvalidSchedule("the schedule ends before the loss")
        for k, position in enumerate(self.at):
            if position:
                raise InvalidSchedule(f"the schedule ends before backward [{k + 1}, {position}]")
        return self._simulation()

    def _forward(self, k: int, number: int, operation: Forward) -> None:
        step = self._step(k, number)
        self._check_input(k, number)
        if number in self.saved[k]:
            raise self._refuse(f"step {number} has saved already")
        if operation.save == "all":
            if step.saved_bytes is None or operation.way:
                raise self._refuse("there is no such way to save")
            self._run(step.saved_bytes + step.forward_overhead_bytes, step.forward_time)
            self._drop(k, number)  # the saved set contains the output
            self.saved[k].add(number)
            self.stored += step.saved_bytes
            return
        if number in self.plain[k]:
            raise self._refuse(f"the output of step {number} is in memory already")
        replaced = operation.save == "nothing" and number - 1 in self.plain[k]
        over = self.activation[k][number - 1] if replaced and self.problem.in_place else 0
        self._run(max(0, step.output_bytes - over) + step.forward_overhead_bytes, step.forward_time)
        self._put(k, number)
        if replaced:
            self._drop(k, number - 1)

    def _loss(self) -> None:
        if self.at is not None:
            raise self._refuse("has run before")
        made = 0
        for k, tower in enumerate(self.problem.towers):
            if len(tower) not in self.plain[k] | self.saved[k]:
                raise self._refuse(f"the output of tower {k + 1} is not in memory")
            alone = len(tower) in self.plain[k]
            over = self.activation[k][-1] if alone and self.problem.in_place else 0
            made += max(0, self.gradient[k][-1] - over)
        self._run(made + self.problem.loss_overhead_bytes, self.problem.loss_time)
        self.at = [len(tower) for tower in self.problem.towers]
        for k, tower in enumerate(self.problem.towers):
            self._drop(k, len(tower))
            self.stored += self.gradient[k][-1]
            self._let_go(k)

    def _backward(self, k: int, number: int) -> None:
        step = self._step(k, number)
        if self.at is None:
            raise self._refuse("the loss has not run")
        if self.at[k] != number:
            raise self._refuse(f"the gradient of tower {k + 1} is at step {self.at[k]}")
        if step.saved_bytes is not None and number not in self.saved[k]:
            raise self._refuse(f"nothing is saved for the backward of step {number}")
        self._check_input(k, number)
        before, after = self.gradient[k][number], self.gradient[k][number - 1]
        made = max(0, after - before) if self.problem.in_place else after
        self._run(made + step.backward_overhead_bytes, step.backward_time)
        if number in self.saved[k]:
            self._unsave(k, number)
        self._drop(k, number - 1)
        self.stored += after - before
        self.at[k] = number - 1
        self._let_go(k)

    def _discard(self, k: int, number: int, operation: Discard) -> None:
        if operation.what == "all":
            if number not in self.saved[k]:
                raise self._refuse(f"nothing is saved for step {number}")
            if number + 1 in self.saved[k] and number not in self.plain[k]:
                raise self._refuse(f"step {number + 1}'s saved set needs the output of step {number}")
            self._unsave(k, number)
            return
        if number - 1 not in self.plain[k]:
            raise self._refuse(f"the input of step {number} is not stored on its own")
        if number in self.saved[k]:
            raise self._refuse(f"the saved set of step {number} still needs its input")
        self._drop(k, number - 1)

    def _let_go(self, k: int) -> None:
        """The gradient of an input that nobody wants."""
        assert self.at is not None
        if self.at[k] == 0 and not self.problem.towers[k].keep_gradient:
            self.stored -= self.gradient[k][0]

    def _run(self, made: int, duration: float) -> None:
        level = self.stored + made
        self._check_bytes(level)
        self._take_down(level, duration)

    def _put(self, k: int, position: int) -> None:
        self.plain[k].add(position)
        self.stored += self.activation[k][position]

    def _drop(self, k: int, position: int) -> None:
        if position in self.plain[k]:
            self.plain[k].remove(position)
            self.stored -= self.activation[k][position]

    def _unsave(self, k: int, number: int) -> None:
        self.saved[k].remove(number)
        self.stored -= self._step(k, number).saved_bytes or 0

    def _check_input(self, k: int, number: int) -> None:
        if number - 1 not in self.plain[k] | self.saved[k]:
            raise self._refuse(f"the input of step {number} is not in memory")

    def _step(self, k: int, number: int) -> Step:
        return self.problem.towers[k].steps[number - 1]

    def _locate(self, operation: Operation) -> tuple[int, int]:
        at = getattr(operation, "at", None)
        if not isinstance(at, tuple):
            raise self._refuse("towers name their steps [tower, step]")
        k, number = at
        if not 1 <= k <= len(self.problem.towers) or not 1 <= number <= len(self.problem.towers[k - 1]):
            raise self._refuse("there is no such step in these towers")
        return k - 1, number
