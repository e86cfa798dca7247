"""How fast devices are, in round numbers, for times that are estimated and not measured: the one place that knows.

No product in particular: what matters to a plan is the proportion between operators.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """Arithmetic and memory traffic per second, and the seconds before an operator begins.

    `copy_bytes_per_second` is what a plain copy reaches; other operators reach less.
    """

    flops_per_second: float
    bytes_per_second: float
    name: str
    launch_s: float = 0.0
    copy_bytes_per_second: float = 0.0

    def seconds(self, flops: int, moved_bytes: int) -> float:
        """Whichever takes longer, the arithmetic or the memory traffic."""
        return self.launch_s + max(flops / self.flops_per_second, moved_bytes / self.bytes_per_second)


ACCELERATOR = Machine(100e12, 2e12, "generic accelerator: 100 TFLOP/s, 2 TB/s")
# By the name that PyTorch has for a kind of device.
KINDS = {
    "cuda": Machine(2e14, 2e12, "a GPU", launch_s=3e-6, copy_bytes_per_second=3e12),
    "cpu": Machine(5e10, 1e10, "a CPU", launch_s=3e-6, copy_bytes_per_second=1e10),
}


def machine_of(kind: str) -> Machine:
    """Devices of a kind that is not known count as GPUs."""
    return KINDS.get(kind, KINDS["cuda"])
