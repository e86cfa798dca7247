"""Lanes whose copies happen later, as those of a GPU do, and lanes that fail."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from random import Random

import torch

from elbowroom.execute.to_host.lanes import AtOnce, Lane, Lanes


class Delayed(Lane):
    """Copies one after the other in a thread, each after a moment. What is copied to is full of junk until then."""

    def __init__(self, rng, most_s=0.005):
        self._rng, self._most_s = rng, most_s
        self._thread = ThreadPoolExecutor(1)

    def copy(self, target, source):
        target.fill_(255)
        delay_s, pair = self._rng.uniform(0, self._most_s), [target, source]

        def late():
            time.sleep(delay_s)
            pair[0].copy_(pair[1])

        copied = self._thread.submit(late)

        def wait():
            copied.result()
            pair.clear()  # here, where it is counted, and not when the thread forgets them

        return wait


class Failing(AtOnce):
    """Raises an error at one copy."""

    def __init__(self, at, error):
        self.left, self.error = at, error

    def copy(self, target: torch.Tensor, source: torch.Tensor):
        self.left -= 1
        if self.left == 0:
            raise self.error
        return super().copy(target, source)


def delayed_lanes(seed, most_s=0.005):
    return Lanes(Delayed(Random(seed), most_s), Delayed(Random(seed + 1), most_s))
