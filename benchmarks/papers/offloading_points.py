"""What the figures of 001 ch. 3 and 4 ask: chains, memory limits, links, methods; and what came out at each point."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from answers import Answer, Answers, Question, chain_file, chain_of, turns
from chain_files import seconds_of, thesis_link
from vision_settings import BATCHES, DENSENETS, RESNETS, Setting

from elbowroom.problem import Platform
from elbowroom.solve import METHODS, Options
from elbowroom.solve.offload.limits import SavedChain, bound_time

OFFLOADING = ("vdnn", "tflms", "autoswap", "offload-greedy", "offload-dynprog", "offload-best")
RECOMPUTING = ("persistent",)
BOTH = ("pofo", "autocapper", "opportunist", "combined")
MOVING = (*OFFLOADING, *BOTH)
CHAPTER_4 = (*BOTH, "offload-dynprog", "offload-best", *RECOMPUTING)
SLOTS = 500  # of persistent, as in the thesis

LIMITS = tuple(k / 10 for k in range(11))  # shares of the way from the least budget to the peak
FASTER = (1.0, 2.0, 3.0)  # links of Fig. 3.6, in multiples of the thesis'
ALPHAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)
ALPHA, LINKS = 0.2, (1.0, 1.5, 2.0, 2.5, 3.0)  # Fig. 4.3: 12 to 36 GB/s
DIVISORS = (3, 4, 5, 6, 8)
REPRESENTATIVE = ("resnet34", "resnet101", "densenet121", "densenet201", "inception_v3")
NETWORKS = (*RESNETS, *DENSENETS, "inception_v3")


@dataclass(frozen=True)
class Point:
    """One place on the horizontal axis of a figure. `link` is a multiple of the thesis' link, or 0 for the measured
    one; `x` is what the axis has."""

    setting: Setting
    x: float
    budget: int
    link: float = 1.0


@dataclass(frozen=True)
class Case:
    """A chain with its limits."""

    chains: Path
    setting: Setting

    @cached_property
    def saved(self) -> SavedChain:
        return SavedChain.own(chain_of(str(self.chains), self.setting.name))

    @cached_property
    def once(self) -> float:
        """Seconds without any memory limit."""
        return seconds_of(self.saved.chain)

    @property
    def peak(self) -> int:
        return self.saved.peak_bytes

    @cached_property
    def offload_least(self) -> int:
        return self.saved.least_bytes(Platform(bandwidth=1.0))

    @cached_property
    def recompute_least(self) -> int:
        """M_low: what remains if everything is computed again from the input; no schedule that moves nothing needs
        less."""
        return METHODS["persistent"].least_budget(self.saved.chain, Options())

    def limits(self, shares: Sequence[float]) -> Iterator[Point]:
        """Chapter 3: from the least budget of offloading to the peak."""
        for share in shares:
            yield Point(self.setting, share, round(self.offload_least + share * (self.peak - self.offload_least)))

    def alphas(self, shares: Sequence[float], link: float = 1.0) -> Iterator[Point]:
        """Chapter 4: from the least budget of recomputation to the peak."""
        for share in shares:
            budget = round((1 - share) * self.recompute_least + share * self.peak)
            yield Point(self.setting, share, budget, link)

    def faster_links(self, links: Sequence[float]) -> Iterator[Point]:
        (point,) = self.alphas([ALPHA])
        for link in links:
            yield Point(self.setting, link, point.budget, link)

    def divided(self, divisors: Sequence[int], link: float) -> Iterator[Point]:
        for divisor in divisors:
            yield Point(self.setting, divisor, self.peak // divisor, link)


class Study:
    """All points of the two chapters that were chosen, and their answers."""

    def __init__(
        self, answers: Answers, networks: Sequence[str] = NETWORKS, sides: Sequence[int] = tuple(BATCHES)
    ) -> None:
        self.answers, self.chains = answers, answers.chains
        self.file = chain_file(self.chains)
        self.networks = [network for network in NETWORKS if network in networks]
        self.sides = [side for side in BATCHES if side in sides]
        self.rate = thesis_link(self.file)
        self._cases: dict[Setting, Case] = {}

    def case(self, network: str, side: int) -> Case:
        setting = Setting(network, side, BATCHES[side])
        return self._cases.setdefault(setting, Case(self.chains, setting))

    def cases(self, networks: Sequence[str] = NETWORKS, sides: Sequence[int] = tuple(BATCHES)) -> list[Case]:
        chosen = [(n, s) for s in sides if s in self.sides for n in networks if n in self.networks]
        return [self.case(network, side) for network, side in chosen if self._has(network, side)]

    def _has(self, network: str, side: int) -> bool:
        return Setting(network, side, BATCHES[side]).name in self.file.chains

    def rates(self, link: float) -> tuple[float, float, float]:
        if link:
            return turns(link * self.rate)
        measured = self.file.link
        return measured["to_host"], measured["from_host"], measured["both"]

    def platform(self, link: float) -> Platform:
        to_host, from_host, duplex = self.rates(link)
        return Platform(to_host=to_host, from_host=from_host, duplex=duplex)

    def question(self, point: Point, method: str) -> Question:
        link = self.rates(point.link) if method in MOVING else None
        slots = SLOTS if method in RECOMPUTING else None
        return Question(point.setting.name, method, point.budget, link, slots=slots)

    def answer(self, point: Point, method: str) -> Answer | None:
        return self.answers[self.question(point, method)]

    def bound(self, point: Point) -> float:
        """LB."""
        case = self.case(point.setting.network, point.setting.side)
        return bound_time(case.saved.chain, point.budget, self.platform(point.link))

    def divisor_links(self) -> list[float]:
        return [1.0, 0.0] if self.file.link else [1.0]

    def questions(self, chapters: Sequence[int]) -> dict[str, list[Question]]:
        """By what is asked, in words."""
        asked: dict[str, list[Question]] = {}
        if 3 in chapters:
            points = [point for case in self.cases() for point in case.limits(LIMITS)]
            asked["3.5, 3.7–3.20"] = self._pairs(points, (*OFFLOADING, *RECOMPUTING))
            points = [
                Point(point.setting, point.x, point.budget, link)
                for case in self.cases(REPRESENTATIVE, (224, 500))
                for point in case.limits(LIMITS)
                for link in FASTER[1:]
            ]
            asked["3.6"] = self._pairs(points, ("offload-greedy", "offload-dynprog"))
        if 4 in chapters:
            cases = self.cases(sides=(500,))
            ways = {
                "4.2, 4.4": lambda case: case.alphas(ALPHAS),
                "4.3, 4.5": lambda case: case.faster_links(LINKS),
                "activations divided": partial(self._divided),
            }
            for what, points_of in ways.items():
                asked[what] = self._pairs([point for case in cases for point in points_of(case)], CHAPTER_4)
        return asked

    def _divided(self, case: Case) -> Iterator[Point]:
        for link in self.divisor_links():
            yield from case.divided(DIVISORS, link)

    def _pairs(self, points: Sequence[Point], methods: Sequence[str]) -> list[Question]:
        return [self.question(point, method) for method in methods for point in points]
