"""docs/papers.md from page.md: every `{{name}}` there becomes a table or a sentence, made of stored results.

    python benchmarks/papers/page.py [--into docs/papers.md]

Nothing is computed here that is not in the results: what has no result yet says so, and a figure that was not drawn
is left out.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import offloading
import offloading_proofs
import offloading_seconds
import offloading_tables
import rotor
import selection_phases
from answers import Answers, path_there
from chain_files import ESTIMATED, RESULTS, V100_LINK, ChainFile, speed_ratios
from offloading_points import Study
from rotor_points import Curves
from tables import fewer_colours, markdown, percent
from vision_settings import CHAPTER_2

ROOT = Path(__file__).parents[2]
TEMPLATE = Path(__file__).with_name("page.md")
NOT_YET = "*Not yet measured.*"
MIB = 2**20
LARGE_BYTES = 60_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "papers.md", metavar="FILE")
    options = parser.parse_args()
    options.into.write_text(page(TEMPLATE.read_text(), options.into.parent))
    print(f"written: {options.into}")
    return 0


def page(template: str, folder: Path) -> str:
    """The template with everything filled in. Pictures that are not in the folder are left out."""
    parts = dict(fragments())
    unknown = set(re.findall(r"\{\{(.+?)\}\}", template)) - set(parts) - {"offloading divided, measured link"}
    assert not unknown, f"page.md asks for {unknown}"
    filled = re.sub(r"\{\{(.+?)\}\}", lambda found: parts.get(found[1], ""), template)
    lines = [line for line in filled.splitlines() if _is_there(line, folder)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _is_there(line: str, folder: Path) -> bool:
    """Whether a line's picture, if it has one, has been drawn; it is made smaller if it is large."""
    found = re.fullmatch(r"!\[.*\]\((.+)\)", line)
    if found is None:
        return True
    picture = folder / found[1]
    if picture.exists() and picture.stat().st_size > LARGE_BYTES:
        fewer_colours(picture)
    return picture.exists()


def fragments() -> Iterator[tuple[str, str]]:
    chains = path_there()
    study = Study(Answers.load(offloading.ANSWERS, chains))
    curves = Curves(Answers.load(rotor.ANSWERS, chains), CHAPTER_2)
    yield "chains", about_chains(study.file)
    yield "link", about_link(study)
    for name, table in offloading_tables.tables(study, (3, 4)).items():
        yield f"offloading {name}", table
    proofs = offloading_proofs.Proofs.load(offloading_proofs.PROOFS, chains)
    yield "offloading above, in words", offloading_proofs.summary(study, proofs)
    yield "offloading above", offloading_proofs.table(study, proofs)
    yield "offloading seconds", stored("paper-001-offloading-seconds.json", offloading_seconds.table)
    for name, table in rotor.tables(curves).items():
        yield f"rotor {name}", table
    yield "rotor runs", stored("paper-001-rotor-h200.json", _runs)
    yield "rotor runs, in words", stored("paper-001-rotor-h200.json", _runs_in_words)
    yield "batches", stored("paper-002-batches-h200.json", _batches)
    for figures in (("7", "1.8"), ("8", "1.9"), ("9",)):
        yield f"claims {figures[0]}", claims(figures)
    yield "lower sets", stored("paper-002.json", lower_sets)
    yield "selection", stored("paper-003-h200.json", selection)
    yield "phases", selection_phases.table(selection_phases.figures())


def stored(name: str, table: Callable[[list[dict[str, Any]]], str]) -> str:
    path = RESULTS / name
    return table(json.loads(path.read_text())["rows"]) if path.exists() else NOT_YET


def _runs(rows: list[dict[str, Any]]) -> str:
    from rotor_runs import table

    return table(rows)


def _runs_in_words(rows: list[dict[str, Any]]) -> str:
    from rotor_runs import in_words

    return in_words(rows)


def _batches(rows: list[dict[str, Any]]) -> str:
    from batch_sizes import how_many, table

    return f"{how_many(rows)}\n\n{table(rows)}"


# --- words ---------------------------------------------------------------------------------------------------


def about_chains(found: ChainFile) -> str:
    if found.kind == "measured":
        to_host, from_host, both = (found.link[name] / 1e9 for name in ("to_host", "from_host", "both"))
        return (
            f"**Chains of 001 are measured**: stage by stage on one {found.device}, float32 without TF32, by "
            f"`measured_chains.py`, while the device and not the host set the pace. The thesis measured a V100 of "
            f"16 GB. The host link of the {found.device} carries {to_host:.1f} GB/s to the host, {from_host:.1f} "
            f"from it, and {both:.1f} each way if both are used. Schedules of these chains are simulated by the "
            "referee; what was run says so. Bytes are the allocator's, without weights and their gradients."
        )
    return (
        "**Chains of 001 are estimated, not measured**: bytes are those of eager PyTorch's tensors, times a roofline "
        "of a V100, by `estimated_chains.py`. Of 15.7 TFLOP/s and 900 GB/s it reaches 85 and 80 %, chosen so that "
        f"two figures of the thesis come out: {_anchors()}. A roofline knows nothing of layers too narrow to fill a "
        "card, so DenseNets are probably faster here than they were there, and the link beside them seems slower. As "
        "soon as `measured_chains.py` has stored chains of an H200, everything here is made of those. Schedules are "
        "simulated by the referee either way."
    )


