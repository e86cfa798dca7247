"""All tests of this folder run in one thread, and leave nothing on the host."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _one_thread_for_all(one_thread):
    """The fixture does it; here it is asked for by every module."""


@pytest.fixture(autouse=True, scope="module")
def _nothing_stays_on_the_host():
    """What a process holds there is what `elbowroom.measure` tells, also to tests after these."""
    pytest.importorskip("torch")
    from fitted import host_memory_given_back

    with host_memory_given_back():
        yield
