"""The papers' figures: networks are the right ones, chains and answers are kept as data, the page is made."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elbowroom.solve import METHODS, solve
from problems import random_chain

PAPERS = Path(__file__).parents[1] / "benchmarks" / "papers"


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(PAPERS)
    return importlib.import_module


PARAMETERS = {  # of torchvision's models, without Inception's additional loss
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "densenet121": 7_978_856,
    "densenet161": 28_681_000,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "inception_v3": 23_834_568,
}


def test_networks_have_torchvisions_parameters(papers):
    torch = pytest.importorskip("torch")
    networks = papers("vision_networks")
    with torch.device("meta"):
        for name, count in PARAMETERS.items():
            stages = networks.BUILDERS[name]()
            assert sum(p.numel() for stage in stages for p in stage.parameters()) == count, name


def test_estimated_sizes_are_the_allocators(papers, tmp_path):
    """A stage's saved set on the CPU, as its allocator reports it, but for what rounding up to blocks adds."""
    pytest.importorskip("torch")
    measured, estimated, files = papers("measured_chains"), papers("estimated_chains"), papers("chain_files")
    (setting, _) = papers("vision_settings").TINY
    found = files.ChainFile("measured", "here", {}, {})
    found.chains[setting.name] = measured.measured(setting, measured.Cpu(), 1, {})
    guess = estimated.estimated(setting)
    for ours, there in zip(guess, found.chains[setting.name], strict=True):
        assert abs(ours.saved_bytes - there.saved_bytes) <= 512 * 16
        assert ours.output_bytes == there.output_bytes
    found.save(tmp_path / "chains.json")
    again = files.ChainFile.load(tmp_path / "chains.json")
    assert again.chain(setting.name).output_bytes == found.chain(setting.name).output_bytes
    assert len(again.chain(setting.name)) == len(guess) - 1


def test_the_thesis_figures_come_out_of_the_estimate(papers):
    """225 GiB and 1.18 images a second with everything saved: 001 §2.4.5."""
    files = papers("chain_files")
    chain = files.ChainFile.load(files.ESTIMATED).chain("resnet1001 224 8")
    assert solve(chain, None, "store-all").peak_bytes / 2**30 == pytest.approx(225, rel=0.01)
    assert 8 / files.seconds_of(chain) == pytest.approx(1.18, rel=0.06)


def test_rounded_programs_become_valid_schedules(papers):
    """Whatever is kept: a valid schedule, not faster than everything once, and as fast where there is no limit."""
    checkmate = papers("checkmate").checkmate
    rng = random.Random(3)
    for _ in range(30):
        chain = random_chain(rng, rng.randint(2, 7))
        # What costs no time may run as often as it likes, and makes others run again that do.
        stages = [replace(stage, forward_time=stage.forward_time + 1) for stage in chain.stages]
        chain = replace(chain, stages=tuple(stages))
        once = sum(stage.forward_time + stage.backward_time for stage in chain.stages)
        found = [checkmate(chain, budget) for budget in (20, 60, 10**6)]
        assert all(answer is None or answer[0] >= once * (1 - 1e-9) for answer in found)
        assert found[-1] is not None
        assert found[-1][0] == pytest.approx(once)


def test_answers_are_kept_and_belong_to_their_chains(papers, tmp_path):
    answers, files = papers("answers"), papers("chain_files")
    chains = tmp_path / "chains.json"
    chains.write_text(files.ESTIMATED.read_text())
    name = "resnet18 224 32"
    question = answers.Question(name, "persistent", 600 * 2**20, slots=50)
    unknown = answers.Question(name, "no such method", 1)
    kept = answers.Answers.load(tmp_path / "answers.json", chains)
    kept.ask([question, unknown], "two", jobs=1)
    again = answers.Answers.load(tmp_path / "answers.json", chains)
    assert again[question] == kept[question]
    assert again[question].peak_bytes <= 600 * 2**20
    assert again[unknown] is None
    chains.write_text(chains.read_text().replace("estimated", "measured"))
    answers.digest.cache_clear()
    assert answers.Answers.load(tmp_path / "answers.json", chains)[question] is None


