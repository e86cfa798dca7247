"""What can go wrong, said in one sentence that names the culprit."""


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


class SolverBug(ElbowroomError):
    """A method returned a schedule that the referee does not confirm: a defect of ours, never of the user's."""
