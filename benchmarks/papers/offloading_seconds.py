"""Seconds that `pofo` and `combined` take to plan a chain of a hundred stages, on the machine that this runs on.

    python benchmarks/papers/offloading_seconds.py [--measure] [--stages 100 105]

The chain is DenseNet-201's with images of 500² and the thesis' link, as in 001 ch. 4; of its 105 stages, the first 99
and the loss are 100. Everything that is compiled is compiled before. Seconds of the clock depend on what else the
machine does, so the processor's are told, too, and how many processes wanted to run in the last minute.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from answers import Answers, path_there
from chain_files import RESULTS
from offloading import ANSWERS
from offloading_points import Study
from tables import markdown

from elbowroom.problem import Chain, Platform
from elbowroom.solve import solve

STORED = RESULTS / "paper-001-offloading-seconds.json"
NETWORK, SIDE, STAGES = "densenet201", 500, (100, 105)
METHODS, ALPHAS = ("pofo", "combined"), (0.2, 0.5, 0.75)
WARM_UP = 8  # stages of a chain with which everything is compiled


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="measure, and store what is found")
    parser.add_argument("--stages", type=int, nargs="+", default=list(STAGES))
    parser.add_argument("--json", type=Path, default=STORED, metavar="FILE", help=f"default: {STORED}")
    options = parser.parse_args()
    if options.measure:
        measure(options.stages, options.json)
    elif not options.json.exists():
        print("offloading_seconds: nothing is stored yet; --measure", file=sys.stderr)
        return 2
    print(table(json.loads(options.json.read_text())["rows"]))
    return 0


def measure(counts: Sequence[int], path: Path) -> None:
    study = Study(Answers.load(ANSWERS, path_there()))
    case, platform = study.case(NETWORK, SIDE), study.platform(1.0)
    whole = case.saved.chain
    for method in METHODS:
        timed(shortened(whole, WARM_UP), case.peak, method, platform, 0.5)
    rows: list[dict[str, Any]] = []
    for count in counts:
        for method in METHODS:
            for alpha in ALPHAS:
                rows.append(timed(shortened(whole, count), case.peak, method, platform, alpha))
                lines = ",\n".join(map(json.dumps, rows))
                path.write_text(f'{{"cores": {os.cpu_count()}, "rows": [\n{lines}\n]}}\n')


def shortened(chain: Chain, count: int) -> Chain:
    """Its first stages and its loss."""
    return replace(chain, stages=(*chain.stages[: count - 1], chain.stages[-1]))


def timed(chain: Chain, peak: int, method: str, platform: Platform, alpha: float) -> dict[str, Any]:
    least = solve(chain, peak, "persistent", slots=1).least_budget or 0
    most = solve(chain, None, "store-all").peak_bytes
    budget = round((1 - alpha) * least + alpha * most)
    started, computed = time.perf_counter(), time.process_time()
    result = solve(chain, budget, method, platform=platform)
    seconds = {"seconds": time.perf_counter() - started, "processor_s": time.process_time() - computed}
    found = {"stages": len(chain), "method": method, "alpha": alpha, "levels": result.notes.get("levels")}
    return {**found, **{name: float(f"{value:.3g}") for name, value in seconds.items()}, "load": os.getloadavg()[0]}


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        method = row["method"] if row["levels"] is None else f"{row['method']}, {row['levels']} levels"
        seconds = [f"{row[name]:.1f}" for name in ("seconds", "processor_s", "load")]
        lines.append([method, row["stages"], f"{row['alpha']:g}", *seconds])
    return markdown(["method", "stages", "α", "seconds", "of the processor", "load"], lines)


if __name__ == "__main__":
    sys.exit(main())