def _anchors() -> str:
    found = ChainFile.load(ESTIMATED)

    def images(name: str) -> float:
        chain = found.chain(name)
        return int(name.split()[-1]) / sum(stage.forward_time + stage.backward_time for stage in chain.stages)

    return (
        f"{images('resnet1001 224 8'):.2f} images/s of ResNet-1001 with batch 8 and everything saved (paper 1.18), "
        f"and {images('resnet101 1000 8'):.2f} of ResNet-101 with batch 8 at 1000² without recomputation (paper 9.77 "
        "with some)"
    )


def about_link(study: Study) -> str:
    if study.file.kind == "estimated":
        return f"The link is the thesis': {V100_LINK / 1e9:.1f} GB/s, one transfer at a time."
    ratios = speed_ratios(study.file)
    return (
        f"The thesis' link carries {V100_LINK / 1e9:.1f} GB/s, one transfer at a time, beside a V100. The device "
        f"here computes faster, so its link is made faster by the same factor, to {study.rate / 1e9:.1f} GB/s: the "
        "factor is the median over all chains of a V100's estimated time and the measured one. Then what can be "
        f"moved while a stage runs is as much as there. Chains differ: their factors are {ratios[0]:.2f} to "
        f"{ratios[-1]:.2f}. The estimate is a roofline (`estimated_chains.py`), chosen so that two figures of the "
        f"thesis come out: {_anchors()}."
    )


# --- tables of stored results --------------------------------------------------------------------------------


def claims(figures: Sequence[str]) -> str:
    """What a figure's text says and what was found; figures that show the same are joined."""
    path = RESULTS / "paper-000.json"
    if not path.exists():
        return NOT_YET
    known = json.loads(path.read_text())
    found = {(c["about"], c["theirs"], c["ours"], c["verdict"]): None for f in figures for c in known[f]}
    rows = [[about, theirs.rstrip(" *"), ours, verdict.lower()] for about, theirs, ours, verdict in found]
    return markdown(["what", "paper", "ours", ""], rows)


def lower_sets(rows: list[dict[str, Any]]) -> str:
    lines = []
    for network in dict.fromkeys(row["network"] for row in rows):
        these = {row["way"]: row for row in rows if row["network"] == network}
        strategies = [row for way, row in these.items() if "DP" in way]
        ours, chen, chain = min(strategies, key=lambda row: row["gb"]), these["Chen's"], these["chain, least"]
        theirs = max(strategies, key=lambda row: row["paper_reduction"])
        cells = [f"{these['plain']['paper_gb']:.1f}", f"{theirs['paper_gb']:.1f}", percent(theirs["paper_reduction"])]
        cells += [f"{these['plain']['gb']:.1f}", f"{ours['gb']:.2f}", percent(ours["reduction"])]
        cells += [f"{chen['paper_gb']:.1f}", f"{chen['gb']:.2f}", f"{chain['gb']:.2f}", percent(chain["reduction"])]
        lines.append([network, *cells])
    header = ["GB", "paper: plain", "best", "less", "ours: plain", "best", "less", "paper: Chen's", "ours: Chen's"]
    return markdown([*header, "chain", "less"], lines)


def selection(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        if row["column"] is None:
            continue
        measured = row["measured"]
        plain = next(r for r in rows if (r["network"], r["batch"], r["column"]) == (*_place(row), "PyTorch"))
        paper = row["paper_mib"] if row["paper_mib"] == "OOM" else f"{row['paper_mib']:,}"
        at_phases = f"{max(measured['trace_bytes']) / MIB:,.0f}" if "trace_bytes" in measured else "–"
        ratios = [_ratio(row["paper_s"], plain["paper_s"])]
        ratios.append(_ratio(measured.get("seconds"), plain["measured"].get("seconds")))
        name = f"{row['network']}, {row['batch']}"
        lines.append([name, row["column"], f"{row['total_bytes'] / MIB:,.0f}", at_phases, paper, *ratios])
    header = [
        "network, batch",
        "method",
        "predicted, MiB",
        "measured, MiB",
        "paper, MiB",
        "time, paper",
        "time, measured",
    ]
    return markdown(header, lines)


def _place(row: dict[str, Any]) -> tuple[str, int]:
    return row["network"], row["batch"]


def _ratio(value: Any, unit: Any) -> str:
    known = isinstance(value, int | float) and isinstance(unit, int | float)
    return f"{value / unit:.2f} ×" if known else "–"


if __name__ == "__main__":
    sys.exit(main())
