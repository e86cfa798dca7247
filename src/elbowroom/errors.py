"""What can go wrong, said in one sentence that names the culprit."""

from __future__ import annotations

import traceback


def first_line(failure: Exception) -> str:
    """What somebody else's failure says first; its kind if it says nothing."""
    said = str(failure).splitlines()
    return said[0] if said else type(failure).__name__


class ElbowroomError(Exception):
    """Base of everything this package raises on purpose."""


class InputError(ElbowroomError, ValueError):
    """Bad input. The message starts with the field that is wrong: `stages[3].saved_bytes: …`."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class InvalidSchedule(ElbowroomError):
    """The referee refused a schedule. `index` is the first operation that cannot run (None: the end)."""

    def __init__(self, reason: str, index: int | None = None) -> None:
        super().__init__(reason)
        self.index = index

    def to_json(self) -> dict[str, object]:
        return {"valid": False, "reason": str(self)}


class InvalidProgram(ElbowroomError):
    """The referee refused a step's program: `phase` and `index` tell which operation (None: no single one)."""

    def __init__(self, reason: str, phase: str | None = None, index: int | None = None) -> None:
        super().__init__(reason)
        self.phase, self.index = phase, index


class SolverBug(ElbowroomError):
    """A method returned a schedule that the referee does not confirm: a defect of ours, never of the user's."""


class BudgetTooSmall(ElbowroomError):
    """No plan fits. `least_budget` is the smallest that has one; `largest` are the biggest things in it."""

    def __init__(self, message: str, budget: int, least_budget: int, largest: list[tuple[str, int]]) -> None:
        super().__init__(message)
        self.budget, self.least_budget, self.largest = budget, least_budget, largest


class Unplanned(ElbowroomError):
    """Part of a model would run outside the plan, and `strict=True` forbids that."""


class OverBudget(ElbowroomError):
    """A step took more than its budget, as the allocator told afterwards, and `strict=True` forbids that."""


class Mismatch(ElbowroomError):
    """The planned step did not compute what plain execution computes. The message names the first difference."""


def forget_frames(failure: BaseException) -> None:
    """Let go of the local variables of the functions that an exception ended, and of those before it.

    Values of a step are among them. Where exceptions and functions refer to each other in a circle, they would stay
    until Python collects garbage.
    """
    seen: set[int] = set()
    reason: BaseException | None = failure
    while reason is not None and id(reason) not in seen:
        seen.add(id(reason))
        traceback.clear_frames(reason.__traceback__)
        reason.__traceback__ = None
        reason = reason.__cause__ or reason.__context__
