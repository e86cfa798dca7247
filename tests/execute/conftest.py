"""All tests of this folder run in one thread."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _one_thread_for_all(one_thread):
    """The fixture does it; here it is asked for by every module."""
