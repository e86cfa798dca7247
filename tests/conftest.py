"""Shared set-up: how hypothesis runs, where measurements go, threads, a quick compiler, garbage that is left alone,
and a command line that stays in this process."""

from __future__ import annotations

import gc
import os
import tempfile
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default", deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile("more", settings.get_profile("default"), max_examples=600)
settings.register_profile("deep", deadline=None, max_examples=5000, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Measurements of operators go to a folder of their own.
os.environ.setdefault("ELBOWROOM_CACHE", os.path.join(tempfile.gettempdir(), f"elbowroom-tests-{os.getuid()}"))


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


@pytest.fixture(autouse=True, scope="module")
def older_objects_stay():
    """Garbage collection looks past what modules before this one have left.

    PyTorch keeps what it traced, gigabytes after some hundred tests, and elbowroom collects garbage before it
    measures: each time, all of that would be looked through, in seconds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def one_thread():
    """So that parallel tests do not fight.

    For whole modules: models that are fitted once must not see another number of threads, or they are traced anew.
    """
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh():
    """Nothing traced before, and the same random numbers."""
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def quick_compiler():
    """Without vector instructions C++ is compiled faster."""
    torch = pytest.importorskip("torch")
    from torch._inductor import config

    torch._dynamo.reset()
    with config.patch({"cpp.simdlen": 1}):
        yield
    torch._dynamo.reset()
