"""Plan files: what is written is read back; older files still load; what is malformed is named."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elbowroom.errors import InputError
from elbowroom.plan.moved import MovedValue, MoveSpan, Traffic
from elbowroom.plan.plan import Plan
from elbowroom.plan.planner import Planner
from elbowroom.plan.regions import Order, RegionPlan, region_plan
from elbowroom.problem import Platform
from elbowroom.step.operations import Await, Offload, Prefetch, Release, operations_from_json
from elbowroom.step.program import make_program
from elbowroom.step.referee import predict
from moving import moving
from stepgraphs import graphs, orders, surroundings


@st.composite
def plans(draw) -> Plan:
    graph = draw(graphs(most=8))
    planner = Planner(graph, draw(surroundings()))
    planned = planner.everything
    if draw(st.booleans()):
        planned = replace(planned, measured_peak_bytes=draw(st.integers(0, 99)), recorded=draw(st.booleans()))
    platform = None
    if draw(st.booleans()):
        program = draw(moving(graph, make_program(graph, draw(orders(graph)))))
        platform = draw(st.sampled_from((Platform(2), Platform(to_host=0.5, seconds_per_copy=1, host_bytes=10**6))))
        prediction = predict(graph, program, planner.around, platform)
        planned = replace(planned, program=program, prediction=prediction, platform=platform)
    region = region_plan(planner, planned, "a fingerprint")
    resident, notes = {"parameters": 3, "gradients": 3}, ("a note",)
    return Plan(10**6, resident, (region,), {"device": "cpu"}, "float32[2]", notes, platform=platform)


@given(plans())
def test_what_is_written_is_read_back(plan):
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@given(plans())
def test_a_file_of_before_plans_told_what_moves_still_loads(plan):
    data = json.loads(json.dumps(plan.to_json()))
    for name in ("link", "host_budget_bytes", "host_bytes", "moved_bytes", "copying_s", "waits_s"):
        del data[name]
    for region in data["regions"]:
        del region["traffic"]
        for module in region["modules"]:
            del module["moved_bytes"]
    old = Plan.from_json(data)
    assert (old.platform, old.host_bytes, old.moved_bytes("to host")) == (None, 0, 0)
    assert old.regions[0].program == plan.regions[0].program


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
    "traffic",
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


def moving_plan() -> dict:
    """A plan in which one value moves, as a file says it."""
    traffic = Traffic(
        8,
        2.0,
        0.5,
        (1,),
        (MovedValue(0, "a", 8),),
        (MoveSpan("to host", 0, 8, 1, 1), MoveSpan("from host", 0, 8, 2, 2)),
    )
    region = RegionPlan("", "made up", None, 9, 1, 3.5, 9, 9, 3.0, (8, 9), (1,), (), traffic=traffic)
    plan = Plan(10**6, {}, (region,), {"device": "cpu"}, "", platform=Platform(to_host=4.0, host_bytes=100))
    return json.loads(json.dumps(plan.to_json()))


DAMAGED = [
    ("link", 3),
    ("link.to_host", "fast"),
    ("link.to_host", -1),
    ("link.to_host", 0),
    ("link.duplex", True),
    ("link.seconds_per_copy", float("nan")),
    ("link.speed", 3),
    ("host_budget_bytes", -1),
    ("host_budget_bytes", 0.5),
    ("regions[0].traffic", []),
    ("regions[0].traffic.host_bytes", -8),
    ("regions[0].traffic.copying_s", None),
    ("regions[0].traffic.waits_s", float("inf")),
    ("regions[0].traffic.waits_at", 1),
    ("regions[0].traffic.waits_at[0]", 3),
    ("regions[0].traffic.values", {}),
    ("regions[0].traffic.values[0]", 7),
    ("regions[0].traffic.values[0].module", None),
    ("regions[0].traffic.values[0].bytes", 2**70),
    ("regions[0].traffic.transfers[0].direction", "up"),
    ("regions[0].traffic.transfers[1].begins", -1),
    ("regions[0].traffic.transfers[1].ends", 3),
    ("regions[0].traffic.transfers[1].ends", 1),
    ("regions[0].traffic.transfers[1].value", "0"),
]


@pytest.mark.parametrize(("field", "value"), DAMAGED)
def test_what_is_wrong_with_moves_is_named(field, value):
    data = moving_plan()
    assert json.loads(json.dumps(Plan.from_json(data).to_json())) == data
    *path, last = re.findall(r"\w+", field)
    place = data
    for key in path:
        place = place[int(key) if key.isdecimal() else key]
    place[int(last) if last.isdecimal() else last] = value
    with pytest.raises(InputError) as refusal:
        Plan.from_json(data)
    assert refusal.value.field == f"plan.{field}"


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
