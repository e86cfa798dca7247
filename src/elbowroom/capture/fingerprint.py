"""What a plan was made for, in one short string: the operators, shapes, dtypes and connections of a graph."""

from __future__ import annotations

import hashlib

from elbowroom.capture.joint_graph import Captured


def fingerprint(captured: Captured) -> str:
    digest = hashlib.sha256()
    for op in captured.graph.ops:
        digest.update(f"{op.key}|{op.kind}|{op.reads}\n".encode())
    digest.update(f"{captured.forward_outputs}{captured.backward_outputs}{captured.device.type}".encode())
    return digest.hexdigest()[:32]
