"""PyTorch's version, parsed once: what differs between versions asks here."""

from __future__ import annotations

import torch

from elbowroom.errors import ElbowroomError

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
LEAST = (2, 11)

if TORCH < LEAST:
    raise ElbowroomError(f"elbowroom needs PyTorch 2.11 or newer, and this is {torch.__version__}")
