"""One thread, so that parallel tests do not fight; measurements of operators go to a folder of their own.

For whole modules: models that these fit once must not see another number of threads, or PyTorch traces them again.
"""

import os
import tempfile

import pytest

os.environ.setdefault("ELBOWROOM_CACHE", os.path.join(tempfile.gettempdir(), f"elbowroom-tests-{os.getuid()}"))


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def quick_compiler():
    """Without vector instructions C++ is compiled faster."""
    torch = pytest.importorskip("torch")
    from torch._inductor import config

    torch._dynamo.reset()
    with config.patch({"cpp.simdlen": 1}):
        yield
    torch._dynamo.reset()
