"""Functions as graphs of operators."""

from __future__ import annotations

from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx


def traced(function, *inputs):
    """Decomposed before it is differentiated, as AOT autograd does."""
    with enable_python_dispatcher():
        return make_fx(lambda *args: function(*args), select_decomp_table(), tracing_mode="fake")(*inputs)
