"""Where `offload-best` takes more than 1.2 × LB on chains of 001 ch. 3 and 4: how much of that no schedule avoids.

    python benchmarks/papers/offloading_proofs.py [--seconds 120] [--again] [--stored]

LB counts seconds of the computation and of the link and does not see that one waits for the other, so a schedule
near it need not exist. At every such point of a chain of up to 20 stages the integer program of `offload-milp` is
asked what no schedule is below that computes everything once; the method itself takes 16 stages at most, because it
has seconds and not minutes. What is proven is stored and belongs to the chains and to the time of `offload-best` that
it was asked for. The points are those that offloading.py has asked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from answers import Answers, digest, path_there
from chain_files import RESULTS
from offloading import ANSWERS
from offloading_points import ALPHAS, DIVISORS, LIMITS, LINKS, Case, Point, Study
from rich.progress import track
from tables import markdown, percent, ratio

from elbowroom.solve.offload.offload_program import Program

PROOFS = RESULTS / "paper-001-offloading-proofs.json"
BEST, OTHERS = "offload-best", ("persistent", "combined")
MUCH = 1.2
LONGEST = 20  # stages
SAME = 1e-5  # answers are stored with six digits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="the time limit of one program")
    parser.add_argument("--again", action="store_true", help="ask also what is stored")
    parser.add_argument("--stored", action="store_true", help="ask nothing, show what is there")
    options = parser.parse_args()
    study = Study(Answers.load(ANSWERS, path_there()))
    proofs = Proofs.load(PROOFS, study.chains)
    if not options.stored:
        proofs.ask(study, options.seconds, options.again)
    print(f"{summary(study, proofs)}\n\n{table(study, proofs)}")
    return 0


@dataclass
class Proofs:
    """What no schedule is below, by the question that `offload-best` answered."""

    path: Path
    chains: Path
    known: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, chains: Path) -> Proofs:
        found = cls(path, chains)
        if path.exists() and (data := json.loads(path.read_text()))["chains"] == digest(chains):
            found.known = data["proofs"]
        return found

    def save(self) -> None:
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(proof)}" for key, proof in sorted(self.known.items()))
        self.path.write_text(f'{{"chains": {json.dumps(digest(self.chains))}, "proofs": {{\n{lines}\n}}}}\n')

    def of(self, study: Study, point: Point) -> float | None:
        """Seconds, or None if nothing is known for the schedule that `offload-best` has now."""
        answer, proof = study.answer(point, BEST), self.known.get(study.question(point, BEST).key)
        return None if proof is None or answer is None or proof["best_s"] != answer.time else proof["bound_s"]

    def ask(self, study: Study, seconds: float, again: bool) -> None:
        points = [(case, point) for case, point in slow_points(study) if len(case.saved.chain) <= LONGEST]
        self.known = {key: self.known[key] for _, p in points if (key := study.question(p, BEST).key) in self.known}
        for case, point in track([e for e in points if again or self.of(study, e[1]) is None], "what is proven"):
            best_s = _seconds(study, point, BEST)
            assert best_s is not None
            started = time.perf_counter()
            program = Program(case.saved.chain, point.budget, study.platform(point.link), best_s * (1 + SAME))
            bound_s = min(best_s, max(study.bound(point), program.fastest(seconds).bound))  # it may know nothing yet
            self.known[study.question(point, BEST).key] = {
                "best_s": best_s,
                "bound_s": float(f"{bound_s:.6g}"),
                "seconds": float(f"{time.perf_counter() - started:.3g}"),
            }
            self.save()


def all_points(study: Study) -> Iterator[tuple[Case, Point]]:
    """Those at which `offload-best` was asked, each once."""
    seen = set()
    for case in study.cases():
        points = list(case.limits(LIMITS))
        if case in study.cases(sides=(500,)):
            points += [*case.alphas(ALPHAS), *case.faster_links(LINKS)]
            points += [point for link in study.divisor_links() for point in case.divided(DIVISORS, link)]
        for point in points:
            key = study.question(point, BEST).key
            if key not in seen and study.answer(point, BEST) is not None:
                seen.add(key)
                yield case, point


def slow_points(study: Study) -> Iterator[tuple[Case, Point]]:
    for case, point in all_points(study):
        time_s = _seconds(study, point, BEST)
        if time_s is not None and time_s > MUCH * study.bound(point):
            yield case, point


def _seconds(study: Study, point: Point, method: str) -> float | None:
    answer = study.answer(point, method)
    return None if answer is None else answer.time


# --- what docs/papers.md has ---------------------------------------------------------------------------------


def summary(study: Study, proofs: Proofs) -> str:
    asked = list(all_points(study))
    fitting = sum(_seconds(study, point, BEST) is not None for _, point in asked)
    slow = [point for _, point in slow_points(study)]
    known = [(proven, point) for point in slow if (proven := proofs.of(study, point)) is not None]
    above = sum(proven > MUCH * study.bound(point) for proven, point in known)
    fastest = sum((_seconds(study, point, BEST) or 0) <= proven * (1 + 2 * SAME) for proven, point in known)
    return (
        f"`{BEST}` was asked at {len(asked)} points of chapters 3 and 4 and has a schedule at {fitting}. It takes "
        f"more than {MUCH} × LB at {len(slow)} of them. The integer program was asked at {len(known)} of these: at "
        f"{above} it proves that no schedule that only offloads is within {MUCH} × LB, and at {fastest} that none is "
        f"faster than `{BEST}`."
    )


def table(study: Study, proofs: Proofs) -> str:
    rows = []
    for case, point in slow_points(study):
        bound, best = study.bound(point), _seconds(study, point, BEST)
        assert best is not None
        proven = proofs.of(study, point)
        cells = [_link(point), f"{point.budget / 2**30:.2f}", percent(point.budget / case.peak), ratio(best / bound)]
        cells.append("not asked" if proven is None else ratio(proven / bound))
        cells.append("–" if proven is None else percent(best / proven - 1, 1))
        others = [_seconds(study, point, method) for method in OTHERS]
        cells += [ratio(None if other is None else other / bound) for other in others]
        rows.append([f"{case.setting.network}, {case.setting.side}²", *cells])
    header = ["÷ LB", "link", "GiB", "of the peak", BEST, "no schedule below", "best above that", *OTHERS]
    return markdown(header, rows)


def _link(point: Point) -> str:
    return f"{point.link:g} β" if point.link else "measured"


if __name__ == "__main__":
    sys.exit(main())
