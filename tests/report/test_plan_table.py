"""A plan for people: the figures add up to the plan's, and what repeats is one row."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from elbowroom.plan.plan import Plan  # noqa: E402
from elbowroom.plan.regions import ModulePlan, RegionPlan  # noqa: E402
from elbowroom.plan.words import copying_in_words, method_in_words, reason_in_words  # noqa: E402
from elbowroom.report.plan_table import MOST_ROWS, module_rows, unnamed_bytes  # noqa: E402
from elbowroom.report.session_report import session_text  # noqa: E402
from elbowroom.units import format_bytes, format_seconds  # noqa: E402


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Model(nn.Module):
    """Five blocks and a head, under attributes of the names people use."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(16) for _ in range(5))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return self.head(x).square().mean()


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """The same step with everything saved, and within less: one capture."""
    from elbowroom.api import fit

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELBOWROOM_CACHE", str(tmp_path_factory.mktemp("cache")))
        torch.manual_seed(0)
        batch = (torch.randn(64, 16),)
        model = Model()
        optimizer = torch.optim.Adam(model.parameters())
        session = fit(model, *batch, budget=2**40, optimizer=optimizer, times="estimate").elbowroom
        plain = session.prepare(batch, {}).plan
        session.set_budget(plain.resident_bytes + (plain.peak_bytes - plain.resident_bytes) * 2 // 3)
        tight = session.prepare(batch, {}).plan
        link = {"offload": "always", "link": "1MB/s", "host_budget": "64MiB"}
        session = fit(
            model, *batch, budget=tight.budget_bytes, optimizer=optimizer, times="estimate", **link
        ).elbowroom
        return {"plain": plain, "tight": tight, "moving": session.prepare(batch, {}).plan}


@pytest.mark.parametrize("which", ["plain", "tight", "moving"])
@pytest.mark.parametrize("depth", [None, 1, 2, 3, 9])
def test_rows_add_up_to_the_plan(plans, which, depth):
    plan = plans[which]
    rows = module_rows(plan, depth)
    saved = sum(row.saved_bytes for row in rows) + unnamed_bytes(plan)
    assert saved == sum(region.saved_bytes for region in plan.regions)
    extra = plan.time_s - plan.plain_time_s - plan.waits_s
    assert sum(row.rerun_time_s for row in rows) == pytest.approx(extra, abs=1e-12)
    assert sum(row.moved_bytes for row in rows) == plan.moved_bytes("to host")
    assert bool(plan.moved_bytes("to host")) == (which == "moving")
    forward = sum(module.forward_time_s for region in plan.regions for module in region.modules)
    assert sum(row.forward_time_s for row in rows) == pytest.approx(forward)
    assert unnamed_bytes(plan) >= 0


def test_the_text_says_what_the_plan_says(plans):
    plan = plans["tight"]
    text = plan.table()
    head, _, table = text.partition("\n\n")
    for size in (plan.budget_bytes, plan.peak_bytes, plan.plain_peak_bytes):
        assert f"{format_bytes(size)} ({size})" in head
    assert f"gradients of {format_bytes(plan.resident['gradients'])} included" in head
    for name in ("parameters", "optimizer", "batch"):
        said = "optimizer state" if name == "optimizer" else name
        assert f"{said} {format_bytes(plan.resident[name])}" in head
    assert f"{plan.extra_time:.1%}" in head
    rows = {name: rest.strip() for name, _, rest in (line.partition("  ") for line in head.splitlines())}
    region = plan.regions[0]
    assert rows["structure"] == f"chain: {region.structure.why}"
    assert rows["method"] == method_in_words(region.method)
    assert f"why {reason_in_words(region.why)} made for" in " ".join(head.split())  # over two lines
    assert region.why.startswith("fastest of ")
    assert "float32[64, 16] on cpu" in head
    total = table.splitlines()[-1].split("  ")
    cells = [cell.strip() for cell in total if cell.strip()]
    assert cells[:2] == ["total", format_bytes(plan.regions[0].saved_bytes)]
    assert cells[-1] == format_seconds(plan.time_s - plan.plain_time_s)


def test_the_text_says_what_moves(plans):
    plan = plans["moving"]
    text = plan.table()
    head, _, table = text.partition("\n\n")
    rows = {name: rest.strip() for name, _, rest in (line.partition("  ") for line in head.splitlines())}
    assert rows["moved"].startswith(f"{format_bytes(plan.moved_bytes('to host'))} to the host and back, ")
    assert rows["on the host"] == f"{format_bytes(plan.host_bytes)} ({plan.host_bytes}) of 64 MiB (67108864)"
    assert rows["copying"] == copying_in_words(plan.copying_s, plan.waits_s)
    assert rows["link"] == "1 MB/s to the host, 1 MB/s back"
    assert f"waiting for the link {format_seconds(plan.waits_s)}" in head
    assert any("Without a GPU values are copied at once" in note for note in plan.notes)
    assert "moved" in table.splitlines()[0]
    assert format_bytes(plan.moved_bytes("to host")) in table.splitlines()[-1]
    still = plans["tight"].table()
    for word in ("moved", "on the host", "copying", "waiting for the link"):
        assert word not in still


def test_the_report_of_a_session_says_what_is_on_the_host(plans):
    for which, plan in plans.items():
        verdict = session_text(SimpleNamespace(plan=plan, model=Model(), said=())).splitlines()[0]
        assert verdict.endswith(f", {format_bytes(plan.host_bytes)} on the host") == (which == "moving")


def test_the_picture_has_lanes_where_values_move(plans):
    names = (" computing │", "   to host │", " from host │")
    for which, plan in plans.items():
        rows = [row for row in plan.picture(width=40).splitlines() if row.startswith(names)]
        assert len(rows) == (3 if which == "moving" else 0)
        assert all(row.strip("█▓▒░ ") for row in rows)
        assert all(set(row[12:]) & set("█▓▒░") for row in rows)


def test_modules_that_move_differently_are_not_one_row():
    plan = made_up(("h.0", 8, 1.0), ("h.1", 8, 1.0), ("h.2", 8, 1.0))
    modules = plan.regions[0].modules
    moved = (modules[0], replace(modules[1], moved_bytes=4), modules[2])
    assert labels(replace(plan, regions=(replace(plan.regions[0], modules=moved),))) == [("h.0,2", 2), ("h.1", 1)]


def test_blocks_alike_are_one_row(plans):
    rows = {row.label: row for row in module_rows(plans["plain"], 2)}
    assert list(rows) == ["h.0–4", "head", "(the model)"]
    assert rows["h.0–4"].count == 5
    assert "h.0–4.up" in plans["plain"].table()
    assert "×5" in plans["plain"].table()


def test_every_module_is_in_some_row(plans):
    plan = plans["tight"]
    rows = module_rows(plan, 9)
    assert sum(row.count for row in rows) == len(plan.regions[0].modules)
    assert max(row.reruns for row in rows) == max(module.reruns for module in plan.regions[0].modules) > 0


def test_the_picture_reaches_the_predicted_peak(plans):
    for plan in plans.values():
        line, (region,) = plan.timeline, plan.regions
        assert line.peak_bytes == plan.peak_bytes
        assert len(line.computing) == len(region.forward_levels) + len(region.backward_levels)
        peak = f"peak {format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)}"
        assert plan.picture(width=40).splitlines()[-1].endswith(peak)


def test_a_saved_plan_looks_the_same(plans, tmp_path):
    plan = plans["tight"]
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.table() == plan.table()
    assert loaded.picture() == plan.picture()


def test_a_plan_of_before_they_said_why_still_loads(plans):
    data = plans["tight"].to_json()
    assert data["regions"][0].pop("structure")["kind"] == "chain"
    assert data["regions"][0].pop("why")
    old = Plan.from_json(data)
    assert old.regions[0].structure is None
    head = old.table().partition("\n\n")[0]
    assert "method" in head
    assert not any(line.startswith(("structure", "why")) for line in head.splitlines())


# --- plans made up -------------------------------------------------------------------------------------------


def made_up(*modules: tuple[str, int, float]) -> Plan:
    rows = tuple(ModulePlan(f"model.{name}", 1, saved, 0, time, 0.0) for name, saved, time in modules)
    saved = sum(row.saved_bytes for row in rows)
    region = RegionPlan("", "none", None, saved, saved, 1.0, saved, saved, 1.0, (1,), (saved, 5, 3), rows)
    return Plan(saved + 10, {"parameters": 10}, (region,), {"device": "cpu"}, "")


def labels(plan: Plan, depth: int | None = None) -> list[tuple[str, int]]:
    return [(row.label, row.count) for row in module_rows(plan, depth)]


def test_bytes_must_be_equal():
    plan = made_up(("h.0", 8, 1.0), ("h.1", 8, 1.0), ("h.2", 9, 1.0), ("h.3", 8, 1.0))
    assert labels(plan) == [("h.0–1,3", 3), ("h.2", 1)]


def test_times_may_differ_a_little():
    plan = made_up(("h.0", 8, 1.0), ("h.1", 8, 1.15), ("h.2", 8, 1.5))
    assert labels(plan) == [("h.0–1", 2), ("h.2", 1)]


def test_indices_inside_indices():
    plan = made_up(*((f"stage.{i}.block.{j}.conv", 8, 1.0) for i in range(3) for j in range(2)))
    assert labels(plan) == [("stage.0–2.block.0–1.conv", 6)]
    assert labels(plan, 2) == [("stage.0–2", 3)]


def test_what_a_module_does_itself_is_told_from_its_children():
    plan = made_up(("h.0.norm", 8, 1.0), ("h.0", 2, 1.0), ("h.1.norm", 8, 1.0), ("h.1", 2, 1.0))
    assert labels(plan) == [("h.0–1.norm", 2), ("h.0–1 itself", 2)]
    assert labels(plan, 2) == [("h.0–1", 2)]


def test_a_long_table_is_gathered():
    plan = made_up(*((f"part{i % 7}.layer{i}.conv", i, 1.0) for i in range(MOST_ROWS * 2)))
    assert len(module_rows(plan)) == 7
    assert len(module_rows(plan, 3)) == MOST_ROWS * 2


def test_graphs_one_after_another_keep_what_the_first_saved():
    one = made_up(("a", 8, 1.0))
    plan = replace(one, regions=(one.regions[0], one.regions[0]))
    levels = [span.bytes for span in plan.timeline.spans]
    assert levels == [11, 19, 26, 23, 21, 18, 15, 13]
    assert max(levels) == plan.peak_bytes
    assert labels(plan) == [("a", 1)]
