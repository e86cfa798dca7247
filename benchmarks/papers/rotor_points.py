"""What chapter 2's figures ask of chains: everything saved, segments, revolve, the optimum, Checkmate's rounding."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from answers import Answer, Answers, Question, chain_file, chain_of
from checkmate import MOST_NODES, checkmate
from rich.progress import track
from vision_settings import CHAPTER_2, Setting

from elbowroom.problem import Chain

SLOTS = 500
LIMITS = 10
CARD_BYTES = 15.75 * 2**30
LONGEST_FLOATING = 110  # stages: its tables grow with the fourth power
PLAIN, OPTIMAL, REVOLVE, SEQUENTIAL, CHECKMATE = "store-all", "persistent", "revolve", "sequential", "checkmate"


@dataclass(frozen=True)
class Run:
    """One point of a plot."""

    how: str
    peak_bytes: int
    images_per_s: float


class Curves:
    """The points of all curves of the settings chosen, from stored answers."""

    def __init__(self, answers: Answers, settings: Sequence[Setting]) -> None:
        self.answers = answers
        self.file = chain_file(answers.chains)
        self.settings = [setting for setting in settings if setting.name in self.file.chains]

    def chain(self, setting: Setting) -> Chain:
        return chain_of(str(self.answers.chains), setting.name)

    def plain(self, setting: Setting) -> Question:
        return Question(setting.name, PLAIN, None)

    def segmented(self, setting: Setting) -> list[Question]:
        """Ten numbers of segments, from 2 to 2√L."""
        stages = len(self.chain(setting)) - 1
        most = max(2, min(stages, round(2 * math.sqrt(stages))))
        counts = sorted({round(2 + k * (most - 2) / 9) for k in range(10)})
        return [Question(setting.name, SEQUENTIAL, None, segments=k) for k in counts]

    def limited(self, setting: Setting, method: str, slots: int | None = SLOTS) -> list[Question]:
        """Ten limits, equally far apart, up to the memory of the plain run; or the card's, where that is less."""
        plain = self.answers[self.plain(setting)]
        assert plain is not None, "asked first"
        most = min(plain.peak_bytes, int(CARD_BYTES))
        budgets = [most * k // LIMITS for k in range(1, LIMITS + 1)]
        return [Question(setting.name, method, budget, slots=slots) for budget in budgets]

    def at_best_segments(self, setting: Setting) -> Question | None:
        """The optimum within the memory of the fastest segments that the thesis' card holds."""
        best = self.best_segments(setting)
        return best and Question(setting.name, OPTIMAL, best.peak_bytes, slots=SLOTS)

    def best_segments(self, setting: Setting) -> Answer | None:
        found = [answer for q in self.segmented(setting) if (answer := self.answers[q]) is not None]
        fitting = [answer for answer in found if answer.peak_bytes <= CARD_BYTES]
        return min(fitting, key=lambda answer: (answer.time, answer.peak_bytes), default=None)

    def ask(self, jobs: int, again: Sequence[str]) -> None:
        first = [q for each in self.settings for q in (self.plain(each), *self.segmented(each))]
        self.answers.ask(first, "plain, sequential", jobs, again)
        second = [q for each in self.settings for m in (OPTIMAL, REVOLVE) for q in self.limited(each, m)]
        second += [q for each in self.settings if (q := self.at_best_segments(each)) is not None]
        self.answers.ask(second, "optimal, revolve", jobs, again)
        short = [each for each in self.settings if len(self.chain(each)) <= LONGEST_FLOATING]
        timed = [self.limited(each, "floating")[k] for each in short for k in (2, 5, 8)]
        self.answers.ask(timed, "floating (Fig. 2.4)", 1, again)
        self._round(again)

    def _round(self, again: Sequence[str]) -> None:
        """Checkmate is no method of ours, so its answers are made here."""
        asked = [q for each in self.rounded() for q in self.limited(each, CHECKMATE, None)]
        self.answers.asked |= {q.key for q in asked}
        todo = [q for q in asked if self.answers[q] is None or CHECKMATE in again]
        for q in track(todo, "Checkmate's rounding"):
            started = time.perf_counter()
            found = checkmate(chain_of(str(self.answers.chains), q.chain), q.budget or 0)
            seconds = float(f"{time.perf_counter() - started:.3g}")
            finished, peak = found or (None, 0)
            self.answers.known[q.key] = Answer(finished, peak, 0, seconds)
            self.answers.save()

    def rounded(self) -> list[Setting]:
        """Not on Inception, as in the thesis, and only where the program is not too large."""
        chosen = [each for each in self.settings if each.network != "inception_v3"]
        return [each for each in chosen if len(self.chain(each)) <= MOST_NODES]

    def runs(self, setting: Setting) -> Iterator[Run]:
        groups = {PLAIN: [self.plain(setting)], SEQUENTIAL: self.segmented(setting)}
        if self.answers[groups[PLAIN][0]] is None:
            return
        groups |= {method: self.limited(setting, method) for method in (OPTIMAL, REVOLVE)}
        groups[CHECKMATE] = self.limited(setting, CHECKMATE, None)
        for how, questions in groups.items():
            for question in questions:
                answer = self.answers[question]
                if answer is not None and answer.time is not None:
                    yield Run(how, answer.peak_bytes, setting.batch / answer.time)

    def gain(self, setting: Setting) -> tuple[Answer, float] | None:
        """The fastest segments that fit the card, and how much faster the optimum is with their memory."""
        best, question = self.best_segments(setting), self.at_best_segments(setting)
        ours = self.answers[question] if question else None
        if best is None or ours is None or best.time is None or ours.time is None:
            return None
        return best, best.time / ours.time - 1

    def solving(self) -> Iterator[tuple[int, float, float, float]]:
        """Stages, seconds of both algorithms, and the largest difference between the times of their schedules."""
        for setting in self.settings:
            pairs = []
            for k in (2, 5, 8):
                ours = [self.answers[self.limited(setting, method)[k]] for method in (OPTIMAL, "floating")]
                if None not in ours:
                    pairs.append(ours)
            stages = len(self.chain(setting))
            if pairs:
                gaps = [abs(a.time / b.time - 1) for a, b in pairs if a.time and b.time]
                yield stages, max(a.seconds for a, _ in pairs), max(b.seconds for _, b in pairs), max(gaps, default=0)
            else:
                alone = [self.answers[q] for q in self.limited(setting, OPTIMAL)]
                yield stages, max((a.seconds for a in alone if a), default=math.nan), math.nan, math.nan


def settings_of(networks: Sequence[str]) -> list[Setting]:
    return [setting for setting in CHAPTER_2 if setting.network in networks]
