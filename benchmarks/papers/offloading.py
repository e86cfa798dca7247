"""Fig. 3.5–3.20 and 4.2–4.5 of paper 001: offloading, and offloading with recomputation, on chains of ten networks.

    python benchmarks/papers/offloading.py [--chapters 3 4] [--networks resnet50 …] [--sides 224 500 1000]
                                           [--methods METHOD …] [--again METHOD …] [--stored]
                                           [--plot-dir DIR]

The chains are those measured on an H200, if `measured_chains.py` has stored them, or else estimated for a V100 by
`estimated_chains.py`; every plot says which. Their link is the thesis': 12.2 GB/s, one transfer at a time. What
matters is how fast the link is beside the computation, so measured chains, which are from a faster device, get a link
that is faster by the same factor: the median, over all chains, of what a V100 is estimated to take and what was
measured. Where the host link was measured, the table of divided activations is made for it, too.

The referee grades every schedule in the model called int, in which a value's memory is free only when all of it has
gone. LB is the bound of Prop. 3. Answers are kept in the results; `--stored` asks nothing and shows what is there,
`--again` asks the methods named once more, and what is kept of an interrupted run is not asked twice. A method that
is not there yet is left out with a note.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from answers import Answers, jobs_there, path_there
from chain_files import RESULTS
from offloading_plots import save_plots
from offloading_points import NETWORKS, Study
from offloading_tables import tables
from vision_settings import BATCHES, CHAPTER_3

ANSWERS = RESULTS / "paper-001-offloading.json"


def main() -> int:
    options = parse()
    answers = Answers.load(options.answers, path_there())
    study = Study(answers, options.networks, options.sides)
    if not options.stored:
        for what, questions in study.questions(options.chapters).items():
            chosen = [q for q in questions if not options.methods or q.method in options.methods]
            answers.ask(chosen, what, options.jobs, options.again)
        if len(study.cases()) == len(CHAPTER_3) and len(set(options.chapters)) == 2 and not options.methods:
            answers.forget_others()
    print(f"Chains {study.file.kind}: {study.file.device}; link {study.rate / 1e9:.1f} GB/s.\n")
    for name, table in tables(study, options.chapters).items():
        print(f"Fig. {name}\n\n{table}\n" if name[0].isdigit() else f"{name}\n\n{table}\n")
    if options.plot_dir:
        save_plots(study, options.plot_dir, options.chapters)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chapters", nargs="+", type=int, choices=(3, 4), default=[3, 4])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--sides", nargs="+", type=int, choices=list(BATCHES), default=list(BATCHES))
    parser.add_argument("--answers", type=Path, default=ANSWERS, metavar="FILE", help=f"default: {ANSWERS}")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="ask only these; the others are as stored")
    parser.add_argument("--again", nargs="+", default=[], metavar="METHOD", help="ask these once more")
    parser.add_argument("--stored", action="store_true", help="ask nothing, show what is there")
    parser.add_argument("--jobs", type=int, default=jobs_there(), help="processes (default: one a core)")
    parser.add_argument("--plot-dir", type=Path, metavar="DIR", help="also save plots here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
