"""What can go wrong, said in one sentence that names the culprit."""

import traceback


def first_line(failure: Exception) -> str:
    """What somebody else's failure says first; its kind if it says nothing."""
    said = str(failure).splitlines()
    return said[0] if said else type(failure).__name__


def let_go_of_values(failure: BaseException) -> None:
    """A failure holds the variables of every function that it has left, for as long as somebody looks at it, or until
    Python looks for rings; and so do those that led to it. Of a step, they are all that it had in memory."""
    waiting: list[BaseException | None] = [failure]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            waiting += [one.__cause__, one.__context__, getattr(one, "inner_exception", None)]


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


class HostMemoryRefused(ElbowroomError):
    """The system does not give the memory on the host that values would move to."""


class CopyFailed(ElbowroomError):
    """A copy of a value to the host, or back from there, failed in the middle of a step."""


class Mismatch(ElbowroomError):
    """The planned step did not compute what plain execution computes. The message names the first difference."""
