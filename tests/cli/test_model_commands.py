"""The commands that take a model: a factory is named, called, planned; mistakes get one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

FACTORIES = """
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(16, 5))


def build():
    net = model()
    batch = torch.randn(128, 16), torch.randint(5, (128,))
    return net, batch, cross_entropy, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def by_name():
    return model(), {"input": torch.randn(128, 16)}


class Tools:
    @staticmethod
    def build():
        return build()[:3]


def raises():
    raise ValueError("no data\\nhere")


def leaves():
    sys.exit("enough")


class Wrapped(nn.Module):  # no row of stages
    def __init__(self):
        super().__init__()
        self.inner = model()

    def forward(self, x):
        return self.inner(x)


def hooked():
    net = Wrapped()
    net.inner[0].register_full_backward_hook(lambda *_: None)
    return net, (torch.randn(128, 16),)


class Halves(nn.Module):  # two graphs
    def __init__(self):
        super().__init__()
        self.first, self.second = model()[:2], model()[2:]

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


def halves():
    return Halves(), (torch.randn(128, 16),)


def misfit():
    return model(), (torch.randn(128, 3),)


value = 3
returns = {
    "none": None,
    "model": model(),
    "one": (model(),),
    "five": (model(), (1,), None, None, None),
    "no_model": (3, (torch.randn(128, 16),)),
    "tensor": (model(), torch.randn(128, 16)),
    "empty": (model(), ()),
    "bad_loss": (model(), (torch.randn(128, 16),), 0.5),
    "bad_optimizer": (model(), (torch.randn(128, 16),), None, "sgd"),
}
for name, returned in returns.items():
    globals()["returns_" + name] = lambda returned=returned: returned
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's project, beside which measurements are kept."""
    where = tmp_path_factory.mktemp("project")
    (where / "factories_here.py").write_text(FACTORIES)
    (where / "broken_here.py").write_text("def build(:\n")
    (where / "needy_here.py").write_text("import no_such_package_anywhere\n")
    return where


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ELBOWROOM_CACHE", str(folder / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))


BUILD = "factories_here:build"
TIGHT = "260KiB"
FAST = ("--times", "estimate")


def test_plan_for_people_is_saved_and_explained(elbowroom, folder):
    status, out, err = elbowroom("plan", BUILD, "--budget", TIGHT, "--out", "plan.json")
    assert status == 0
    assert err == "plan: plan.json\n"
    for word in (
        "predicted peak",
        "plain peak",
        "extra time",
        "optimizer",
        "runs again",
        "total",
        "float32[128, 16]",
    ):
        assert word in out
    status, explained, err = elbowroom("explain", "plan.json")
    assert (status, err) == (0, "")
    assert explained.startswith(out)
    assert "forward → backward" in explained
    short = elbowroom("explain", folder / "plan.json", "--depth", 1).out
    assert len(short) < len(explained)
    saved = json.loads((folder / "plan.json").read_text())
    answer = json.loads(elbowroom("explain", "plan.json", "--json").out)
    assert answer == {"feasible": True, **saved}


def test_plan_for_machines(elbowroom):
    status, out, err = elbowroom("plan", BUILD, "--budget", TIGHT, *FAST, "--json")
    answer = json.loads(out)
    assert (status, err) == (0, "")
    assert answer["feasible"] is True
    assert answer["peak_bytes"] <= answer["budget_bytes"] == 260 * 1024
    assert answer["plain_peak_bytes"] > answer["budget_bytes"]
    assert answer["time_s"] > answer["plain_time_s"]
    assert answer["resident"]["optimizer"] == answer["resident"]["parameters"]


def test_a_budget_too_small_is_status_three(elbowroom):
    status, out, err = elbowroom("plan", BUILD, "--budget", "1KiB", *FAST, "--json")
    answer = json.loads(out)
    assert (status, err) == (3, "")
    assert answer["feasible"] is False
    assert {"what", "bytes"} == set(answer["largest"][0])
    least = answer["least_budget"]
    status, out, err = elbowroom("plan", BUILD, "--budget", least - 1, *FAST)
    assert (status, out) == (3, "")
    assert err.count("\n") == 1
    assert str(least) in err
    assert elbowroom("plan", BUILD, "--budget", least, *FAST).status == 0


