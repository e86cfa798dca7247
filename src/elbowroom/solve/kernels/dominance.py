"""Which prefixes of offload decisions can be forgotten because another one is at least as good in every way.

A prefix has taken `time` seconds, keeps `kept` bytes and has moved `gone` others, has made a value of `value` bytes,
and its copies are `out` and `back` seconds behind (`offload/prefixes.py`). Seconds that copies are behind can be
waited for. So prefix p is as good as q, whatever follows, if it keeps, has moved and has made no more, and

    time_p + (out_p − out_q)⁺ + (back_p − back_q)⁺ ≤ time_q.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from elbowroom.solve.kernels.compiling import HAVE_NUMBA, compiled
from elbowroom.solve.kernels.rows import Floats, Ints

Flags = NDArray[np.bool_]

if HAVE_NUMBA:

    @compiled
    def beaten(
        of: int, better: Ints, low: int, high: int, value: Ints, gone: Ints, out: Floats, back: Floats, time: Floats
    ) -> bool:
        """Whether one of better[low..high-1], which keep no more, is as good as `of`. The last are the likeliest."""
        for place in range(high - 1, low - 1, -1):
            one = better[place]
            if value[one] > value[of] or gone[one] > gone[of] or time[one] > time[of]:
                continue
            waits = max(out[one] - out[of], 0.0) + max(back[one] - back[of], 0.0)
            if time[one] + waits <= time[of]:
                return True
        return False

else:

    def beaten(
        of: int, better: Ints, low: int, high: int, value: Ints, gone: Ints, out: Floats, back: Floats, time: Floats
    ) -> bool:
        ones = better[low:high]
        waits = np.maximum(out[ones] - out[of], 0.0) + np.maximum(back[ones] - back[of], 0.0)
        good = (value[ones] <= value[of]) & (gone[ones] <= gone[of]) & (time[ones] + waits <= time[of])
        return bool(good.any())


@compiled
def undominated(
    order: Ints, near: int, kept: Ints, value: Ints, gone: Ints, out: Floats, back: Floats, time: Floats, stays: Flags
) -> None:
    """Mark in `stays` the prefixes that none before them is as good as. `order` sorts them by `kept`, then `time`;
    those are compared of which `kept` differs by at most `near` bytes, because the others rarely decide anything."""
    better = np.empty(len(order), dtype=np.int64)
    low, high = 0, 0
    for of in order:
        while low < high and kept[better[low]] < kept[of] - near:
            low += 1
        if not beaten(of, better, low, high, value, gone, out, back, time):
            stays[of] = True
            better[high] = of
            high += 1