def test_offloading_figures_are_drawn_and_told(tmp_path):
    pytest.importorskip("matplotlib")
    answers = tmp_path / "answers.json"
    command = [sys.executable, PAPERS / "offloading.py", "--networks", "resnet18", "--sides", "500", "--jobs", "1"]
    command += ["--methods", "persistent", "offload-greedy", "vdnn", "--answers", answers, "--plot-dir", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3.8 ResNet, 500²" in done.stdout
    assert (tmp_path / "001-3.8.png").stat().st_size > 1000
    asked = {key.split("|")[1] for key in json.loads(answers.read_text())["answers"]}
    assert asked == {"persistent", "offload-greedy", "vdnn"} & set(METHODS)


def test_what_no_schedule_is_below_is_proven_and_kept(papers, tmp_path):
    """A ResNet-18 whose memory is so short that nothing that only offloads is near the bound of the thesis."""
    answers, points, proofs = papers("answers"), papers("offloading_points"), papers("offloading_proofs")
    chains = papers("chain_files").ESTIMATED
    study = points.Study(answers.Answers.load(tmp_path / "answers.json", chains), ["resnet18"], [224])
    (case,) = study.cases()
    point, *_ = case.limits(points.LIMITS)
    study.answers.ask([study.question(point, "offload-best")], "one", jobs=1)
    proofs.Proofs.load(tmp_path / "proofs.json", chains).ask(study, seconds=20, again=False)
    kept = proofs.Proofs.load(tmp_path / "proofs.json", chains)
    assert 1.2 * study.bound(point) < kept.of(study, point) <= study.answer(point, "offload-best").time
    assert "at 1 of them" in proofs.summary(study, kept)
    assert "resnet18, 224²" in proofs.table(study, kept)


def test_seconds_of_planning_are_measured(tmp_path):
    rows = tmp_path / "rows.json"
    command = [sys.executable, PAPERS / "offloading_seconds.py", "--measure", "--stages", "6", "--json", rows]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "combined" in done.stdout
    assert {row["stages"] for row in json.loads(rows.read_text())["rows"]} == {6}


def test_runs_are_told_in_words(papers):
    """Rows whose operations are short apart from those whose are long."""
    pytest.importorskip("torch")
    row = {"predicted_s": 1.0, "predicted_bytes": 100, "peak_bytes": 99, "operations": 1000}
    rows = [
        {**row, "how": "sequential, 2", "seconds": 1.01},
        {**row, "how": "persistent, 30%", "seconds": 1.02},
        {**row, "how": "revolve, 30%", "seconds": 1.2, "operations": 2000},
    ]
    told = papers("rotor_runs").in_words(rows)
    for part in ("−1.0 % to −1.0 %", "+1.0 % to +1.0 %", "+2.0 % to +2.0 %", "+20.0 % to +20.0 %", "0.60 to 0.60 ms"):
        assert part in told


def test_the_page_has_a_place_for_everything(papers, tmp_path):
    page = papers("page")
    made = page.page(page.TEMPLATE.read_text(), tmp_path)
    assert "{{" not in made
    assert "![" not in made  # nothing is drawn in an empty folder
    for figure in ("2.4", "2.15", "3.5", "3.20", "4.2", "4.5", "Fig. 3:", "Fig. 5–9"):
        assert figure in made


@pytest.mark.slow
@pytest.mark.parametrize("script", ["rotor_runs.py", "batch_sizes.py"])
def test_scripts_for_the_device_can_be_tried(script, tmp_path):
    pytest.importorskip("torch")
    rows = tmp_path / "rows.json"
    more = ["--seconds", "5"] if script == "batch_sizes.py" else []
    command = [sys.executable, PAPERS / script, "--tiny", "--json", rows, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(rows.read_text())["rows"][0]["seconds"] > 0
