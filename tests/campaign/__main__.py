"""`python -m campaign --runs 5000 --jobs 2 --seed 0`: many cases, a table of what failed, status 1 if any did."""

from __future__ import annotations

import argparse
import collections
import itertools
import math
import sys
import threading
import time
from pathlib import Path

from campaign.cases import Case, random_case
from campaign.shrink import shrink, write_script
from campaign.working import Result, Worker


def main() -> int:
    options = arguments()
    cases = [
        random_case(seed, options.kernels, options.device, tuple(options.tolerate))
        for seed in range(options.seed, options.seed + options.runs)
    ]
    campaign = Campaign(cases, options.limit, options.minutes, sys.stdout.isatty())
    campaign.run(options.jobs)
    print(campaign.table())
    for failed in campaign.by_kind().values():
        for case, result in failed[: options.shrink]:
            report(case, result, options)
    return int(bool(campaign.failed))


def report(case: Case, result: Result, options: argparse.Namespace) -> None:
    """Make a failure smaller and write it down. One that needs the cases before it fails in no process of its own."""
    worker = Worker(options.limit)
    alone = worker.judge(case)
    if alone.kind == result.kind:
        case, result = shrink(case, result, worker, options.patience)
    worker.end()
    path = write_script(case, result, Path(options.out))
    note = "" if alone.kind == result.kind else " (only after other cases in the same process)"
    print(f"{path}: {result}{note}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="campaign", description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--kernels", choices=["torch", "inductor"], default="torch")
    parser.add_argument("--out", default="build/campaign", help="folder for scripts of failures")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one case")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no case is begun later than that")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds for making one failure smaller")
    parser.add_argument("--shrink", type=int, default=1, help="failures of each kind that are made smaller")
    parser.add_argument("--tolerate", action="append", default=[], help="beginning of a kind of failure to look past")
    return parser.parse_args()


class Campaign:
    """Cases handed out to workers, and what became of them."""

    def __init__(self, cases: list[Case], limit_s: float, minutes: float, shows: bool) -> None:
        self.cases, self.limit_s, self.shows = cases, limit_s, shows
        self.ahead = iter(cases)
        self.lock = threading.Lock()
        self.failed: list[tuple[Case, Result]] = []
        self.done = self.rounded = 0
        self.began = time.perf_counter()
        self.end = self.began + 60 * minutes

    def run(self, jobs: int) -> None:
        threads = [threading.Thread(target=self._drive) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _drive(self) -> None:
        worker = Worker(self.limit_s)
        while True:
            with self.lock:
                case = next(self.ahead, None) if time.perf_counter() < self.end else None
            if case is None:
                break
            result = worker.judge(case)
            with self.lock:
                self._note(case, result)
        worker.end()

    def _note(self, case: Case, result: Result) -> None:
        self.done += 1
        self.rounded += result.rounded
        if result.failures:
            self.failed.append((case, result))
            print(f"\rseed {case.seed}: {result}" if self.shows else f"seed {case.seed}: {result}", flush=True)
        rate = (time.perf_counter() - self.began) / self.done
        line = f"{self.done} of {len(self.cases)}, {len(self.failed)} failed, {rate:.2f} s a case"
        if self.shows:
            print(f"\r{line}", end="", flush=True)
        elif self.done % 25 == 0:
            print(line, flush=True)

    def by_kind(self) -> dict[str, list[tuple[Case, Result]]]:
        kinds = collections.defaultdict(list)
        for case, result in sorted(self.failed, key=lambda each: each[0].seed):
            kinds[result.kind].append((case, result))
        return dict(sorted(kinds.items(), key=lambda each: -len(each[1])))

    def table(self) -> str:
        lines = [
            f"\n{self.done} cases, {len(self.failed)} failed; {self.rounded} had bits rounded otherwise than plainly"
        ]
        for kind, failed in self.by_kind().items():
            seeds = ", ".join(str(case.seed) for case, _ in itertools.islice(failed, 8))
            lines.append(f"{len(failed):6}  {kind}  (seeds {seeds}{', …' if len(failed) > 8 else ''})")
        return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
