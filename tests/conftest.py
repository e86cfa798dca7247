"""Shared set-up: how hypothesis runs, and a command line that stays in this process."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default", deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile("deep", deadline=None, max_examples=5000, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def elbowroom(capsys):
    """Run the command line: `elbowroom("solve", path, "--json")` gives its exit status and what it printed."""
    from elbowroom.cli.app import run

    def call(*arguments: object) -> Outcome:
        status = run([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return Outcome(status, out, err)

    return call
