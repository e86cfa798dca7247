"""Programs, predictions and emitted sources of the zoo's networks are what they were, byte for byte."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from snapshots import QUICK, STORED, digests, versions
from zoo import ZOO

NETWORKS = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in ZOO if name not in QUICK)]


@pytest.mark.parametrize("fused", [False, True], ids=["torch", "inductor"])
@pytest.mark.parametrize("name", NETWORKS)
def test_nothing_has_changed(name, fused):
    stored = json.loads(STORED.read_text())
    if stored["versions"] != versions():
        pytest.skip(f"stored with {stored['versions']}, and these are {versions()}")
    found = digests(name, fused=fused)
    expected = stored["digests"][f"{name} {fused}"]
    assert {key for key in expected if found[key] != expected[key]} == set()
