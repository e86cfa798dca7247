"""The command line: the machine interface to the letter, and kindness to people."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from elbowroom.problem import problem_from_json
from elbowroom.schedule import schedule_from_json, simulate

STAGES = [(1, 2, 4, 9, 4, 0, 1), (2, 4, 3, 8, 3, 0, 1), (2, 4, 2, 7, 2, 0, 1), (1, 2, 1, 2, 1, 0, 0)]
FIELDS = ("forward_time", "backward_time", "output_bytes", "saved_bytes", "gradient_bytes")
FIELDS += ("forward_overhead_bytes", "backward_overhead_bytes")
CHAIN = {
    "kind": "chain",
    "input_bytes": 5,
    "input_gradient_bytes": 5,
    "stages": [dict(zip(FIELDS, numbers, strict=True)) for numbers in STAGES],
}
JOIN = {"kind": "join", "lengths": [2, 3], "forward_time": 1, "backward_time": 1, "loss_time": 1}
JOIN["keep_gradients"] = [0, 0]


@pytest.fixture
def chain_file(tmp_path):
    path = tmp_path / "chain.json"
    path.write_text(json.dumps(CHAIN, indent=2))
    return path


def test_solve_json(elbowroom, chain_file):
    status, out, err = elbowroom("solve", chain_file, "--solver", "persistent", "--budget", 28, "--json")
    answer = json.loads(out)
    assert (status, err) == (0, "")
    assert answer["feasible"] is True
    assert answer["solver"] == "persistent"
    ran = simulate(problem_from_json(CHAIN), schedule_from_json(answer["schedule"]))
    assert (ran.time, ran.peak_bytes) == (answer["time"], answer["peak_bytes"])
    assert answer["peak_bytes"] <= 28


def test_infeasible_is_status_three_and_gives_the_least_budget(elbowroom, chain_file):
    status, out, err = elbowroom("solve", chain_file, "--solver", "floating", "--budget", 3, "--json")
    answer = json.loads(out)
    assert (status, err) == (3, "")
    assert answer["feasible"] is False
    least = answer["least_budget"]
    assert elbowroom("solve", chain_file, "--solver", "floating", "--budget", least, "--json").status == 0
    assert elbowroom("solve", chain_file, "--solver", "floating", "--budget", least - 1, "--json").status == 3


def test_list(elbowroom):
    status, out, _ = elbowroom("solve", "--list", "--json")
    methods = {entry["name"]: entry["kinds"] for entry in json.loads(out)}
    assert status == 0
    assert methods["join"] == ["join"]
    expected = "auto store-all sequential sqrt revolve persistent floating least-peak least-peak-quadratic"
    graphs = "lower-sets lower-sets-approx lower-sets-memory lower-sets-approx-memory lower-sets-chain chen acg milp"
    alone = "offload-greedy offload-dynprog offload-dynprog-simple vdnn tflms autoswap offload-best offload-milp"
    moving = {*alone.split(), "pofo", "autocapper", "opportunist", "combined"}
    others = {"checkpoint-sum", "join", "equiv-chain", "towers"}
    assert set(methods) == {*expected.split(), *graphs.split(), *moving, *others}
    assert all(methods[name] == ["chain"] for name in moving)
    assert "persistent" in elbowroom("solve", "--list").out


def test_alternatives_are_named_in_the_schedule(elbowroom, tmp_path):
    data = json.loads(json.dumps(CHAIN))
    for stage in data["stages"]:
        stage["alternatives"] = [{"saved_bytes": stage["output_bytes"], "backward_time": stage["backward_time"] + 1}]
    path = tmp_path / "chain.json"
    path.write_text(json.dumps(data))
    answer = json.loads(elbowroom("solve", path, "--budget", 24, "--solver", "persistent", "--json").out)
    assert any(len(op) == 4 and op[2:] == ["all", 1] for op in answer["schedule"])
    path.write_text(json.dumps({**data, "schedule": answer["schedule"]}))
    ran = json.loads(elbowroom("simulate", path, "--json").out)
    assert (ran["time"], ran["peak_bytes"]) == (answer["time"], answer["peak_bytes"])


def test_json_lines(elbowroom, tmp_path):
    lines = [
        json.dumps({**CHAIN, "budget": 28, "id": "first"}),
        "{broken",
        json.dumps({**CHAIN, "budget": 1, "slots": 5, "solver": "persistent"}),
        "",
        json.dumps({**CHAIN, "stages": []}),
        json.dumps({**JOIN, "budget": 6, "solver": "join"}),
        json.dumps(CHAIN),
    ]
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(lines))
    status, out, err = elbowroom("solve", path, "--json", "--budget", "1GiB")
    answers = [json.loads(line) for line in out.splitlines()]
    assert (status, err) == (0, "")
    assert [a.get("feasible") for a in answers] == [True, None, False, None, True, True]
    assert answers[0]["id"] == "first"
    assert answers[1]["error"].startswith("line 2:")
    assert answers[3]["error"].startswith("stages: is empty")
    assert answers[5]["solver"] == "store-all"


def test_standard_input(elbowroom, monkeypatch):
    text = "\n".join(json.dumps({**CHAIN, "budget": b}) for b in (27, 28, 29))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    status, out, _ = elbowroom("solve", "-", "--json")
    assert status == 0
    assert len(out.splitlines()) == 3


def test_simulate(elbowroom, tmp_path):
    path = tmp_path / "plan.json"
    whole = [["forward", i, "all"] for i in (1, 2, 3, 4)] + [["backward", i] for i in (4, 3, 2, 1)]
    path.write_text(json.dumps({**CHAIN, "schedule": whole}))
    answer = json.loads(elbowroom("simulate", path, "--json").out)
    assert answer["valid"] is True
    assert answer["time"] == 18
    assert elbowroom("simulate", path).out.count("peak") >= 1
    over = json.loads(elbowroom("simulate", path, "--budget", answer["peak_bytes"] - 1, "--json").out)
    assert over["valid"] is False
    path.write_text(json.dumps({**CHAIN, "schedule": whole[1:]}))
    status, out, _ = elbowroom("simulate", path, "--json")
    assert status == 0
    assert json.loads(out) == {
        "valid": False,
        "reason": "operation 0 (forward 2 all): the input of stage 2 is not in memory",
    }


def test_simulate_with_a_link(elbowroom, tmp_path):
    path = tmp_path / "plan.json"
    ops = [["forward", 1, "all"], ["forward", 2, "all"], ["offload", 1, "all"], ["forward", 3, "all"]]
    ops += [["forward", 4, "all"], ["backward", 4], ["prefetch", 1, "all"], ["backward", 3], ["backward", 2]]
    path.write_text(json.dumps({**CHAIN, "bandwidth": 9, "schedule": [*ops, ["backward", 1]]}))
    answer = json.loads(elbowroom("simulate", path, "--json").out)
    assert answer["valid"] is True
    assert answer["link_time"] == 2


def test_what_a_file_says_of_the_link_wins(elbowroom, tmp_path):
    path = tmp_path / "plan.json"
    ops = [["forward", 1, "all"], ["forward", 2, "all"], ["offload", 1, "all"], ["forward", 3, "all"]]
    ops += [["forward", 4, "all"], ["backward", 4], ["prefetch", 1, "all"], ["backward", 3], ["backward", 2]]
    options = ("--bandwidth", 9, "--duplex", 3, "--seconds-per-copy", 1, "--host-budget", "1KiB")
    path.write_text(json.dumps({**CHAIN, "schedule": [*ops, ["backward", 1]]}))
    answer = json.loads(elbowroom("simulate", path, "--json", *options).out)
    assert (answer["link_time"], answer["host_peak_bytes"]) == (4, 9)
    path.write_text(json.dumps({**CHAIN, "from_host": 3, "seconds_per_copy": 0, "schedule": [*ops, ["backward", 1]]}))
    assert json.loads(elbowroom("simulate", path, "--json", *options).out)["link_time"] == 1 + 3
    refused = json.loads(elbowroom("simulate", path, "--json", *options[:-1], 8).out)
    assert "waits for ever" in refused["reason"]


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (("solve",), "FILE"),
        (("solve", "/no/such/file", "--budget", 5), "/no/such/file: cannot be read"),
        (("solve", "/", "--budget", 5), "cannot be read"),
        (("solve", "FILE", "--budget", "lots"), "budget:"),
        (("solve", "FILE", "--budget", "-5"), "budget:"),
        (("solve", "FILE"), "budget: missing"),
        (("solve", "FILE", "--budget", 9, "--solver", "flaoting"), "did you mean 'floating'?"),
        (("solve", "FILE", "--budget", 9, "--solver", "join"), "solver: 'join' does not take a chain"),
        (("solve", "FILE", "--budget", 9, "--slots", 0, "--solver", "persistent"), "slots:"),
        (("solve", "FILE", "--budget", 9, "--slots", "x"), "--slots"),
        (("solve", "FILE", "--budget", 9, "--segments", 2), "segments: only 'sequential'"),
        (("solve", "FILE", "--budget", 99, "--segments", 9, "--solver", "sequential"), "segments: must be"),
        (("simulate", "FILE"), "schedule: missing"),
        (("simulate", "FILE", "--bandwidth", -1), "bandwidth:"),
        (("simulate", "FILE", "--duplex", "nan"), "duplex:"),
        (("solve", "FILE", "--budget", 9, "--host-budget", "lots"), "host_budget:"),
        (("dance",), "dance"),
        (("solve", "FILE", "--frobnicate"), "--frobnicate"),
    ],
)
def test_bad_requests_get_one_line_and_status_two(elbowroom, chain_file, arguments, culprit):
    status, out, err = elbowroom(*(chain_file if a == "FILE" else a for a in arguments))
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert culprit in err


@pytest.mark.parametrize("content", [b"", b"   \n ", b"\xff\xfe\x00", b"nonsense", b"[" * 100_000, b"9" * 9000])
def test_files_that_are_no_json(elbowroom, tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    status, out, err = elbowroom("solve", path, "--budget", 5, "--json")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_tables_for_people(elbowroom, chain_file):
    status, out, _ = elbowroom("solve", chain_file, "--budget", 28)
    assert status == 0
    for word in ("floating", "least budget", "recomputation", "peak", "forward 1", "█"):
        assert word in out


def test_it_runs_as_a_program(chain_file):
    done = subprocess.run(
        [sys.executable, "-m", "elbowroom", "solve", str(chain_file), "--budget", "3", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert json.loads(done.stdout)["feasible"] is False


# --- before any command ------------------------------------------------------------------------------------------


def test_a_bare_command_line_shows_what_there_is(elbowroom):
    """Nothing was asked, which is bad input; but what may be asked is the answer, and not a complaint."""
    done = elbowroom()
    assert done.status == 2
    assert done.err == ""
    assert all(command in done.out for command in ("Usage", "solve", "plan", "verify", "--version"))


def test_the_version_is_an_option_and_a_command(elbowroom):
    from elbowroom import __version__

    assert elbowroom("--version") == elbowroom("version") == (0, f"{__version__}\n", "")
