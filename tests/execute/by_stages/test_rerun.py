"""A stage that runs again draws what it drew at first, or says that it cannot."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from elbowroom.errors import ElbowroomError  # noqa: E402
from elbowroom.execute.by_stages.rerun import Habits, remembering  # noqa: E402


def ran(disturbed: bool):
    """What a first forward found, and what it drew; another thread may have drawn after it began."""
    with remembering(nn.Identity(), [], Habits()) as found:
        if disturbed:
            torch.rand(2)
        drawn = torch.rand(3)
    return found, drawn


def test_a_second_run_draws_the_same_and_leaves_the_stream_alone():
    found, drawn = ran(False)
    torch.rand(5)
    now = torch.get_rng_state()
    for _ in range(2):
        with found.restored():
            assert torch.equal(torch.rand(3), drawn)
        assert torch.equal(torch.get_rng_state(), now)


def run_again(found, *work) -> None:
    with found.restored():
        for each in work:
            each()


@pytest.mark.parametrize("first", [True, False])
def test_a_run_that_another_thread_disturbed_is_found(first):
    found, _ = ran(first)
    now = torch.get_rng_state()
    work = [lambda: torch.rand(3)] if first else [lambda: torch.rand(2), lambda: torch.rand(3)]
    with pytest.raises(ElbowroomError, match="another thread drew random numbers"):
        run_again(found, *work)
    assert torch.equal(torch.get_rng_state(), now)


def interrupt():
    raise KeyboardInterrupt


def test_a_second_run_that_fails_leaves_the_stream_alone():
    found, _ = ran(False)
    now = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        run_again(found, lambda: torch.rand(1), interrupt)
    assert torch.equal(torch.get_rng_state(), now)