def test_explain_a_factory(elbowroom, folder):
    pytest.importorskip("matplotlib")
    arguments = ("explain", BUILD, "--budget", TIGHT, *FAST)
    status, out, err = elbowroom(*arguments, "--source", "--plot", "memory.png")
    assert (status, err) == (0, "picture: memory.png\n")
    for word in ("def forward(arguments):", "def backward(arguments):", "again", "graph 1 of 1", "█"):
        assert word in out
    assert (folder / "memory.png").stat().st_size > 5_000
    answer = json.loads(elbowroom(*arguments, "--source", "--json").out)
    (program,) = answer["source"]
    assert program in out


def test_sweep(elbowroom, folder):
    pytest.importorskip("matplotlib")
    status, out, err = elbowroom("sweep", BUILD, "--points", 4, *FAST, "--json", "--plot", "curve.png")
    answer = json.loads(out)
    assert (status, err) == (0, "picture: curve.png\n")
    assert (folder / "curve.png").stat().st_size > 5_000
    points = answer["points"]
    assert len(points) == 4
    assert points[0]["budget"] == answer["least_budget"]
    assert [p["extra_time"] for p in points] == sorted((p["extra_time"] for p in points), reverse=True)
    assert points[-1]["extra_time"] == 0
    status, out, _ = elbowroom("sweep", BUILD, "--budgets", "1KiB,260KiB,1GiB", *FAST)
    assert status == 0
    assert "does not fit" in out
    assert "everything is saved" in out


def test_a_sweep_of_nothing_feasible(elbowroom):
    status, out, _ = elbowroom("sweep", BUILD, "--budgets", "1KiB,2KiB", *FAST, "--json")
    assert status == 3
    assert [point["feasible"] for point in json.loads(out)["points"]] == [False, False]


@pytest.mark.parametrize("factory", [BUILD, "factories_here:by_name", "factories_here:Tools.build"])
def test_verify(elbowroom, factory):
    status, out, err = elbowroom("verify", factory, "--budget", TIGHT, *FAST, "--json")
    answer = json.loads(out)
    assert (status, err) == (0, "")
    assert answer["identical"] is True
    assert answer["within_budget"] is True
    assert answer["compared"] >= 26
    assert answer["measured_peak_bytes"] <= answer["budget"]
    assert abs(answer["measured_peak_bytes"] - answer["predicted_peak_bytes"]) < 1024


