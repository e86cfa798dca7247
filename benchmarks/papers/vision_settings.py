"""Which networks, images and batches the figures of 001 ch. 2–4 have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """A network with the side of its images and the batch."""

    network: str
    side: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.network} {self.side} {self.batch}"

    @classmethod
    def named(cls, name: str) -> Setting:
        network, side, batch = name.split()
        return cls(network, int(side), int(batch))


RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
DENSENETS = ("densenet121", "densenet161", "densenet169", "densenet201")
BATCHES = {224: 32, 500: 16, 1000: 8}
"""By the side of the images: what Fig. 3.5 has at 224² and 500², and the largest batch of Fig. 2.5 at 1000²."""

CHAPTER_3 = [
    Setting(network, side, batch)
    for network in (*RESNETS, *DENSENETS, "inception_v3")
    for side, batch in BATCHES.items()
]
CHAPTER_2 = [
    *CHAPTER_3,
    *(Setting("resnet101", 1000, batch) for batch in (1, 2, 4)),
    *(Setting("resnet200", side, batch) for side, batch in BATCHES.items()),
    *(Setting("resnet1001", 224, batch) for batch in (1, 2, 4, 8)),
    *(Setting("resnet1001", side, 1) for side in (500, 1000)),
]
TINY = [Setting("tiny", 32, 4), Setting("tiny", 64, 2)]
