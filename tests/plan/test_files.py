"""Plan files: what is written is read back; older files still load; what is malformed is named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elbowroom.errors import InputError
from elbowroom.plan.plan import Plan
from elbowroom.plan.planner import Planner
from elbowroom.plan.regions import Order, region_plan
from elbowroom.step.operations import Await, Offload, Prefetch, Release, operations_from_json
from elbowroom.step.program import make_program
from moving import moving
from stepgraphs import graphs, orders, surroundings


@st.composite
def plans(draw) -> Plan:
    graph = draw(graphs(most=8))
    planner = Planner(graph, draw(surroundings()))
    planned = planner.everything
    if draw(st.booleans()):
        planned = replace(planned, measured_peak_bytes=draw(st.integers(0, 99)), recorded=draw(st.booleans()))
    region = region_plan(planner, planned, "a fingerprint")
    if draw(st.booleans()):
        region = replace(region, program=draw(moving(graph, make_program(graph, draw(orders(graph))))))
    return Plan(10**6, {"parameters": 3, "gradients": 3}, (region,), {"device": "cpu"}, "float32[2]", ("a note",))


@given(plans())
def test_what_is_written_is_read_back(plan):
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@given(plans())
def test_a_measured_peak_stands_beside_the_predicted_one(plan):
    (region,) = plan.to_json()["regions"]
    assert region["predicted_peak_bytes"] == plan.regions[0].predicted_peak_bytes
    assert region["measured_peak_bytes"] == plan.regions[0].measured_peak_bytes
    expected = region["measured_peak_bytes"]
    expected = region["predicted_peak_bytes"] if expected is None else expected
    assert plan.peak_bytes == plan.resident_bytes + max(0, expected)


def first_format(plan: Plan) -> dict:
    """The plan as format 1 wrote it."""
    data = plan.to_json() | {"format": 1}
    regions = []
    for region, written in zip(plan.regions, data["regions"], strict=True):
        old = {name: written[name] for name in written if name not in NEW_FIELDS}
        old["order"] = [run.op for run in region.program.backward_runs]
        old["peak_bytes"] = region.peak_bytes
        old["timeline"] = [*region.forward_levels, *region.backward_levels]
        old["apart"] = region.program.copies_parts
        names = {"reruns": "replays", "rerun_time_s": "replay_time_s"}
        old["modules"] = [{names.get(k, k): v for k, v in module.items()} for module in written["modules"]]
        regions.append(old)
    return data | {"regions": regions}


NEW_FIELDS = {
    "program", "predicted_peak_bytes", "measured_peak_bytes", "recorded", "forward_levels", "backward_levels",
}  # fmt: skip


@given(plans().filter(lambda plan: not plan.regions[0].program.moves))
def test_the_first_format_still_loads(plan):
    plan = replace(plan, regions=(replace(plan.regions[0], recorded=False),))
    if len(plan.regions[0].program.backward) + 1 != len(plan.regions[0].backward_levels):
        return  # another program was put in its place
    loaded = Plan.from_json(json.loads(json.dumps(first_format(plan))))
    (old,), (new,) = loaded.regions, plan.regions
    if new.program.backward:
        assert old.program == Order(tuple(run.op for run in new.program.backward_runs), new.program.copies_parts)
    assert (old.forward_levels, old.backward_levels) == (new.forward_levels, new.backward_levels)
    assert old.modules == new.modules
    assert loaded.peak_bytes == plan.peak_bytes
    assert Plan.from_json(json.loads(json.dumps(loaded.to_json()))) == loaded  # and is written in the new one


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (3, "plan: must be an object"),
        ({"kind": "plan", "format": 9}, "plan: this is not a plan of a format that is known (1 and 2)"),
        ({"kind": "plan", "format": 2}, "plan.regions: missing"),
        ({"kind": "plan", "format": 2, "regions": []}, "plan.regions: is empty"),
        ({"kind": "plan", "format": 2, "regions": [{}], "budget_bytes": -1}, "plan.budget_bytes: must be between"),
    ],
)
def test_what_is_wrong_is_named(data, said):
    with pytest.raises(InputError) as refusal:
        Plan.from_json(data)
    assert str(refusal.value).startswith(said)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x00"])
def test_a_file_that_is_no_json_is_refused_in_a_line(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(InputError, match="cannot be read"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("operation", "written"),
    [
        (Offload(7), ["offload", 7]),
        (Release(7), ["release", 7]),
        (Prefetch(7), ["prefetch", 7]),
        (Prefetch(7, keeps=True), ["prefetch", 7, "keep"]),
        (Await(7), ["await", 7]),
    ],
)
def test_moves_are_short_lists(operation, written):
    assert operation.to_json() == written
    assert operations_from_json([written], "field") == (operation,)


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ("run", "f[0]"),
        (["run"], "f[0]"),
        (["walk", 3], "f[0][0]"),
        (["run", -1], "f[0][1]"),
        (["run", True], "f[0][1]"),
        (["run", 1, {"gain": True}], "f[0][2]"),
        (["run", 1, {"again": 1}], "f[0][2].again"),
        (["run", 1, {"frees": [1, "2"]}], "f[0][2].frees[1]"),
        (["run", 1, {"reuses": -3}], "f[0][2].reuses"),
        (["offload", 1, 2], "f[0]"),
        (["prefetch", 1, "keeps"], "f[0]"),
    ],
)
def test_malformed_operations_are_named(item, field):
    with pytest.raises(InputError) as refusal:
        operations_from_json([item], "f")
    assert refusal.value.field == field