def test_a_model_of_two_graphs(elbowroom):
    """The figures add up over the graphs, and the measured peak stays within the budget."""
    status, out, err = elbowroom("explain", "factories_here:halves", "--budget", TIGHT, *FAST, "--source")
    assert (status, err) == (0, "")
    for word in ("graphs", "2, planned together", "first.0", "graph 2 of 2"):
        assert word in out
    status, out, err = elbowroom("verify", "factories_here:halves", "--budget", TIGHT, *FAST, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["within_budget"] is True


def test_verify_for_people(elbowroom):
    status, out, _ = elbowroom("verify", BUILD, "--budget", TIGHT, *FAST)
    assert status == 0
    for word in ("identical to eager", "predicted peak", "measured peak", "within budget"):
        assert word in out


def test_verify_finds_a_step_that_differs_or_takes_too_much(elbowroom, monkeypatch):
    from elbowroom.errors import Mismatch
    from elbowroom.session import checking

    def differs(*_):
        raise Mismatch("the planned step differs from plain execution: the gradient of 0.up.weight")

    monkeypatch.setattr(checking, "verify_step", differs)
    monkeypatch.setattr(checking, "measured_step", lambda *_: checking.Taken(2**20, 0))
    status, out, _ = elbowroom("verify", BUILD, "--budget", TIGHT, *FAST, "--json")
    answer = json.loads(out)
    assert status == 1
    assert answer["identical"] is False
    assert "0.up.weight" in answer["difference"]
    assert answer["within_budget"] is False
    out = elbowroom("verify", BUILD, "--budget", TIGHT, *FAST).out
    assert "over budget by" in out


@pytest.mark.parametrize(
    ("factory", "culprit"),
    [
        ("factories_here", "FACTORY: must be PACKAGE.MODULE:FACTORY"),
        ("factories here:build", "FACTORY: must be PACKAGE.MODULE:FACTORY"),
        ("nowhere_to_be_found:build", "there is no module 'nowhere_to_be_found'"),
        ("factories_here.inside:build", "there is no module 'factories_here.inside'"),
        ("needy_here:build", "importing needy_here raised ModuleNotFoundError: No module named 'no_such_package"),
        ("broken_here:build", "importing broken_here raised SyntaxError"),
        ("factories_here:biuld", "has no 'biuld'; did you mean 'build'?"),
        ("factories_here:value", "is not callable: it is an int"),
        ("factories_here:raises", "the factory raised ValueError: no data here"),
        ("factories_here:leaves", "the factory raised SystemExit: enough"),
        ("factories_here:Block", "must return (model, batch)"),
        ("factories_here:returns_none", "not None"),
        ("factories_here:returns_model", "not a Sequential"),
        ("factories_here:returns_one", "not a tuple of 1"),
        ("factories_here:returns_five", "not a tuple of 5"),
        ("factories_here:returns_no_model", "its model is an int"),
        ("factories_here:returns_tensor", "its batch must be a tuple or a mapping of arguments, not a Tensor"),
        ("factories_here:returns_empty", "its batch is empty"),
        ("factories_here:returns_bad_loss", "its loss must be callable or None, not a float"),
        ("factories_here:returns_bad_optimizer", "its optimizer must be a torch.optim.Optimizer or None, not a str"),
        ("factories_here:hooked", "its Wrapped cannot be planned: module 'inner.0' has a backward hook"),
        ("factories_here:misfit", "its step fails without elbowroom too: RuntimeError"),
    ],
)
def test_bad_factories_get_one_line_and_status_two(elbowroom, factory, culprit):
    status, out, err = elbowroom("plan", factory, "--budget", TIGHT, *FAST)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert culprit in err


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (("plan", BUILD, "--budget", TIGHT, "--offload", "sometimes"), "offload: must be never, auto or always"),
        (("explain", BUILD, "--budget", TIGHT, "--host-budget", "much"), "host_budget:"),
        (("sweep", BUILD, "--link", "fast"), "link: must be bytes per second such as '12GB/s'"),
        (("verify", BUILD, "--budget", TIGHT, "--link", "12GB"), "link: must be bytes per second"),
        (("plan", "nowhere_to_be_found:build", "--budget", TIGHT, "--link", "0B/s"), "link:"),
        (("explain", "plan.json", "--offload", "always"), "offload: a saved plan moves what it moves"),
        (("explain", "plan.json", "--link", "1GB/s"), "offload: a saved plan moves what it moves"),
        (("plan",), "FACTORY"),
        (("plan", BUILD), "--budget"),
        (("plan", BUILD, "--budget", "lots"), "budget:"),
        (("plan", BUILD, "--budget", "50%"), "no device is known here"),
        (("plan", BUILD, "--budget", TIGHT, "--times", "guess"), "times:"),
        (("plan", BUILD, "--budget", TIGHT, "--out", "no/such/folder.json"), "--out:"),
        (("plan", BUILD, "--budget", TIGHT, "--depth", 0), "--depth"),
        (("explain", BUILD), "budget: missing"),
        (("explain", "no-such-plan.json"), "cannot be read"),
        (("explain", "factories_here.py"), "cannot be read"),
        (("explain", "factories_here.py", "--source"), "--source: needs a factory"),
        (("explain", "factories_here.py", "--budget", 5), "budget: a saved plan has one"),
        (("sweep", BUILD, "--budgets", "4GiB,lots"), "budgets:"),
        (("sweep", BUILD, "--budgets", "50%"), "no device is known here"),
        (("sweep", BUILD, "--points", 1), "--points"),
        (("verify", BUILD), "--budget"),
        (("demo", "--plot", "no/such/folder.png"), "--plot:"),
    ],
)
def test_bad_requests_get_one_line_and_status_two(elbowroom, arguments, culprit):
    status, out, err = elbowroom(*arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert culprit in err


def test_a_file_that_is_json_but_no_plan(elbowroom, folder):
    (folder / "other.json").write_text('{"kind": "chain"}')
    status, _, err = elbowroom("explain", "other.json")
    assert status == 2
    assert err.startswith("elbowroom: plan: this is not a plan")


WITHOUT_TORCH = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Hidden())
from elbowroom.cli.app import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("plan", BUILD, "--budget", "1GiB"), 2, "install elbowroom with torch"),
        (("demo",), 2, "install elbowroom with torch"),
        (("version",), 0, ""),
        (("--version",), 0, ""),
        (("solve", "--list", "--json"), 0, ""),
    ],
)
def test_without_torch(arguments, status, said):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ},
    )
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert done.stderr.count("\n") == (1 if status else 0)
