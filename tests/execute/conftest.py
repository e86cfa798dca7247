"""One thread, so that parallel tests do not fight; measurements of operators go to a folder of their own."""

import os
import tempfile

import pytest

os.environ.setdefault("ELBOWROOM_CACHE", os.path.join(tempfile.gettempdir(), f"elbowroom-tests-{os.getuid()}"))


@pytest.fixture(autouse=True)
def _one_thread():
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
